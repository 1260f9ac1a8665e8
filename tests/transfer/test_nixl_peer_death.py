"""kill -9 of the serving process."""

from __future__ import annotations

import time

import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import TransferFailed
from tests.transfer.nixl_serving import MIB, Serving, memory_of, poisoned, read_all, wait

BOUND_S = 5.0  # measured on one host: 0.02 to 0.1 s


def test_between_two_reads_over_what_ucx_chooses(make_agent):
    agent = make_agent(transports=None)
    with Serving(MIB, transports=None) as serving:
        mine = poisoned(MIB)
        target = agent.register(memory_of(mine))
        peer = agent.connect(serving.metadata)
        read_all(peer, serving.memory, target, MIB)
        serving.kill()
        started = time.monotonic()
        with pytest.raises(TransferFailed):
            wait(peer.read(serving.memory, target, [ReadRange(0, 0, MIB)]), BOUND_S)
        assert time.monotonic() - started < BOUND_S
        target.release()
        peer.disconnect()
