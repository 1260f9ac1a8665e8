"""What requests and operators may write for the vLLM connector, without vLLM: one typed refusal for everything that is wrong."""

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.handoff import Ticket, create_identity
from bridge.vllm import params
from bridge.vllm.config import ConnectorConfig
from bridge.vllm.errors import BadConfiguration, BadParameters, traceback_of
from bridge.vllm.params import DecodeOrder, PrefillOrder

TICKET = Ticket("prefill-0", "r", 7, 1)
GOOD = params.for_decoder(TICKET, 2, 300, "engine")

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def replaced(tree, path, value):
    tree = json.loads(json.dumps(tree))
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return tree


PATHS = [
    ("do_remote_prefill",),
    ("do_remote_decode",),
    ("kvbridge",),
    ("kvbridge", "ticket"),
    ("kvbridge", "tp_size"),
    ("kvbridge", "tokens"),
]
PATHS += [("kvbridge", "ticket", key) for key in TICKET.to_dict()]


def refused_or_parsed(value):
    """What was parsed, or the refusal; anything else that is raised fails the test."""
    try:
        return params.parse(value)
    except BadParameters as error:
        return error


def test_what_the_prefiller_gives_is_what_the_decoder_reads():
    assert params.parse(json.loads(json.dumps(GOOD))) == DecodeOrder(TICKET, 2, 300)
    assert params.parse({"do_remote_decode": True}) == PrefillOrder(None)
    assert params.parse({"do_remote_decode": True, "kvbridge": {"codec": "raw"}}) == PrefillOrder("raw")
    assert params.parse(None) is params.parse({}) is None


@settings(max_examples=500, deadline=None)
@given(values)
def test_anything_at_all(value):
    found = refused_or_parsed(value)
    assert found is None or isinstance(found, PrefillOrder | BadParameters)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(PATHS), values)
def test_anything_in_one_place(path, value):
    order = refused_or_parsed(replaced(GOOD, path, value))
    if isinstance(order, DecodeOrder):
        assert order.tp_size >= 1
        assert order.tokens >= 1
        order.ticket.request_id.encode()


@given(st.text(st.characters(codec=None), max_size=400))
def test_any_request_id_gets_a_name_for_the_wire(request_id):
    name = params.wire_id(request_id)
    assert 1 <= len(name.encode()) <= 256
    assert Ticket.from_dict(Ticket("p", name, 1, 1).to_dict()).request_id == name


def test_long_request_ids_stay_apart():
    assert params.wire_id("r" * 5000) != params.wire_id("r" * 5001)
    assert params.wire_id("\ud800") != params.wire_id("\ud801")
    assert params.wire_id("cmpl-1") == "cmpl-1"


@pytest.fixture
def entries(tmp_path):
    own, peer = create_identity("decode-0", tmp_path), create_identity("prefill-0", tmp_path)
    return {
        "name": "decode-0",
        "certificate": str(own.certificate),
        "private_key": str(tmp_path / "decode-0.key"),
        "peers": {"prefill-0": {"certificate": str(peer.certificate), "host": "10.0.0.1", "port": 7700}},
    }


