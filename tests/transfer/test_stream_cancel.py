"""Cancelling a read over the stream agent ends its bytes: at once here, and soon on the wire."""

from __future__ import annotations

import time

import numpy as np

from bridge.transfer.agent import ReadRange
from tests.transfer import agents
from tests.transfer.serving import KEPT, MIB, POISON, Serving, content, memory_of, poisoned, read_all
from tests.waiting import eventually

SIZE = 256 * MIB


def test_release_returns_at_once_and_the_wire_falls_silent():
    agent = agents.make("stream", "decoder", serves=False, files=agents.identities())
    with Serving(SIZE, kind="stream", seed=2) as serving:
        mine = poisoned(SIZE)
        target = agent.register(memory_of(mine))
        peer = agent.connect(serving.metadata)
        channel = peer._connection._channel
        # Until it was cancelled in the middle: on a busy machine all of it may have come before this thread has looked.
        finished = 0
        while True:
            mine[:] = POISON
            read = peer.read(serving.memory, target, [ReadRange(0, 0, SIZE)])
            assert eventually(lambda: mine[0] != POISON)
            before = channel.received
            read.release()
            if agent.counters().reads_given_up:
                break
            finished += 1
            assert finished < 10
        assert (agent.counters().reads_given_up, agent.counters().reads_finished) == (1, finished)
        mine[:] = POISON
        received, quiet, until = channel.received, time.monotonic(), time.monotonic() + 30
        while time.monotonic() - quiet < 0.5:
            assert time.monotonic() < until
            if channel.received != received:
                received, quiet = channel.received, time.monotonic()
            time.sleep(0.01)
        assert (mine == POISON).all(), "a byte landed after release had returned"
        # What was in the sockets, which may hold tens of megabytes, and in the owner's hands; not all that was missing.
        assert received - before <= 64 * MIB, "the owner went on sending what was cancelled"
        target.release()
        small = agent.register(memory_of(mine[:MIB]))
        read_all(peer, serving.memory, small, MIB)
        assert np.array_equal(mine[:MIB], content(MIB, 2))
        assert (mine[MIB:] == POISON).all()
    agent.close()
    KEPT.clear()
