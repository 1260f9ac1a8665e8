"""NIXL's own part of being used again (test_restart.py): endpoints that failed."""

from __future__ import annotations

import numpy as np

from tests.transfer.nixl_serving import MIB, POISON, TCP, Serving, content, memory_of, poisoned, read_all


def test_an_endpoint_that_failed_is_made_anew(make_agent):
    """The peer lives but its endpoint was given up as failed, as after a network partition: connecting again must heal it."""
    agent = make_agent()
    with Serving(MIB, seed=3, transports=TCP) as serving:
        mine = poisoned(MIB)
        target = agent.register(memory_of(mine))
        old = agent.connect(serving.metadata)
        read_all(old, serving.memory, target, MIB)
        agent._broken.add(old._native)
        mine[:] = POISON
        again = agent.connect(serving.metadata)
        read_all(again, serving.memory, target, MIB)
        assert np.array_equal(mine, content(MIB, 3))
        read_all(old, serving.memory, target, MIB)
        assert not agent._broken
