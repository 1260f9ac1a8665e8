"""Peer.failure: what an agent knows of a connection that has ended."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import TransferFailed
from bridge.transfer.speed import WatchedAgent
from tests.transfer.serving import MIB, POISON, Serving, content, memory_of, poisoned, read_all, wait


def test_it_stays_with_the_connection_and_a_new_one_is_free_of_it(make, kind):
    agent, mine = WatchedAgent(make(), 0.001), poisoned(MIB)
    target = agent.register(memory_of(mine))
    with Serving(MIB, kind=kind, seed=1) as serving:
        peer = agent.connect(serving.metadata)
        read_all(peer, serving.memory, target, MIB)
        assert peer.failure is None
        serving.kill()
        limit = time.monotonic() + 10
        while peer.failure is None and time.monotonic() < limit:  # some agents are told of it, some by a read that fails
            with pytest.raises(TransferFailed):
                wait(peer.read(serving.memory, target, [ReadRange(0, 0, MIB)]))
        assert peer.failure
        with pytest.raises(TransferFailed, match="had failed") as caught:
            peer.read(serving.memory, target, [ReadRange(0, 0, MIB)])
        assert "connect again" in str(caught.value)
    with Serving(MIB, kind=kind, seed=2) as serving:
        again = agent.connect(serving.metadata)
        mine[:] = POISON
        read_all(again, serving.memory, target, MIB)
        assert np.array_equal(mine, content(MIB, 2))
        assert again.failure is None
        assert peer.failure
