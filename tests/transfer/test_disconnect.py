"""Peer.disconnect."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import TransferFailed
from tests.transfer.serving import MIB, POISON, Serving, content, memory_of, poisoned, read_all
from tests.transfer.test_release import SIZE, start_and_suspend, until_released


def test_idempotent_and_connectable_again(make, served):
    agent, mine = make(), poisoned(MIB)
    target = agent.register(memory_of(mine))
    for _ in range(3):
        mine[:] = POISON
        peer = agent.connect(served.metadata)
        read_all(peer, served.memory, target, MIB)
        assert np.array_equal(mine, content(4 * MIB, 3)[:MIB])
        peer.disconnect()
        peer.disconnect()
        with pytest.raises(TransferFailed, match="disconnected"):
            peer.read(served.memory, target, [ReadRange(0, 0, 8)])


def test_one_of_two_connections_to_the_same_peer(make, served):
    agent, mine = make(), poisoned(MIB)
    target = agent.register(memory_of(mine))
    first, second = agent.connect(served.metadata), agent.connect(served.metadata)
    first.disconnect()
    read_all(second, served.memory, target, MIB)
    assert np.array_equal(mine, content(4 * MIB, 3)[:MIB])
    second.disconnect()


def test_an_unfinished_read_is_given_up(make, kind):
    agent = make(in_flight_bytes=4 * MIB)
    with Serving(SIZE, kind=kind, seed=4) as serving:
        mine = poisoned(SIZE)
        target, peer, transfer = start_and_suspend(agent, serving, mine)
        started = time.monotonic()
        peer.disconnect()
        assert time.monotonic() - started < 5
        serving.resume()
        until_released(transfer)
        with pytest.raises(TransferFailed):
            transfer.done()
        mine[:] = POISON
        time.sleep(0.3)
        assert (mine == POISON).all()
        mine[:] = POISON
        read_all(agent.connect(serving.metadata), serving.memory, target, SIZE)
        assert np.array_equal(mine, content(SIZE, 4))
        target.release()


def test_nothing_is_left_behind(make, served):
    """Two hundred connections to a living peer: descriptors of this process do not grow."""
    agent = make()
    target = agent.register(memory_of(poisoned(4096)))

    def cycle(times: int) -> None:
        for _ in range(times):
            peer = agent.connect(served.metadata)
            read_all(peer, served.memory, target, 4096)
            peer.disconnect()

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{served.process.pid}/fd"))

    cycle(20)
    time.sleep(0.3)
    before = descriptors()
    cycle(100)
    limit = time.monotonic() + 5
    while max(a - b for a, b in zip(descriptors(), before, strict=True)) > 4 and time.monotonic() < limit:
        time.sleep(0.05)
    assert max(a - b for a, b in zip(descriptors(), before, strict=True)) <= 4
