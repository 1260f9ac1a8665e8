"""A peer that was killed and restarted under the same name is used again; the survivor is not restarted."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import PeerUnreachable, TransferFailed
from tests.transfer.serving import MIB, POISON, Serving, content, memory_of, poisoned, read_all, wait


@pytest.mark.parametrize("told", [True, False], ids=["old peer disconnected", "old peer still held"])
def test_under_the_same_name(make, kind, told):
    agent, mine = make(), poisoned(MIB)
    target = agent.register(memory_of(mine))
    with Serving(MIB, kind=kind, seed=1) as serving:
        started = time.monotonic()
        old = agent.connect(serving.metadata)
        read_all(old, serving.memory, target, MIB)
        usual = time.monotonic() - started
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
    with Serving(MIB, kind=kind, seed=6) as serving:
        mine[:] = POISON
        started = time.monotonic()
        read_all(agent.connect(serving.metadata), serving.memory, target, MIB)
        assert time.monotonic() - started < 2 + 5 * usual  # both 0.03 to 0.1 s on an idle host
        assert np.array_equal(mine, content(MIB, 6))
        if not told:
            with pytest.raises(TransferFailed):
                wait(old.read(serving.memory, target, [ReadRange(0, 0, 4096)]))
            old.disconnect()


@pytest.mark.parametrize("kind", ["stream"])
def test_old_metadata_of_a_restarted_stream_agent(make, kind):
    """On the same port, so that the new process is reached with the old one's metadata."""
    agent = make()
    with Serving(MIB, kind=kind, seed=1) as serving:
        metadata = serving.metadata
        peer = agent.connect(metadata)
        port = peer._connection.address[1]
        peer.disconnect()
    with Serving(MIB, kind=kind, seed=1, port=port), pytest.raises(PeerUnreachable, match="restarted"):
        agent.connect(metadata)
