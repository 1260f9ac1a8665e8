"""Agent.metadata: names the agent, is bounded, and is refused by peers unless it is whole."""

from __future__ import annotations

import random

import pytest

from bridge.transfer.errors import PeerUnreachable
from tests.transfer.serving import memory_of, poisoned


def test_names_the_agent(make):
    assert make("decoder").connect(make("prefiller-7 é", serves=True).metadata()).name == "prefiller-7 é"


def test_two_agents_of_one_name_differ(make):
    assert make("prefiller", serves=True).metadata() != make("prefiller", serves=True).metadata()


def test_with_much_memory_is_bounded(make):
    agent = make(serves=True)
    held = [agent.register(memory_of(poisoned(64))) for _ in range(50)]
    assert len(agent.metadata()) < 1 << 20
    assert len(held) == 50


def test_damage_is_refused(make, served):
    """Every kind of cut, and a bit of every eighth byte."""
    agent, whole = make(), served.metadata
    damaged = [whole[:n] for n in range(0, len(whole), 7)] + [whole + b"x", b"\0" * 500, b"x" * ((1 << 20) + 1)]
    for i in range(0, len(whole), 8):
        flipped = bytearray(whole)
        flipped[i] ^= 1 << i % 8
        damaged.append(bytes(flipped))
    for item in damaged:
        with pytest.raises(PeerUnreachable):
            agent.connect(item)


def test_random_bytes_are_refused(make):
    agent, source = make(), random.Random(7)
    for _ in range(200):
        with pytest.raises(PeerUnreachable):
            agent.connect(source.randbytes(source.randrange(2000)))
    for item in (None, "text", 7):
        with pytest.raises(PeerUnreachable):
            agent.connect(item)


def test_another_kind_is_refused(make, kind):
    from tests.transfer import agents

    other = agents.make("stream" if kind != "stream" else "nixl", "prefiller", serves=True, files=agents.identities())
    try:
        with pytest.raises(PeerUnreachable, match="same agent"):
            make().connect(other.metadata())
    finally:
        other.close()
