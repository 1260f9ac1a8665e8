"""An event loop in a thread of its own, so that engines of any kind, synchronous or not, can use a hand-off."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from bridge.handoff.errors import Cancelled

T = TypeVar("T")


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
        self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())


class LoopThread:
    """Runs coroutines for other threads. `close` cancels what is left and ends the thread, idempotent."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Job[T]:
        """Starts a coroutine that may be cancelled, from any thread."""
        return Job(self.loop, coroutine)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Runs a coroutine on the loop and waits for its result, from any thread but the loop's own."""
        return self.submit(coroutine).result(timeout)

    def close(self) -> None:
        if self.loop.is_closed():
            return
        self.run(self._cancel_all(), timeout=5.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5.0)
        self.loop.close()

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
