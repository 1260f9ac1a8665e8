"""BadRange: ranges outside either memory never reach the library, nor the peer."""

from __future__ import annotations

import dataclasses

import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import BadRange
from tests.transfer.serving import MIB, POISON, memory_of, poisoned, read_all

BIG = (1 << 63) - 1
BAD = {
    "empty": [],
    "size 0": [ReadRange(0, 0, 0)],
    "negative size": [ReadRange(0, 0, -1)],
    "negative remote": [ReadRange(-1, 0, 8)],
    "negative local": [ReadRange(0, -1, 8)],
    "past the remote end": [ReadRange(4 * MIB - 7, 0, 8)],
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


@pytest.mark.parametrize("ranges", BAD.values(), ids=BAD.keys())
def test_refused(make, served, ranges):
    agent, mine = make(), poisoned(MIB // 2)
    target = agent.register(memory_of(mine))
    peer = agent.connect(served.metadata)
    with pytest.raises(BadRange):
        peer.read(served.memory, target, ranges)
    assert (mine == POISON).all()
    assert agent.counters().reads_started == 0
    target.release()


@pytest.mark.parametrize("change", [{"address": 4096}, {"nbytes": 8 * MIB}, {"nbytes": 0}, {"address": -8}, {"device": "tpu"}], ids=str)
def test_memory_that_the_peer_did_not_register(make, served, change):
    agent, mine = make(), poisoned(2 * MIB)
    target = agent.register(memory_of(mine))
    peer = agent.connect(served.metadata)
    source = dataclasses.replace(served.memory, **change)
    with pytest.raises(BadRange):
        peer.read(source, target, [ReadRange(max(0, source.nbytes - 4096), 0, 4096)])
    assert (mine == POISON).all()
    assert agent.counters().in_quarantine == 0
    target.release()


def test_a_target_that_is_not_registered(make, served):
    agent, other, mine = make(), make("other"), poisoned(4096)
    peer = agent.connect(served.metadata)
    released = [agent.register(memory_of(mine)), other.register(memory_of(mine))]
    for target in released:
        target.release()
    for target in (*released, other.register(memory_of(mine)), None):
        with pytest.raises(BadRange):
            peer.read(served.memory, target, [ReadRange(0, 0, 8)])
    assert (mine == POISON).all()
    read_all(peer, served.memory, agent.register(memory_of(mine)), 4096)
    assert not (mine == POISON).any()
