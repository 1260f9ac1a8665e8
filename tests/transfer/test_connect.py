"""Agent.connect."""

from __future__ import annotations

import time

from bridge.transfer.agent import ReadRange, RemoteMemory
from tests.transfer.serving import POISON, content, memory_of, poisoned, read_all, wait


def test_the_same_peer_several_times(make, served):
    agent, mine = make(), poisoned(4096)
    target = agent.register(memory_of(mine))
    peers = [agent.connect(served.metadata) for _ in range(3)]
    for peer in peers:
        mine[:] = POISON
        read_all(peer, served.memory, target, 4096)
        assert (mine == content(4096, 3)).all()
        peer.disconnect()


def test_is_quick(make, served):
    """Also after a disconnect: nothing of the first is waited for."""
    agent = make()
    started = time.monotonic()
    agent.connect(served.metadata).disconnect()
    again = time.monotonic()
    agent.connect(served.metadata)
    assert time.monotonic() - again < 2 + 5 * (again - started)


def test_a_reader_reads_from_two_owners(make, served):
    second = make("second", serves=True)
    theirs = poisoned(4096)
    theirs[:] = 7
    second.register(memory_of(theirs))
    agent, mine = make(), poisoned(8192)
    target = agent.register(memory_of(mine))
    one, two = agent.connect(served.metadata), agent.connect(second.metadata())
    reads = [
        one.read(served.memory, target, [ReadRange(0, 0, 4096)]),
        two.read(RemoteMemory(theirs.ctypes.data, 4096), target, [ReadRange(0, 4096, 4096)]),
    ]
    for read in reads:
        wait(read)
        read.release()
    assert (mine[:4096] == content(4096, 3)).all()
    assert (mine[4096:] == 7).all()
