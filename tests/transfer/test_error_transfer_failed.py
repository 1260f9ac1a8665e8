"""TransferFailed: kill -9 of the owner, and what was given up."""

from __future__ import annotations

import time

import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import TransferFailed, TransferTimeout
from tests.transfer.serving import MIB, POISON, Serving, memory_of, poisoned, read_all, wait
from tests.transfer.test_release import SIZE, start_and_suspend

BOUND_S = 10.0  # measured on one host: 0.02 to 0.2 s


def test_the_owner_is_killed_in_mid_read(make, kind):
    agent = make()
    with Serving(SIZE, kind=kind) as serving:
        mine = poisoned(SIZE)
        target, peer, transfer = start_and_suspend(agent, serving, mine)
        assert not transfer.done()
        serving.kill()
        started = time.monotonic()
        with pytest.raises(TransferFailed, match="prefiller"):
            wait(transfer, BOUND_S)
        while True:
            try:
                transfer.release()
                break
            except TransferTimeout:
                assert time.monotonic() - started < BOUND_S
        with pytest.raises(TransferFailed):
            transfer.done()
        mine[:] = POISON
        time.sleep(0.2)
        assert (mine == POISON).all()
        with pytest.raises(TransferFailed, match="connect again"):
            read_all(peer, serving.memory, target, 4096)
        peer.disconnect()
        target.release()
        counters = agent.counters()
        assert (counters.reads_failed, counters.in_quarantine, agent.registered_bytes()) == (1, 0, 0)


def test_the_owner_is_killed_between_two_reads(make, kind):
    agent = make()
    with Serving(MIB, kind=kind) as serving:
        target = agent.register(memory_of(poisoned(MIB)))
        peer = agent.connect(serving.metadata)
        read_all(peer, serving.memory, target, MIB)
        serving.kill()
        started = time.monotonic()
        with pytest.raises(TransferFailed):
            wait(peer.read(serving.memory, target, [ReadRange(0, 0, MIB)]), BOUND_S)
        assert time.monotonic() - started < BOUND_S
        target.release()
        peer.disconnect()


def test_the_reader_goes_and_the_owner_serves_on(make, kind):
    """This process closes its agent in mid-read, and a second one reads on."""
    first, second = make("first"), make("second")
    with Serving(SIZE, kind=kind) as serving:
        gone = first.register(memory_of(poisoned(SIZE)))
        first.connect(serving.metadata).read(serving.memory, gone, [ReadRange(0, 0, SIZE)]).done()
        first.close()
        mine = poisoned(SIZE)
        read_all(second.connect(serving.metadata), serving.memory, second.register(memory_of(mine)), SIZE)
        assert not (mine == POISON).any()
        metadata, memory = serving.ask("more")  # it lives
        read_all(second.connect(metadata), memory, second.register(memory_of(mine)), 4096)