def test_defaults(entries):
    config = ConnectorConfig.parse(entries)
    assert (config.codec, config.request_codec, config.lossy_prefix_cache, config.listen) == ("raw", True, False, "127.0.0.1")
    assert config.peers["prefill-0"].port == 7700


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("stagingbytes", 1, "staging_bytes"),
        ("codec", "turboquant_k8v5", "turboquant_k8v4"),
        ("codec_by_layer", {"0": "gzip"}, "gzip"),
        ("port", 70000, "port"),
        ("port", "x", "port"),
        ("staging_bytes", 5, "staging_bytes"),
        ("chunk_tokens", 100, "multiple of 16"),
        ("staging", "disk", "host"),
        ("certificate", "/nowhere.crt", "/nowhere.crt"),
        ("peers", {"prefill-0": {}}, "certificate"),
        ("peers", {"prefill-0": {"certificate": "x", "adress": "y"}}, "adress"),
        ("bounds", {"leese": 3}, "did you mean 'lease'"),
        ("bounds", {"lease": -1}, "lease is -1"),
        ("bounds", {"silence": float("nan")}, "silence is nan"),
        ("bounds", {"silence": 1, "heartbeat": 5}, "no sign of life"),
        ("name", "", "name is empty"),
        ("peers", {"prefill-0": {"certificate": "x", "port": 99999}}, "port of 'prefill-0'"),
        ("codec_by_layer", {"-1": "raw"}, "codec_by_layer"),
        ("lossy_prefix_cache", "perhaps", "lossy_prefix_cache"),
        ("peers", {}, "peers is empty"),
        ("name", "\ud800", "no Unicode text"),
        ("peers", {"\ud800": {"certificate": "x"}}, "peers has the name"),
        ("peers", {"": {"certificate": "x"}}, "peers has the name"),
        ("name", "n" * 124, "too long"),
        ("name", "ñ" * 62, "too long"),
        ("listen", "", "0.0.0.0 is all of IPv4"),
        ("listen", "a..b", "no host's name"),
        ("peers", {"prefill-0": {"certificate": "x", "host": "a..b"}}, "host of peer 'prefill-0'"),
        ("peers", {"prefill-0": {"certificate": "\ud800"}}, "there is no file"),
        ("certificate", "/" + "c" * 100_000, "cannot be looked at"),
        ("staging", "s" * 100_000, "staging is 'sss"),
        ("codec", "c" * 100_000, "there is no codec named"),
        ("data_port", 7750, "set agent to stream"),
        ("compare_weights", "w" * 100_000, "`$.compare_weights`"),
        ("x" * 100_000, 1, "unknown key 'xxx"),
        ("bounds", {"l" * 100_000: 3}, "unknown key 'lll"),
        ("peers", {"p" * 100_000: {"certificate": "x"}}, "peers has the name"),
        ("peers", {"p" * 100_000: {"certificate": "x", "port": 99999}}, "is 99999, outside"),
        ("peers", {"p": {"certificate": "x", "h" * 100_000: "y"}}, "hhh"),
        ("port", 10**3000, "port is 1000"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_wrong_configurations(entries, key, value, says):
    with pytest.raises(BadConfiguration) as caught:
        ConnectorConfig.parse({**entries, key: value})
    assert says in f"{caught.value.detail} {caught.value.advice}"
    assert len(str(caught.value)) < 1000


HOSTS = ["10.0.0.1", "127.1", "localhost", "decode_0.example.", "worker.1", "münchen.example", "::1", "fd00::1", "fe80::1%eth0", "0.0.0.0"]
NO_HOSTS = [
    "10.0.0.1:5600",
    "[::1]",
    "[::1]:5600",
    "::1]",
    "http://x",
    "x/",
    " ",
    "10.0.0.1\n",
    "\tx",
    "a b",
    "a\u3000b",
    "10.0.0.0/8",
    "x:1",
]
NO_HOSTS += [
    "10.0.0.256",
    "10.0.0.1.",
    "1.2.3.4.5",
    "::1%a b",
    "::1%",
    "fd00::1\n",
    "user@x",
    "x?",
    "*",
    "a..b",
    ".",
    "a\0",
    "\ud800",
    "a" * 64,
]


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_that_can_be(entries, host):
    peers = {"prefill-0": {**entries["peers"]["prefill-0"], "host": host}}
    config = ConnectorConfig.parse({**entries, "listen": host, "peers": peers})
    assert config.listen == config.peers["prefill-0"].host == host


@pytest.mark.parametrize("host", NO_HOSTS, ids=ascii)
def test_hosts_that_cannot_be(entries, host):
    peers = {"prefill-0": {**entries["peers"]["prefill-0"], "host": host}}
    for what, changed in (("the host of peer 'prefill-0'", {"peers": peers}), ("listen", {"listen": host})):
        with pytest.raises(BadConfiguration) as caught:
            ConnectorConfig.parse({**entries, **changed})
        assert caught.value.detail == f"{what} is {host!r}, no address and no host's name"
        assert "such as 10.0.0.1, fd00::1 or decode-0.example, with no blanks, brackets, port or scheme" in caught.value.advice


def test_two_ports_are_not_one(entries):
    with pytest.raises(BadConfiguration, match="both 7700"):
        ConnectorConfig.parse({**entries, "port": 7700, "data_port": 7700, "agent": "stream"})


@pytest.mark.parametrize("key", ["name", "certificate", "private_key", "peers"])
def test_missing_keys(entries, key):
    del entries[key]
    with pytest.raises(BadConfiguration, match=key):
        ConnectorConfig.parse(entries)


def test_lossy_kv_is_not_handed_on(entries):
    entries = {**entries, "port": 7700}
    consenting, strict = ConnectorConfig.parse({**entries, "lossy_prefix_cache": True}), ConnectorConfig.parse(entries)
    with pytest.raises(BadConfiguration, match="kv_both"):
        consenting.check_role(produces=True, consumes=True)
    consenting.check_role(produces=False, consumes=True)
    strict.check_role(produces=True, consumes=True)


def test_what_is_no_configuration_at_all():
    for extra in (None, 5, "x", ["name"]):
        with pytest.raises(BadConfiguration, match="no object"):
            ConnectorConfig.parse(extra)


def test_two_peers_with_one_certificate_and_a_folder_that_is_closed(entries, monkeypatch):
    peer = entries["peers"]["prefill-0"]
    with pytest.raises(BadConfiguration, match="have the same certificate"):
        ConnectorConfig.parse({**entries, "peers": {"prefill-0": peer, "prefill-1": peer}})
    real = Path.is_file

    def closed(path):
        if path.name == "decode-0.key":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "is_file", closed)  # root may look into every folder
    with pytest.raises(BadConfiguration, match="cannot be looked at: permission denied"):
        ConnectorConfig.parse(entries)


