"""Disconnecting: what was asked for may still arrive and stays quarantined; then the peer is forgotten."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import TransferFailed, TransferTimeout
from bridge.transfer.nixl import agent as nixl_agent
from tests.transfer.nixl_serving import MIB, POISON, TCP, Serving, content, memory_of, poisoned, read_all
from tests.transfer.test_nixl_quarantine import SIZE, drain, start_and_suspend


def test_idempotent_and_connectable_again(make_agent):
    agent = make_agent()
    with Serving(MIB, seed=2, transports=TCP) as serving:
        mine = poisoned(MIB)
        target = agent.register(memory_of(mine))
        for _ in range(3):
            mine[:] = POISON
            peer = agent.connect(serving.metadata)
            read_all(peer, serving.memory, target, MIB)
            assert np.array_equal(mine, content(MIB, 2))
            peer.disconnect()
            peer.disconnect()
            with pytest.raises(TransferFailed, match="disconnected"):
                peer.read(serving.memory, target, [ReadRange(0, 0, 8)])
        assert not agent._peers


def test_one_of_two_connections_to_the_same_peer(make_agent):
    agent = make_agent()
    with Serving(MIB, transports=TCP) as serving:
        target = agent.register(memory_of(poisoned(MIB)))
        first, second = agent.connect(serving.metadata), agent.connect(serving.metadata)
        first.disconnect()
        read_all(second, serving.memory, target, MIB)
        second.disconnect()
        assert not agent._peers


def test_an_unfinished_read_is_quarantined(make_agent):
    agent = make_agent(in_flight_bytes=4 * MIB)
    with Serving(SIZE, seed=4, transports=TCP) as serving:
        mine = poisoned(SIZE)
        target, peer, transfer = start_and_suspend(agent, serving, mine)
        started = time.monotonic()
        peer.disconnect()
        assert time.monotonic() - started < 2
        with pytest.raises(TransferTimeout):
            transfer.release()
        assert agent.counters().in_quarantine == 1
        assert agent._loaded, "NIXL loses sight of a read whose peer is removed"
        serving.resume()
        drain(agent)
        transfer.release()
        mine[:] = POISON
        time.sleep(0.3)
        assert (mine == POISON).all()
        read_all(agent.connect(serving.metadata), serving.memory, target, SIZE)
        assert np.array_equal(mine, content(SIZE, 4))


def open_files(process: int | str) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def test_many_connections_keep_no_sockets(make_agent):
    agent = make_agent()
    with Serving(MIB, transports=TCP) as serving:
        target = agent.register(memory_of(poisoned(MIB)))
        counts = []
        for i in range(25):
            peer = agent.connect(serving.metadata)
            read_all(peer, serving.memory, target, 4096)
            peer.disconnect()
            if i in (2, 24):
                counts.append((open_files("self"), open_files(serving.process.pid)))
        assert counts[0] == counts[1]


def test_idle_peers_are_bounded(make_agent, monkeypatch):
    monkeypatch.setattr(nixl_agent, "MAX_IDLE_PEERS", 2)
    agent = make_agent()
    others = [make_agent(f"prefiller-{i}", serves=True) for i in range(4)]
    for other in others:
        agent.connect(other.metadata()).disconnect()
    assert len(agent._loaded) == 2
    agent.connect(others[0].metadata()).disconnect()
