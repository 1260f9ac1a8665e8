"""A peer that was killed and restarted under the same name is used again; the survivor is not restarted."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import TransferFailed
from tests.transfer.nixl_serving import MIB, POISON, TCP, Serving, content, memory_of, poisoned, read_all, wait


@pytest.mark.parametrize("told", [True, False], ids=["old peer disconnected", "old peer still held"])
def test_restart_under_the_same_name(make_agent, told):
    agent = make_agent()
    mine = poisoned(MIB)
    target = agent.register(memory_of(mine))
    with Serving(MIB, seed=1, transports=TCP) as serving:
        old = agent.connect(serving.metadata)
        read_all(old, serving.memory, target, MIB)
        transfer = old.read(serving.memory, target, [ReadRange(0, 0, MIB)])
        serving.kill()
    # the last read may have finished before the kill
    try:
        wait(transfer)
        transfer.release()
    except TransferFailed:
        pass
    if told:
        old.disconnect()
    with Serving(MIB, seed=6, transports=TCP) as serving:
        mine[:] = POISON
        started = time.monotonic()
        read_all(agent.connect(serving.metadata), serving.memory, target, MIB)
        assert time.monotonic() - started < 1.0
        assert np.array_equal(mine, content(MIB, 6))
    if not told:
        with pytest.raises(TransferFailed):
            wait(old.read(serving.memory, target, [ReadRange(0, 0, 4096)]))
        old.disconnect()


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
