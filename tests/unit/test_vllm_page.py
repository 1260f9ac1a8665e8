"""The two configurations that docs/vllm.md gives to paste are taken as they are, and fit each other."""

import json
import re
from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.handoff import create_identity
from bridge.vllm.config import ConnectorConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text()


@pytest.fixture
def pasted(tmp_path):
    """By kv_role, with the folder of the certificates replaced."""
    for name in ("prefill-0", "decode-0"):
        create_identity(name, tmp_path)
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE.replace("/etc/kvbridge", str(tmp_path)), re.DOTALL)]
    assert len(blocks) == 2
    return {block["kv_role"]: (block, ConnectorConfig.parse(block["kv_connector_extra_config"])) for block in blocks}


def test_they_are_whole_and_fit_each_other(pasted):
    (_, prefiller), (given, decoder) = pasted["kv_producer"], pasted["kv_consumer"]
    prefiller.check_role(produces=True, consumes=False)
    decoder.check_role(produces=False, consumes=True)
    assert decoder.peers[prefiller.identity.name].port == prefiller.port
    assert set(prefiller.peers) == {decoder.identity.name}
    assert prefiller.agent == decoder.agent == "stream"
    assert prefiller.data_port
    assert given["kv_load_failure_policy"] == "recompute"
    for name in (str(prefiller.port), str(prefiller.data_port)):
        assert name in re.search(r"Open TCP .*", PAGE).group()


def test_the_table_names_every_key(pasted):
    from bridge.vllm.config import Entries

    table = PAGE[PAGE.index("## Keys of") : PAGE.index("## What the router does")]
    assert set(re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)) <= {f"`{name}`" for name in Entries.__struct_fields__} | {
        "`certificate`, `private_key`"
    }
    for name in Entries.__struct_fields__:
        assert f"`{name}`" in table


def check(tmp_path, block, capsys, **extra):
    """What `kvbridge check` makes of a configuration: its exit code, and what it says."""
    given = {**block, "kv_connector_extra_config": {**block["kv_connector_extra_config"], **extra}}
    (tmp_path / "given.json").write_text(json.dumps(given))
    code = main(["check", str(tmp_path / "given.json")])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_they_are_right_by_the_command_that_the_page_gives(pasted, tmp_path, capsys):
    assert "kvbridge check prefiller.json" in PAGE
    assert check(tmp_path, pasted["kv_producer"][0], capsys) == (0, "right: prefill-0, kv_producer, agent stream; peers decode-0\n")
    assert check(tmp_path, pasted["kv_consumer"][0], capsys) == (0, "right: decode-0, kv_consumer, agent stream; peers prefill-0\n")


def test_what_cannot_start_is_not_right(pasted, tmp_path, capsys):
    prefiller, decoder = pasted["kv_producer"][0], pasted["kv_consumer"][0]
    own = prefiller["kv_connector_extra_config"]["certificate"]
    for block, changed, said in (
        (prefiller, {"port": 0}, "port is missing"),
        (prefiller, {"peers": {"decode-0": {"certificate": own}}}, "the peer 'decode-0' has this engine's own certificate"),
        (prefiller, {"peers": {"prefill-0": {"certificate": own}}}, "peers names 'prefill-0', which is this engine itself"),
        (prefiller, {"lisen": "0.0.0.0"}, "did you mean 'listen'"),
        (decoder, {"peers": {"prefill-0": {"certificate": own}}}, "peer 'prefill-0' has no host and port"),
        ({**decoder, "kv_role": "kv_consummer"}, {}, "kv_role is 'kv_consummer'; choose one of"),
        ({**decoder, "kv_connector": "NixlConnector"}, {}, "kv_connector is 'NixlConnector'"),
        ({**decoder, "kv_role": ["kv_both"]}, {}, "kv_role is ['kv_both']; choose one of kv_producer"),
        ({**decoder, "kv_role": "x" * 100_000}, {}, "kv_role is 'xxx"),
        ({key: decoder[key] for key in decoder if key != "kv_role"}, {}, "kv_role is missing; choose one of"),
        ({**decoder, "kv_connector": "x" * 100_000}, {}, "kv_connector is 'xxx"),
        ({**decoder, "kv_connector_module_path": "x" * 100_000}, {}, "kv_connector_module_path 'xxx"),
        ({**decoder, "kv_load_failure_polcy": "fail"}, {}, "did you mean 'kv_load_failure_policy'"),
        ({**decoder, "peers": {}}, {}, "it belongs into kv_connector_extra_config"),
        ({**decoder, "kv_rank": 0}, {}, "vLLM's keys are kv_connector, "),
        ({**decoder, "x" * 100_000: 0}, {}, "no key 'xxx"),
        ({**decoder, "kv_load_failure_policy": "bogus"}, {}, "kv_load_failure_policy is 'bogus'; choose one of recompute, fail"),
        ({**decoder, "kv_load_failure_policy": None}, {}, "kv_load_failure_policy is None"),
        ({**decoder, "kv_port": "abc"}, {}, "kv_port is 'abc'; give a whole number"),
        ({**decoder, "kv_buffer_device": None}, {}, "kv_buffer_device is None; give a text"),
        ({**decoder, "enable_permute_local_kv": "perhaps"}, {}, "enable_permute_local_kv is 'perhaps'; give true or false"),
        ({**decoder, "engine_id": 5}, {}, "engine_id is 5; give a text"),
        ({**decoder, "engine_id": "\ud800"}, {}, "half of a surrogate pair"),
    ):
        code, words = check(tmp_path, block, capsys, **changed)
        assert code == 2
        assert said in words
        assert words.startswith("kvbridge check: ")
        assert words.count("\n") == 1
        assert len(words) < 1000


