"""Calls from several threads at once."""

from __future__ import annotations

import threading
import time

import numpy as np

from bridge.transfer.agent import ReadRange
from tests.transfer.nixl_serving import MIB, POISON, TCP, Serving, content, memory_of, poisoned


def test_threads_read_register_and_connect(make_agent):
    agent = make_agent()
    failures: list[BaseException] = []
    with Serving(MIB, seed=2, transports=TCP) as serving:
        theirs = content(MIB, 2)

        def work(seed: int) -> None:
            try:
                random = np.random.default_rng(seed)
                for _ in range(12):
                    mine = poisoned(200_000)
                    target = agent.register(memory_of(mine))
                    peer = agent.connect(serving.metadata)
                    start, size = int(random.integers(0, MIB - 200_000)), int(random.integers(1, 200_000))
                    transfer = peer.read(serving.memory, target, [ReadRange(start, 0, size)])
                    limit = time.monotonic() + 20
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
            thread.join(40)
            assert not thread.is_alive()
    assert not failures, failures
    counters = agent.counters()
    assert (counters.reads_started, counters.reads_finished, counters.in_quarantine) == (72, 72, 0)
    assert agent.registered_bytes() == 0
    assert not agent._peers


def test_other_threads_run_while_bytes_move(make_agent):
    """The library is left to work without the interpreter's lock."""
    agent = make_agent()
    with Serving(64 * MIB, transports=TCP) as serving:
        target = agent.register(memory_of(poisoned(64 * MIB)))
        transfer = agent.connect(serving.metadata).read(serving.memory, target, [ReadRange(0, 0, 64 * MIB)])
        moments, stop = [], threading.Event()

        def tick() -> None:
            while not stop.is_set():
                moments.append(time.perf_counter())
                time.sleep(0.001)

        ticking = threading.Thread(target=tick, daemon=True)
        ticking.start()
        started = time.perf_counter()
        while not transfer.done():
            assert time.perf_counter() - started < 20
        took = time.perf_counter() - started
        stop.set()
        ticking.join(5)
    assert len(moments) > 0.1 * took / 0.001 * 0.2, f"another thread ran {len(moments)} times in {took:.3f} s"
