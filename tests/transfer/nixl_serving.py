"""A second process that serves registered memory through NIXL, and what the tests of this folder share.

As a program: python nixl_serving.py '{"name": ..., "nbytes": ..., "seed": ..., "transports": [...]}'. It prints one JSON line with its
metadata and address, then obeys lines on its standard input until that ends: "metadata" or "more" prints another such line.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bridge.transfer.agent import Memory, ReadRange, RemoteMemory
from bridge.transfer.nixl import NixlAgent, NixlPeer, NixlRegistration, NixlTransfer

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
POISON = 0xCD
TCP = ["tcp"]


def content(nbytes: int, seed: int) -> np.ndarray:
    """uint8 [nbytes] in which neither POISON nor a period of a power of two occurs."""
    return np.resize(np.arange(200, dtype=np.uint8) ^ np.uint8(seed & 0x07), nbytes)


KEPT: list[np.ndarray] = []
"""Registered memory must outlive its agent; the fixture `make_agent` empties this after it has closed its agents."""


def memory_of(array: np.ndarray) -> Memory:
    KEPT.append(array)
    return Memory(array.ctypes.data, array.nbytes)


def poisoned(nbytes: int) -> np.ndarray:
    return np.full(nbytes, POISON, dtype=np.uint8)


def wait(transfer: NixlTransfer, seconds: float = 20.0) -> None:
    """Until a read is done; raises what `done` raises."""
    limit = time.monotonic() + seconds
    while not transfer.done():
        assert time.monotonic() < limit, f"a read did not end within {seconds} s"


def read_all(peer: NixlPeer, source: RemoteMemory, target: NixlRegistration, nbytes: int) -> None:
    transfer = peer.read(source, target, [ReadRange(0, 0, nbytes)])
    wait(transfer)
    transfer.release()


class Serving:
    """The second process, as a context manager."""

    def __init__(self, nbytes: int, *, name: str = "prefiller", seed: int = 0, transports: list[str] | None = None) -> None:
        self.nbytes, self.seed, self.transports = nbytes, seed, transports
        order = json.dumps({"name": name, "nbytes": nbytes, "seed": seed, "transports": transports})
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        self.process = subprocess.Popen(
            [sys.executable, __file__, order], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT
        )
        self.metadata, self.memory = self._line()

    def _line(self) -> tuple[bytes, RemoteMemory]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 30)[0], "the serving process said nothing for 30 s"
        line = self.process.stdout.readline()
        assert line, f"the serving process ended, exit code {self.process.wait(10)}"
        said = json.loads(line)
        return base64.b64decode(said["metadata"]), RemoteMemory(said["address"], said["nbytes"])

    def ask(self, what: str) -> tuple[bytes, RemoteMemory]:
        assert self.process.stdin is not None
        self.process.stdin.write(what.encode() + b"\n")
        self.process.stdin.flush()
        return self._line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def suspend(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def _serve(order: dict[str, object]) -> None:
    agent = NixlAgent(str(order["name"]), transports=order["transports"])  # type: ignore[arg-type]
    kept = []

    def one_more(seed: int) -> np.ndarray:
        data = content(int(order["nbytes"]), seed)  # type: ignore[call-overload]
        kept.append((data, agent.register(memory_of(data))))
        return data

    def say(data: np.ndarray) -> None:
        blob = base64.b64encode(agent.metadata()).decode()
        print(json.dumps({"metadata": blob, "address": data.ctypes.data, "nbytes": data.nbytes}), flush=True)

    say(one_more(int(order["seed"])))  # type: ignore[call-overload]
    for line in sys.stdin:
        say(one_more(int(order["seed"]) + len(kept)) if line.strip() == "more" else kept[0][0])  # type: ignore[call-overload]


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
