"""Starts engine processes and talks to them; runs in the tests' own environment."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE, eventually

ROOT = Path(__file__).resolve().parents[2]
BOOT_SECONDS = 240
REQUEST_SECONDS = 120


def vllm_python() -> str | None:
    """The python of an environment with vLLM, or None: KVBRIDGE_VLLM_PYTHON, or .venv-vllm as `make vllm-env` makes it."""
    named = os.environ.get("KVBRIDGE_VLLM_PYTHON")
    if named:
        return named
    made = ROOT / ".venv-vllm" / "bin" / "python"
    return str(made) if (ROOT / ".venv-vllm" / ".ready").exists() else None


class EngineDied(Exception):
    """The engine's process ended, or did not answer in time."""


@dataclass(frozen=True)
class Finished:
    """What a request gave. logprobs: of the chosen tokens. params: kv_transfer_params for the router. steps: the engine's count then."""

    tokens: list[int]
    logprobs: list[float]
    reason: str
    cached: int | None
    params: dict[str, Any] | None
    steps: int
    time: float


class Engine:
    """One engine process."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        python = vllm_python()
        if python is None:
            raise EngineDied("there is no environment with vLLM")
        self.settings, self.log = settings, log
        settings = dict(settings)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            # Another numba than the tests' own would overwrite what that one has compiled.
            "NUMBA_CACHE_DIR": str(Path(python).parent.parent / "numba-cache"),
            **settings.pop("environment", {}),
        }
        with log.open("a") as file:
            self.process = subprocess.Popen(
                ["nice", "-n", "5", python, "-m", "tests.vllm.engine_process", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        self._replies: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._finished: dict[str, Finished] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._internal: dict[str, str] = {}
        self._count = 0
        threading.Thread(target=self._read, daemon=True).start()
        self.ready: dict[str, int] | None = None
        self.ahead = False
        """Whether this vLLM schedules a step before it has seen the last one's tokens, as it does on GPUs."""

    def wait_ready(self) -> Engine:
        if self.ready is None:
            answer = self._reply(BOOT_SECONDS)
            self.ready, self.ahead = answer["free"], answer["ahead"]
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event.pop("event") == "finished":
                request_id = event.pop("request_id")
                with self._changed:
                    self._finished[request_id] = Finished(**event)
                    self._changed.notify_all()
            else:
                self._replies.put(event)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._replies.put(None)

    def _reply(self, seconds: float) -> dict[str, Any]:
        try:
            event = self._replies.get(timeout=seconds)
        except queue.Empty:
            raise EngineDied(f"no answer within {seconds} s; {self.log}: {self._tail()}") from None
        if event is None:
            raise EngineDied(f"the engine's process ended; {self.log}: {self._tail()}")
        if "error" in event:
            raise RuntimeError(event["error"])
        return event

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def order(self, do: str, **arguments: Any) -> Any:
        """Sends an order and waits for its reply. Raises EngineDied, or RuntimeError with the engine's own words."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise EngineDied(f"the engine's process ended; {self.log}: {self._tail()}") from None
        return self._reply(REQUEST_SECONDS).get("value")

    def add(self, prompt: list[int], max_tokens: int, params: Any = None, request_id: str = "", **sampling: Any) -> str:
        """Adds a request and returns its name here."""
        self._count += 1
        name = request_id or f"r{self._count}"
        self._internal[name] = self.order("add", request_id=name, prompt=prompt, max_tokens=max_tokens, params=params, **sampling)
        return name

    def wait(self, name: str, seconds: float = REQUEST_SECONDS) -> Finished:
        deadline = time.monotonic() + seconds
        with self._changed:
            while name not in self._finished:
                remaining = deadline - time.monotonic()
                if self._ended or remaining <= 0:
                    raise EngineDied(f"request {name!r} did not finish; {self.log}: {self._tail()}")
                self._changed.wait(remaining)
            return self._finished.pop(name)

    def has_finished(self, name: str) -> bool:
        """Whether an order's reply was preceded by this request's end: both come through one pipe."""
        with self._changed:
            return name in self._finished

    def generate(self, prompt: list[int], max_tokens: int, params: Any = None, **more: Any) -> Finished:
        return self.wait(self.add(prompt, max_tokens, params, **more))

    def abort(self, name: str) -> None:
        self.order("abort", request_ids=[self._internal[name]])

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of tests.vllm.hooks.Hooks in every worker."""
        return self.order("rpc", method=f"kvb_{method}", arguments=list(arguments))

    @property
    def alive(self) -> bool:
        """A process that was killed takes a moment to end, longer where it has a card; its pipe is closed before that."""
        return self.process.poll() is None and not self._ended

    def counters(self) -> dict[str, int]:
        """Added up over ranks."""
        total: dict[str, int] = {}
        if self.process.poll() is not None:
            raise EngineDied("the engine's process has ended")
        for found in self.rpc("counters"):
            for name, count in found.items():
                total[name] = total.get(name, 0) + count
        return total

    def state(self) -> dict[str, int]:
        return self.order("state")

    def empty(self) -> bool:
        """Whether nothing is held: all blocks free, no request, no lease, no staging."""
        assert self.ready is not None
        state, counters = self.state(), self.counters()
        held = [counters.get(name, 0) for name in ("leases", "fetching", "sending", "prefiller_staging_bytes", "decoder_staging_bytes")]
        return state["free"] == self.ready["free"] and state["requests"] == 0 and not any(held)

    def assert_empty(self) -> None:
        """At the latest when leases have run out that nobody claimed."""
        if not eventually(self.empty, 3 * PATIENCE):
            raise AssertionError(f"not empty after {3 * PATIENCE} s: {self.state()} of {self.ready}, {self.counters()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self.order("close")
                self.process.wait(PATIENCE)
            except (EngineDied, subprocess.TimeoutExpired):
                self.kill()


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row. Of those that no system gives away unasked, from another place on in each process."""
    places = range(21000, 32000, 97)
    begin = os.getpid() % len(places)
    for first in (*places[begin:], *places[:begin]):
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise OSError("no free ports")
