"""An event loop in a thread of its own, so that engines of any kind, synchronous or not, can use a hand-off."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

from bridge.handoff.errors import Cancelled

T = TypeVar("T")

_END_SECONDS = 30.0


async def outlast(work: Sequence[asyncio.Future[Any]]) -> None:
    """Waits until all of it has ended, however often the waiting task is cancelled meanwhile; the cancellation is raised then.

    For what must not be left running: a thread that still writes an engine's pages.
    """
    cancelled: asyncio.CancelledError | None = None
    while unfinished := [one for one in work if not one.done()]:
        try:
            await asyncio.wait(unfinished)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        for one in work:
            _ = one.cancelled() or one.exception()  # or asyncio would log that nobody asked for it
        raise cancelled


class Job(Generic[T]):
    """A coroutine under way on a loop. Unlike with a plain future, `cancel` only asks: the future is done when the coroutine is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False
        loop.call_soon_threadsafe(self._begin, coroutine)

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.create_task(coroutine)
        self._task.add_done_callback(self._finish)
        if self._cancelled:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.future.set_exception(Cancelled("it was given up before it began"))
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())

    def cancel(self) -> None:
        """Asks the coroutine to give up, from any thread, idempotent."""
        self._cancelled = True
        with contextlib.suppress(RuntimeError):  # of a loop that is closed: then the job has ended
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())


class _Loop(asyncio.SelectorEventLoop):
    """asyncio's own, whichever an engine has installed, and names are looked up in threads of their own, one for each name.

    A look-up takes as long as the resolver likes, half a minute where its servers are silent. In the few threads that asyncio shares among
    all that may wait, those of one host's name held up every hand-off, and the end of the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._looking: dict[tuple[Any, ...], asyncio.Future[Any]] = {}

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[tuple[Any, ...]]:
        """As asyncio's. Raises OSError where no thread can be had."""
        asked = (host, port, family, type, proto, flags)
        found = self._looking.get(asked)
        if found is None:
            found = self.create_future()
            try:
                threading.Thread(target=self._look, args=(asked, found), name="kvbridge-name", daemon=True).start()
            except RuntimeError as error:
                raise OSError(f"no thread can be had to look up {host!r}: {error}") from error
            self._looking[asked] = found
        return list(await asyncio.shield(found))

    def _look(self, asked: tuple[Any, ...], found: asyncio.Future[Any]) -> None:
        answer, failure = None, None
        try:
            answer = socket.getaddrinfo(*asked)
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            self.call_soon_threadsafe(self._found, asked, found, answer, failure)

    def _found(self, asked: tuple[Any, ...], found: asyncio.Future[Any], answer: Any, failure: Exception | None) -> None:
        self._looking.pop(asked, None)
        if failure is None:
            found.set_result(answer)
        else:
            found.set_exception(failure)
            found.exception()  # or asyncio reports it where those who asked have given up


class LoopThread:
    """Runs coroutines for other threads. `close` cancels what is left and ends the thread, idempotent; no job is left waiting."""

    def __init__(self, name: str) -> None:
        self.loop = _Loop()
        self._jobs: set[Job[Any]] = set()
        self._starting = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine on the loop, from any thread. Raises Cancelled after close."""
        with self._starting:
            self._check_open(coroutine)
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Job[T]:
        """Starts a coroutine that may be cancelled, from any thread. Raises Cancelled after close."""
        with self._starting:
            self._check_open(coroutine)
            job = Job(self.loop, coroutine)
            self._jobs.add(job)
        job.future.add_done_callback(lambda _: self._jobs.discard(job))
        return job

    def _check_open(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if self._closing:
            coroutine.close()
            raise Cancelled("it is closed")

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Runs a coroutine on the loop and waits for its result, from any thread but the loop's own."""
        return self.submit(coroutine).result(timeout)

    def close(self) -> None:
        with self._starting:
            if self._closing:
                return
            self._closing = True
        ending = asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            ending.result(_END_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=_END_SECONDS)
        for job in list(self._jobs):
            if not job.future.done():
                job.future.set_exception(Cancelled("it did not end in time"))
        if not self._thread.is_alive():
            self.loop.close()

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
