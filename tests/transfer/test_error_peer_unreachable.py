"""PeerUnreachable: a peer that is gone, has been restarted, or is this agent itself. (Metadata that is not whole: test_metadata.py.)"""

from __future__ import annotations

import time

import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import PeerUnreachable, TransferFailed
from tests.transfer.serving import MIB, Serving, memory_of, poisoned, wait


def test_of_itself(make):
    agent = make(serves=True)
    with pytest.raises(PeerUnreachable, match="itself"):
        agent.connect(agent.metadata())


@pytest.mark.slow
def test_a_peer_that_is_gone(make, kind):
    """Which of both errors depends on the transport: NIXL may say it at the first read only."""
    agent = make()
    with Serving(MIB, kind=kind) as serving:
        serving.kill()
        target = agent.register(memory_of(poisoned(MIB)))
        started = time.monotonic()
        with pytest.raises((PeerUnreachable, TransferFailed)):
            wait(agent.connect(serving.metadata).read(serving.memory, target, [ReadRange(0, 0, MIB)]))
        assert time.monotonic() - started < 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ucx", "stream"])
def test_a_peer_that_hangs(make, kind):
    """Connecting is bounded. NIXL alone connects without an answer; its reads then do not end (test_error_transfer_timeout.py)."""
    hasty, patient = make("hasty", connect_seconds=1.0), make("patient")
    with Serving(MIB, kind=kind) as serving:
        serving.suspend()
        started = time.monotonic()
        with pytest.raises(PeerUnreachable):
            hasty.connect(serving.metadata)
        assert time.monotonic() - started < 15
        serving.resume()
        patient.connect(serving.metadata).disconnect()
