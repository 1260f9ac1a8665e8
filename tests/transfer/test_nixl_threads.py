"""Polling NIXL leaves other threads room, and waiting for peers leaves the processor to others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from bridge.transfer.agent import ReadRange
from tests.transfer.nixl_serving import MIB, TCP, Serving, memory_of, poisoned


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


_IDLE = """
import time
from bridge.transfer.nixl import NixlAgent

agent = NixlAgent("idle")
time.sleep(0.2)
before = time.process_time()
time.sleep(1.0)
print(time.process_time() - before)
agent.close()
"""


def test_an_idle_agent_that_serves_takes_no_processor_time() -> None:
    done = subprocess.run([sys.executable, "-c", _IDLE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 0.2, "the library's thread did not sleep"
