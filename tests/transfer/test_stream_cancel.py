"""Cancelling a read over the stream agent ends its bytes: at once here, and soon on the wire."""

from __future__ import annotations

import time

import numpy as np

from bridge.transfer.agent import ReadRange
from tests.transfer import agents
from tests.transfer.serving import KEPT, MIB, POISON, Serving, content, memory_of, poisoned, read_all

SIZE = 256 * MIB


def test_release_returns_at_once_and_the_wire_falls_silent():
    agent = agents.make("stream", "decoder", serves=False, files=agents.identities())
    with Serving(SIZE, kind="stream", seed=2) as serving:
        mine = poisoned(SIZE)
        target = agent.register(memory_of(mine))
        peer = agent.connect(serving.metadata)
        channel = peer._connection._channel
        read = peer.read(serving.memory, target, [ReadRange(0, 0, SIZE)])
        limit = time.monotonic() + 20
        while mine[0] == POISON and time.monotonic() < limit:
            time.sleep(0.0005)
        assert mine[0] != POISON
        started = time.monotonic()
        read.release()
        took = time.monotonic() - started
        mine[:] = POISON
        assert took < 0.5, "it waits for one frame that is being decrypted, at most"
        received, quiet = channel.received, time.monotonic()
        while time.monotonic() - quiet < 0.5 and time.monotonic() < limit + 20:
            if channel.received != received:
                received, quiet = channel.received, time.monotonic()
            time.sleep(0.01)
        assert (mine == POISON).all(), "a byte landed after release had returned"
        assert received < SIZE // 2, "the owner went on sending what was cancelled"
        assert agent.counters().reads_given_up == 1
        target.release()
        small = agent.register(memory_of(mine[:MIB]))
        read_all(peer, serving.memory, small, MIB)
        assert np.array_equal(mine[:MIB], content(MIB, 2))
        assert (mine[MIB:] == POISON).all()
    agent.close()
    KEPT.clear()


def test_small_reads_do_not_wait_for_a_large_one():
    """The requests of one peer take turns, frame by frame."""
    agent = agents.make("stream", "decoder", serves=False, files=agents.identities())
    with Serving(SIZE, kind="stream", seed=2) as serving:
        large, small = agent.register(memory_of(poisoned(SIZE))), agent.register(memory_of(poisoned(4096)))
        peer = agent.connect(serving.metadata)
        long_read = peer.read(serving.memory, large, [ReadRange(0, 0, SIZE)])
        for _ in range(5):
            read_all(peer, serving.memory, small, 4096)
        assert not long_read.done()
        long_read.release()
    agent.close()
    KEPT.clear()
