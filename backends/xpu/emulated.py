"""The device xpu-emulated: a worker process in the environment of `environment.py`, driven over a socket and shared memory.

Pages are an engine's in host memory. A call copies the storages that hold them into shared memory, the worker packs or lands there, and
what landing changed is copied back, so no byte that it did not write is touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from backends.cpu.device import HostMemory
from backends.xpu import frames
from backends.xpu.described import Places, layers_as_messages, shares_as_messages
from backends.xpu.environment import need_environment
from backends.xpu.frames import Call, Done, Failed, Hello, SharedMemory
from bridge.cache_folder import cache_folder
from bridge.devices import DeviceError, SpanShare
from bridge.errors import all_error_types
from bridge.pages import BlockTable, PagedCache, PagesDoNotFit
from bridge.wire import TagKeys

CALL_SECONDS = 600.0
"""A call's bound: the first one of a kind compiles its kernels, some seconds each."""


class WorkerDied(DeviceError):
    """The emulated XPU's process ended, or did not answer in time; the next call starts another."""

    clause = "xpu_worker_died"
    remedy = "see its error output; the next call starts a new one"


class _Worker:
    """One process, its end of the socket, and the memory that both map."""

    def __init__(self) -> None:
        made = need_environment()
        self.memory = SharedMemory()
        self.link, theirs = socket.socketpair()
        self.link.settimeout(CALL_SECONDS)
        cache = cache_folder() / "xpu"
        # Nothing of this process's Triton or Python may steer the other's.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTHON"))}
        # The runtime would spend a minute a kernel on optimising once more; vectors are what sub-groups need.
        settings = {"TRITON_CACHE_DIR": str(cache / "triton"), "CL_CONFIG_CPU_O0_VECTORIZATION": "1", "OMP_NUM_THREADS": "1"}
        try:
            self.process = subprocess.Popen(
                [
                    made.python,
                    "-P",
                    Path(__file__).with_name("worker.py"),
                    str(theirs.fileno()),
                    str(self.memory.descriptor),
                    cache / "opencl",
                ],
                pass_fds=(theirs.fileno(), self.memory.descriptor),
                env={**inherited, **settings},
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()

    def ask(self, message: Call | Hello) -> Done | Failed:
        """Raises WorkerDied."""
        try:
            frames.send(self.link, message)
            answer = frames.receive_answer(self.link)
        except TimeoutError:
            raise WorkerDied(f"the emulated XPU's process did not answer within {CALL_SECONDS:.0f} s") from None
        except OSError as error:
            raise WorkerDied(f"the link to the emulated XPU's process broke: {error}") from None
        if answer is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            raise WorkerDied(f"the emulated XPU's process ended with exit code {self.process.poll()}")
        return answer

    def end(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait()
        self.memory.close()


class EmulatedXpu:
    """Exact by its settings: the kernels do the reference's arithmetic. One call runs at a time.

    Raises EnvironmentMissing where `make xpu-env` was not run.
    """

    name = "xpu-emulated"
    exact = True
    finite_only = True

    def __init__(self) -> None:
        need_environment()
        self._worker: _Worker | None = None
        self._lock = threading.Lock()
        self._made: list[_Worker] = []
        weakref.finalize(self, _end_all, self._made)

    def probe(self) -> str:
        """Who the worker is, and which shares did not go through a kernel. Raises WorkerDied."""
        with self._turn() as worker:
            return f"an emulated XPU, no hardware: {self._answer(worker, Hello()).report}"

    def allocate_staging(self, nbytes: int) -> HostMemory:
        return HostMemory(nbytes)

    def pack(self, cache: PagedCache, table: BlockTable, shares: Sequence[SpanShare], keys: TagKeys, out: np.ndarray) -> None:
        """See bridge.devices.Device. Raises PagesDoNotFit and WorkerDied."""
        if not out.flags.writeable:
            raise PagesDoNotFit("a payload cannot be packed into memory that is read-only")
        with self._turn() as worker:
            call, _ = _call(worker.memory, cache, table, shares, keys, out.size, None)
            self._answer(worker, call)
            packed = worker.memory.bytes[call.payload[0] :]
            for share in shares:
                out[share.offset : share.offset + share.nbytes] = packed[share.offset : share.offset + share.nbytes]

    def land(
        self,
        cache: PagedCache,
        table: BlockTable,
        shares: Sequence[SpanShare],
        keys: TagKeys,
        data: np.ndarray,
        write_first: int,
        write_end: int,
    ) -> None:
        """See bridge.devices.Device. Raises BadTag, DirtyPadding, PagesDoNotFit and WorkerDied."""
        with self._turn() as worker:
            call, places = _call(worker.memory, cache, table, shares, keys, data.size, (write_first, write_end))
            sent = worker.memory.bytes[call.payload[0] :]
            for share in shares:
                part = data[share.offset : share.offset + share.nbytes]
                sent[share.offset : share.offset + part.size] = part
            before = [held.copy() for held, _ in places.storages.values()]
            self._answer(worker, call)
            for (held, place), old in zip(places.storages.values(), before, strict=True):
                new = worker.memory.bytes[place : place + held.size]
                changed = np.flatnonzero(new != old)
                held[changed] = new[changed]

    def close(self) -> None:
        """Ends the worker; a later call starts another."""
        with self._lock:
            self._end()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[_Worker]:
        with self._lock:
            if self._worker is None:
                self._worker = _Worker()
                self._made.append(self._worker)
            try:
                yield self._worker
            except (WorkerDied, frames.BadFrame):
                self._end()
                raise

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._made.remove(self._worker)
            self._worker = None

    def _answer(self, worker: _Worker, message: Call | Hello) -> Done:
        answer = worker.ask(message)
        if isinstance(answer, Failed):
            raise all_error_types().get(answer.clause, DeviceError)(answer.detail, remedy=answer.advice)
        return answer


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()


def _call(
    memory: SharedMemory,
    cache: PagedCache,
    table: BlockTable,
    shares: Sequence[SpanShare],
    keys: TagKeys,
    payload_bytes: int,
    write: tuple[int, int] | None,
) -> tuple[Call, Places]:
    """The message, and the pages copied into shared memory: payload first, then the storages."""
    places = Places(payload_bytes)
    layers = layers_as_messages(cache, [share.model_layer for share in shares], places)
    memory.grow(places.end)
    for held, place in places.storages.values():
        memory.bytes[place : place + held.size] = held
    call = Call(
        memory=memory.bytes.size,
        layers=layers,
        first_head=cache.first_head,
        table=tuple(int(page) for page in table.pages),
        block_size=table.block_size,
        shares=shares_as_messages(shares),
        tags=keys.parts(),
        payload=(0, payload_bytes),
        write=write,
    )
    return call, places
