"""The choice of a transfer agent: by name in the connector's configuration, and on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.cli.main import parsers
from bridge.handoff.identity import Identity, PeerConfig, create_identity
from bridge.transfer.choose import KINDS, installed, open_agent
from bridge.transfer.speed import WatchedAgent
from bridge.transfer.stream import StreamAgent
from bridge.vllm.config import ConnectorConfig
from bridge.vllm.errors import BadConfiguration


@pytest.fixture
def entries(tmp_path):
    own, peer = create_identity("decode-0", tmp_path), create_identity("prefill-0", tmp_path)
    return {
        "name": "decode-0",
        "certificate": str(own.certificate),
        "private_key": str(own.private_key),
        "peers": {"prefill-0": {"certificate": str(peer.certificate), "host": "10.0.0.1", "port": 7700}},
    }


def test_defaults(entries):
    config = ConnectorConfig.parse(entries)
    assert (config.agent, config.data_port, config.minimum_gbps, config.refuse_slow_links) == ("nixl", 0, 0.0, False)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(entries, kind):
    port = 7800 if kind == "stream" else 0
    config = ConnectorConfig.parse(entries | {"agent": kind, "data_port": port, "minimum_gbps": 2.5, "refuse_slow_links": True})
    assert (config.agent, config.data_port, config.minimum_gbps, config.refuse_slow_links) == (kind, port, 2.5, True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"agent": "tcp"}, "choose one of nixl, ucx, stream"),
        ({"agent": "stream", "transports": ["tcp"]}, "leave transports out"),
        ({"data_port": 70_000}, "data_port"),
        ({"minimum_gbps": -1}, "minimum_gbps"),
        ({"minimum_gbps": float("nan")}, "minimum_gbps"),
        ({"agnt": "ucx"}, "agent"),
    ],
    ids=str,
)
def test_what_cannot_be(entries, change, says):
    with pytest.raises(BadConfiguration) as caught:
        ConnectorConfig.parse(entries | change)
    assert says in f"{caught.value.detail} {caught.value.advice}"


def test_the_command_line_knows_them():
    options = parsers()[0].parse_args(["demo", "--agent", "stream"])
    assert options.agent == "stream"
    assert parsers()[0].parse_args(["demo"]).agent == "nixl"


def test_a_minimum_speed_wraps_the_agent(entries):
    identity = Identity("decode-0", Path(entries["certificate"]), Path(entries["private_key"]))
    peers = {"prefill-0": PeerConfig(Path(entries["peers"]["prefill-0"]["certificate"]), "127.0.0.1")}
    plain = open_agent("stream", "a", identity=identity, peers=peers, serves=False)
    watched = open_agent("stream", "a", identity=identity, peers=peers, serves=False, minimum_gbps=1.0, refuse_slow_links=True)
    try:
        assert isinstance(plain, StreamAgent)
        assert isinstance(watched, WatchedAgent)
        assert (watched.minimum_gbps, watched.refuse, watched.kind) == (1.0, True, "stream")
    finally:
        plain.close()
        watched.close()


def test_kvbridge_alone_is_enough_for_stream():
    assert installed("stream")
