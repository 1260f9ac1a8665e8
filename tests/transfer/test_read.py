"""Peer.read: the bytes that were asked for, where they belong, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange, RemoteMemory
from tests.transfer.serving import MIB, POISON, Serving, content, memory_of, poisoned, wait


def test_a_range_arrives_and_nothing_beside_it(make, served):
    agent, mine = make(), poisoned(MIB)
    target = agent.register(memory_of(mine))
    transfer = agent.connect(served.metadata).read(served.memory, target, [ReadRange(4097, 1000, 70_001)])
    assert transfer.nbytes == 70_001
    wait(transfer)
    transfer.release()
    transfer.release()
    assert np.array_equal(mine[1000:71_001], content(4 * MIB, 3)[4097 : 4097 + 70_001])
    assert (mine[:1000] == POISON).all()
    assert (mine[71_001:] == POISON).all()


@pytest.mark.parametrize("count", [2, 64, 3000])
def test_scattered_ranges_land_where_they_belong(make, served, count):
    agent = make()
    random = np.random.default_rng(count)
    step = 4 * MIB // count
    sizes = random.integers(1, step + 1, count)
    from_, to = random.permutation(count) * step, random.permutation(count) * step
    mine = poisoned(4 * MIB)
    target = agent.register(memory_of(mine))
    ranges = [ReadRange(int(r), int(t), int(n)) for r, t, n in zip(from_, to, sizes, strict=True)]
    transfer = agent.connect(served.metadata).read(served.memory, target, ranges)
    assert transfer.nbytes == sizes.sum()
    wait(transfer)
    transfer.release()
    theirs, expected = content(4 * MIB, 3), np.full(4 * MIB, POISON, np.uint8)
    for r in ranges:
        expected[r.local : r.local + r.nbytes] = theirs[r.remote : r.remote + r.nbytes]
    assert np.array_equal(mine, expected)


def test_a_part_of_what_the_peer_registered(make, served):
    """The source may be any range inside registered memory."""
    agent, mine = make(), poisoned(1000)
    target = agent.register(memory_of(mine))
    part = RemoteMemory(served.memory.address + 5000, 2000)
    transfer = agent.connect(served.metadata).read(part, target, [ReadRange(999, 0, 1000)])
    wait(transfer)
    assert np.array_equal(mine, content(4 * MIB, 3)[5999:6999])


def test_many_at_once(make, served):
    agent, mine = make(), poisoned(2 * MIB)
    target = agent.register(memory_of(mine))
    peer = agent.connect(served.metadata)
    size = 2 * MIB // 100
    reads = [peer.read(served.memory, target, [ReadRange(i * size, i * size, size)]) for i in range(100)]
    for read in reads:
        wait(read)
        read.release()
    assert np.array_equal(mine[: 100 * size], content(4 * MIB, 3)[: 100 * size])
    assert agent.counters().reads_finished == 100


@pytest.mark.slow
def test_larger_than_what_is_in_flight(make, kind):
    """40 MiB; for NIXL and UCX in pieces of 256 KiB, four at a time."""
    agent = make(in_flight_bytes=MIB)
    with Serving(40 * MIB, kind=kind, seed=1) as serving:
        mine = poisoned(40 * MIB)
        target = agent.register(memory_of(mine))
        transfer = agent.connect(serving.metadata).read(serving.memory, target, [ReadRange(0, 0, 40 * MIB)])
        wait(transfer)
        transfer.release()
        assert np.array_equal(mine, content(40 * MIB, 1))