def test_a_key_that_belongs_to_another_certificate(entries, tmp_path):
    with pytest.raises(BadConfiguration, match="no certificate and its key"):
        ConnectorConfig.parse({**entries, "private_key": str(tmp_path / "prefill-0.key")})


def test_the_certificate_given_for_its_key_too(entries):
    """OpenSSL has no reason for that, and the sentence ended in "None"."""
    with pytest.raises(BadConfiguration, match="no certificate and its key: one of the two holds something else; "):
        ConnectorConfig.parse({**entries, "private_key": entries["certificate"]})


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_password(entries, tmp_path):
    key = serialization.load_pem_private_key((tmp_path / "decode-0.key").read_bytes(), None)
    hidden = serialization.BestAvailableEncryption(b"password")
    path = tmp_path / "encrypted.key"
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
    with pytest.raises(BadConfiguration, match="no certificate and its key"):
        ConnectorConfig.parse({**entries, "private_key": str(path)})


def test_each_role_has_what_it_needs(entries):
    peer = {"certificate": entries["peers"]["prefill-0"]["certificate"]}
    for missing in ({}, {"host": "10.0.0.1"}, {"port": 7700}):
        config = ConnectorConfig.parse({**entries, "peers": {"prefill-0": {**peer, **missing}}})
        with pytest.raises(BadConfiguration, match="peer 'prefill-0' has no host and port"):
            config.check_role(produces=False, consumes=True)
        with pytest.raises(BadConfiguration, match="port is missing"):
            config.check_role(produces=True, consumes=False)
    ConnectorConfig.parse({**entries, "port": 7700, "peers": {"prefill-0": peer}}).check_role(produces=True, consumes=False)


def test_a_log_line_shows_the_cause_where_there_is_one():
    typed = BadParameters("no such thing")
    assert traceback_of(typed) is None
    typed.__cause__ = ZeroDivisionError("deep below")
    assert traceback_of(typed) is typed
    plain = ZeroDivisionError("untyped")
    assert traceback_of(plain) is plain
