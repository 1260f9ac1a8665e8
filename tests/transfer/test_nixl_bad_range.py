"""Ranges outside either memory never reach the library."""

from __future__ import annotations

import dataclasses

import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import BadRange
from tests.transfer.nixl_serving import MIB, POISON, TCP, Serving, memory_of, poisoned, read_all

BIG = (1 << 63) - 1
BAD = {
    "empty": [],
    "size 0": [ReadRange(0, 0, 0)],
    "negative size": [ReadRange(0, 0, -1)],
    "negative remote": [ReadRange(-1, 0, 8)],
    "negative local": [ReadRange(0, -1, 8)],
    "past the remote end": [ReadRange(MIB - 7, 0, 8)],
    "past the local end": [ReadRange(0, MIB // 2 - 7, 8)],
    "overflowing sum": [ReadRange(BIG - 3, 0, 8)],
    "huge size": [ReadRange(8, 8, BIG)],
    "no 64 bits": [ReadRange(1 << 64, 0, 8)],
    "second of two": [ReadRange(0, 0, 8), ReadRange(0, MIB // 2, 8)],
    "overlapping targets": [ReadRange(0, 0, 64), ReadRange(4096, 63, 64)],
    "a fraction": [ReadRange(0.5, 0, 8)],
    "no number": [ReadRange(None, 0, 8)],
    "too many": [ReadRange(0, i, 1) for i in range(65_537)],
}


@pytest.fixture(scope="module")
def serving():
    with Serving(MIB, transports=TCP) as process:
        yield process


@pytest.mark.parametrize("ranges", BAD.values(), ids=BAD.keys())
def test_refused(reader, serving, ranges):
    mine = poisoned(MIB // 2)
    target = reader.register(memory_of(mine))
    peer = reader.connect(serving.metadata)
    with pytest.raises(BadRange):
        peer.read(serving.memory, target, ranges)
    assert (mine == POISON).all()
    assert reader.counters().reads_started == 0
    target.release()


@pytest.mark.parametrize("change", [{"address": 4096}, {"nbytes": 2 * MIB}, {"nbytes": 0}, {"address": -8}, {"device": "tpu"}], ids=str)
def test_memory_that_the_peer_did_not_register(reader, serving, change):
    mine = poisoned(2 * MIB)
    target = reader.register(memory_of(mine))
    peer = reader.connect(serving.metadata)
    source = dataclasses.replace(serving.memory, **change)
    with pytest.raises(BadRange):
        peer.read(source, target, [ReadRange(max(0, source.nbytes - 4096), 0, 4096)])
    assert (mine == POISON).all()
    assert reader.counters().in_quarantine == 0
    target.release()


def test_a_target_that_is_not_registered(make_agent, serving):
    agent, other, mine = make_agent(), make_agent("other"), poisoned(4096)
    peer = agent.connect(serving.metadata)
    for target in (agent.register(memory_of(mine)), other.register(memory_of(mine))):
        target.release()
        with pytest.raises(BadRange):
            peer.read(serving.memory, target, [ReadRange(0, 0, 8)])
    assert (mine == POISON).all()
    good = agent.register(memory_of(mine))
    read_all(peer, serving.memory, good, 4096)
    assert not (mine == POISON).any()
