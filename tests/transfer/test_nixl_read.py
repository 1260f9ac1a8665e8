"""One range of another process's memory over whatever UCX chooses; the suite of all agents (test_read.py) goes over TCP."""

from __future__ import annotations

import numpy as np

from bridge.transfer.agent import ReadRange
from tests.transfer.nixl_serving import MIB, POISON, Serving, content, memory_of, poisoned, wait


def test_a_range_arrives_and_nothing_beside_it_over_what_ucx_chooses(make_agent):
    agent = make_agent(transports=None)
    with Serving(MIB, seed=3, transports=None) as serving:
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
