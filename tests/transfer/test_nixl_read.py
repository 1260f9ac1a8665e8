"""One range of another process's memory, over shared memory and over TCP."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange
from tests.transfer.nixl_serving import MIB, POISON, TCP, Serving, content, memory_of, poisoned, wait


@pytest.mark.parametrize("transports", [None, TCP], ids=["default", "tcp"])
def test_a_range_arrives_and_nothing_beside_it(make_agent, transports):
    agent = make_agent(transports=transports)
    with Serving(MIB, seed=3, transports=transports) as serving:
        mine = poisoned(MIB)
        target = agent.register(memory_of(mine))
        peer = agent.connect(serving.metadata)
        assert peer.name == "prefiller"
        transfer = peer.read(serving.memory, target, [ReadRange(4097, 1000, 70_001)])
        assert transfer.nbytes == 70_001
        wait(transfer)
        transfer.release()
        transfer.release()
        assert np.array_equal(mine[1000:71_001], content(MIB, 3)[4097 : 4097 + 70_001])
        assert (mine[:1000] == POISON).all()
        assert (mine[71_001:] == POISON).all()


def test_a_read_larger_than_what_is_in_flight(make_agent):
    """20 MiB in pieces of 256 KiB, four at a time."""
    agent = make_agent(in_flight_bytes=MIB)
    with Serving(20 * MIB, seed=1, transports=TCP) as serving:
        mine = poisoned(20 * MIB)
        target = agent.register(memory_of(mine))
        transfer = agent.connect(serving.metadata).read(serving.memory, target, [ReadRange(0, 0, 20 * MIB)])
        wait(transfer)
        transfer.release()
        assert np.array_equal(mine, content(20 * MIB, 1))


def test_counters(make_agent):
    agent = make_agent()
    with Serving(MIB, transports=TCP) as serving:
        mine = poisoned(MIB)
        target = agent.register(memory_of(mine))
        peer = agent.connect(serving.metadata)
        before = agent.counters()
        for _ in range(3):
            wait(peer.read(serving.memory, target, [ReadRange(0, 0, 1000), ReadRange(2000, 1000, 24)]))
        after = agent.counters()
    assert before.reads_started == before.reads_finished == before.bytes_read == 0
    assert (after.reads_started, after.reads_finished, after.bytes_read) == (3, 3, 3072)
    assert (after.reads_failed, after.reads_given_up, after.reads_quarantined, after.in_quarantine) == (0, 0, 0, 0)
