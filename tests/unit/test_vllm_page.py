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
        ({**decoder, "kv_role": ["kv_both"]}, {}, "kv_role is ['kv_both']"),
    ):
        code, words = check(tmp_path, block, capsys, **changed)
        assert code == 2
        assert said in words
        assert words.startswith("kvbridge check: ")
        assert words.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b" " * (2 << 20)])
def test_a_file_of_something_else_is_one_sentence(tmp_path, capsys, content):
    (tmp_path / "given.json").write_bytes(content)
    assert main(["check", str(tmp_path / "given.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
