"""Peers that nobody uses stay loaded, since NIXL leaks sockets otherwise; but not without bound. Peers of an agent that was closed."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange, RemoteMemory
from bridge.transfer.errors import TransferFailed
from bridge.transfer.nixl import agent as nixl_agent
from tests.transfer.serving import POISON, content, memory_of, poisoned


def test_idle_peers_are_bounded(make_agent, monkeypatch):
    monkeypatch.setattr(nixl_agent, "MAX_IDLE_PEERS", 2)
    agent = make_agent()
    others = [make_agent(f"prefiller-{i}", serves=True) for i in range(4)]
    for other in others:
        agent.connect(other.metadata()).disconnect()
    assert len(agent._loaded) == 2
    agent.connect(others[0].metadata()).disconnect()


def test_a_peer_of_an_agent_that_was_closed(make_agent):
    owner, agent = make_agent("owner", serves=True), make_agent()
    peer = agent.connect(owner.metadata())
    agent.close()
    peer.disconnect()  # it was a KeyError
    peer.disconnect()


@pytest.mark.parametrize("busy", [False, True])
def test_an_agent_that_is_closed_while_a_read_begins(make_agent, monkeypatch, busy):
    """NIXL's handle, which is None then, was asked for the read. busy: another thread holds the lock just then, so it only begins later."""
    owner, agent = make_agent("owner", serves=True), make_agent()
    theirs, mine = content(4096, 3), poisoned(4096)
    owner.register(memory_of(theirs))
    target, peer = agent.register(memory_of(mine)), agent.connect(owner.metadata())
    real = nixl_agent.check_ranges

    def closing(*arguments):
        agent.close()
        if busy:
            monkeypatch.setattr(agent._reads, "_lock", Taken(agent._reads._lock))
        return real(*arguments)

    monkeypatch.setattr(nixl_agent, "check_ranges", closing)
    source, ranges = RemoteMemory(theirs.ctypes.data, 4096), [ReadRange(0, 0, 4096)]
    if busy:
        read = peer.read(source, target, ranges)
        read.release()
        assert read.settled
        with pytest.raises(TransferFailed, match="was given up"):
            read.done()
    else:
        with pytest.raises(TransferFailed, match="failed: the agent was closed"):
            peer.read(source, target, ranges)
    assert np.all(mine == POISON)
    assert agent.counters().reads_started == 1


class Taken:
    """A lock that is not to be had the first time."""

    def __init__(self, lock):
        self._lock, self._taken = lock, True

    def acquire(self, timeout):
        taken, self._taken = self._taken, False
        return not taken and self._lock.acquire(timeout=timeout)

    def release(self):
        self._lock.release()