def test_what_vllm_takes_is_right(pasted, tmp_path, capsys):
    for changed in (
        {"kv_port": "5"},
        {"kv_port": 5.0},
        {"engine_id": None},
        {"enable_permute_local_kv": "true"},
        {"kv_buffer_device": "cpu"},
    ):
        code, words = check(tmp_path, {**pasted["kv_consumer"][0], **changed}, capsys)
        assert (code, words) == (0, "right: decode-0, kv_consumer, agent stream; peers prefill-0\n")


def test_what_may_be_a_mistake_is_noted(pasted, tmp_path, capsys, monkeypatch):
    """All of it passed without a word, and failed at the start of an engine or at the first request."""
    decoder, _ = pasted["kv_consumer"]
    peers = decoder["kv_connector_extra_config"]["peers"]
    create_identity("another", tmp_path)
    cases = {
        "no device 'cudda:1' is installed here": {"device": "cudda:1"},
        "no device 'cuda:x' is installed here": {"device": "cuda:x"},
        "no device ':' is installed here": {"device": ":"},
        "listen is 203.0.113.7, which is no address of this host": {"listen": "203.0.113.7"},
        "the certificate of peer 'prefil-0' was made for 'prefill-0'": {"peers": {"prefil-0": peers["prefill-0"]}},
        "the certificate of this engine was made for 'another'": {
            "certificate": str(tmp_path / "another.crt"),
            "private_key": str(tmp_path / "another.key"),
        },
    }
    code, said = check(tmp_path, decoder, capsys, listen="127.0.0.1")
    assert (code, "note" in said) == (0, False), said
    for note, extra in cases.items():
        code, said = check(tmp_path, decoder, capsys, **extra)
        assert code == 0, said
        assert f"note: {note}" in said, said
    (tmp_path / "decode-0.key").chmod(0o644)
    code, said = check(tmp_path, decoder, capsys)
    assert (code, "decode-0.key (mode 644); chmod 600\n" in said) == (0, True), said
    monkeypatch.setattr("bridge.transfer.choose.installed", lambda kind: False)
    code, said = check(tmp_path, decoder, capsys, agent="ucx")
    assert (code, "note: the agent ucx needs ucxx" in said) == (0, True)


def test_a_key_that_stands_twice_is_noted(pasted, tmp_path, capsys):
    """Of two peers of one name the first was dropped without a word, as by vLLM."""
    decoder = json.dumps(pasted["kv_consumer"][0])
    peer = json.dumps(pasted["kv_consumer"][0]["kv_connector_extra_config"]["peers"]["prefill-0"])
    twice = decoder.replace('"prefill-0": ', f'"prefill-0": {peer}, "prefill-0": ')
    assert twice != decoder
    (tmp_path / "given.json").write_text(twice)
    assert main(["check", str(tmp_path / "given.json")]) == 0
    assert "note: the key 'prefill-0' stands twice in one object; vLLM takes the last one\n" in capsys.readouterr().out


def test_a_file_that_is_missing_is_asked_for_where_it_is_made(pasted, tmp_path, capsys):
    """A peer's certificate that was not copied yet was to be made here: a wrong one, that failed at the first request."""
    decoder, _ = pasted["kv_consumer"]
    for file, said in {
        "prefill-0.crt": "copy the .crt file here that `kvbridge identity 'prefill-0'` made on that engine's host",
        "decode-0.crt": f"make it here with `kvbridge identity 'decode-0' --out '{tmp_path}'`",
        "decode-0.key": f"make it here with `kvbridge identity 'decode-0' --out '{tmp_path}'`",
    }.items():
        (tmp_path / file).rename(tmp_path / "away")
        code, printed = check(tmp_path, decoder, capsys)
        assert code == 2
        assert said in printed
        (tmp_path / "away").rename(tmp_path / file)


def test_a_name_does_not_move_the_cursor(pasted, tmp_path, capsys):
    code, words = check(tmp_path, pasted["kv_consumer"][0], capsys, name="a\x1b[2J\nright: b")
    assert (code, words.splitlines()[0]) == (0, "right: a\\x1b[2J\\nright: b, kv_consumer, agent stream; peers prefill-0")


@pytest.mark.parametrize(("encoding", "said"), [("utf-8-sig", "byte order mark"), ("utf-16", "not UTF-8"), ("utf-32", "not UTF-8")])
def test_only_utf_8_is_right(pasted, tmp_path, capsys, encoding, said):
    (tmp_path / "given.json").write_bytes(json.dumps(pasted["kv_consumer"][0]).encode(encoding))
    assert main(["check", str(tmp_path / "given.json")]) == 2
    words = capsys.readouterr().err
    assert said in words
    assert "; save it as UTF-8" in words
    assert words.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b" " * (2 << 20)])
def test_a_file_of_something_else_is_one_sentence(tmp_path, capsys, content):
    (tmp_path / "given.json").write_bytes(content)
    assert main(["check", str(tmp_path / "given.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
