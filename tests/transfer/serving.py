"""A second process that serves registered memory through an agent, and what the tests of this folder share.

As a program: python serving.py '{"kind": ..., "name": ..., "nbytes": ..., "seed": ..., "settings": {...}, "files": {...}}'. It prints one
JSON line with its metadata and address, then obeys lines on its standard input until that ends: "metadata" or "more" prints another such
line, "release" releases what it registered first, fills it with 0xEE and prints one.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.transfer.agent import Memory, ReadRange, RemoteMemory
from tests.transfer import agents

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
POISON = 0xCD


def content(nbytes: int, seed: int) -> np.ndarray:
    """uint8 [nbytes] in which neither POISON nor a period of a power of two occurs."""
    return np.resize(np.arange(200, dtype=np.uint8) ^ np.uint8(seed & 0x07), nbytes)


KEPT: list[np.ndarray] = []
"""Registered memory must outlive its agent; `closing` empties this after it has closed its agents."""


@contextlib.contextmanager
def closing(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`make`, whose agents are closed at the end, and then the memory that was registered with them is let go."""
    made: list[Any] = []

    def one(*arguments: Any, **settings: Any) -> Any:
        made.append(make(*arguments, **settings))
        return made[-1]

    yield one
    for agent in made:
        agent.close()
    KEPT.clear()


def memory_of(array: np.ndarray) -> Memory:
    KEPT.append(array)
    return Memory(array.ctypes.data, array.nbytes)


def poisoned(nbytes: int) -> np.ndarray:
    return np.full(nbytes, POISON, dtype=np.uint8)


def wait(transfer: Any, seconds: float = 30.0) -> None:
    """Until a read is done; raises what `done` raises."""
    limit = time.monotonic() + seconds
    while not transfer.done():
        assert time.monotonic() < limit, f"a read did not end within {seconds} s"
        time.sleep(0.0002)


def read_all(peer: Any, source: RemoteMemory, target: Any, nbytes: int) -> None:
    transfer = peer.read(source, target, [ReadRange(0, 0, nbytes)])
    wait(transfer)
    transfer.release()


class Serving:
    """The second process, as a context manager. within: the words of a command to run it under."""

    def __init__(
        self, nbytes: int, *, kind: str, name: str = "prefiller", seed: int = 0, within: Sequence[str] = (), **settings: Any
    ) -> None:
        self.nbytes, self.seed, self.kind = nbytes, seed, kind
        order = {"kind": kind, "name": name, "nbytes": nbytes, "seed": seed, "settings": settings, "files": agents.identities()}
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [*within, sys.executable, __file__, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        self.metadata, self.memory = self._line()

    def _said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 60)[0], "the serving process said nothing for 60 s"
        line = self.process.stdout.readline()
        assert line, f"the serving process ended, exit code {self.process.wait(10)}"
        return json.loads(line)

    def _line(self) -> tuple[bytes, RemoteMemory]:
        said = self._said()
        return base64.b64decode(said["metadata"]), RemoteMemory(said["address"], said["nbytes"])

    def _say(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what.encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, what: str) -> tuple[bytes, RemoteMemory]:
        """Another line of metadata, after "more", "release" or nothing but "metadata"."""
        self._say(what)
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


def _serve(order: dict[str, Any]) -> None:
    agent = agents.make(order["kind"], order["name"], serves=True, files=order["files"], **order["settings"])
    kept = []

    def one_more(seed: int) -> np.ndarray:
        data = content(order["nbytes"], seed)
        kept.append((data, agent.register(memory_of(data))))
        return data

    def say(data: np.ndarray) -> None:
        blob = base64.b64encode(agent.metadata()).decode()
        print(json.dumps({"metadata": blob, "address": data.ctypes.data, "nbytes": data.nbytes}), flush=True)

    say(one_more(order["seed"]))
    for line in sys.stdin:
        what = line.strip()
        if what == "release":
            kept[0][1].release()
            ctypes.memset(kept[0][0].ctypes.data, 0xEE, kept[0][0].nbytes)
        say(one_more(order["seed"] + len(kept)) if what == "more" else kept[0][0])


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
