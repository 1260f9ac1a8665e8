"""All methods of an agent may be called from any thread."""

from __future__ import annotations

import threading
import time

import numpy as np

from bridge.transfer.agent import ReadRange
from tests.transfer.serving import MIB, POISON, content, memory_of, poisoned


def test_threads_read_register_and_connect(make, served):
    agent = make()
    failures: list[BaseException] = []
    theirs = content(4 * MIB, 3)

    def work(seed: int) -> None:
        try:
            random = np.random.default_rng(seed)
            for _ in range(12):
                mine = poisoned(200_000)
                target = agent.register(memory_of(mine))
                peer = agent.connect(served.metadata)
                start, size = int(random.integers(0, MIB - 200_000)), int(random.integers(1, 200_000))
                transfer = peer.read(served.memory, target, [ReadRange(start, 0, size)])
                limit = time.monotonic() + 30
                while not transfer.done():
                    assert time.monotonic() < limit
                    agent.counters()
                transfer.release()
                target.release()
                peer.disconnect()
                assert np.array_equal(mine[:size], theirs[start : start + size])
                assert (mine[size:] == POISON).all()
        except BaseException as error:  # shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures
    counters = agent.counters()
    assert (counters.reads_started, counters.reads_finished, counters.in_quarantine) == (72, 72, 0)
    assert agent.registered_bytes() == 0
