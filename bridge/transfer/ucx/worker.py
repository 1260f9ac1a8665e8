"""One UCX worker and the one thread that touches it. It sleeps on UCX's event descriptor; other threads hand it functions to run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from bridge.transfer.errors import AgentUnavailable, TransferError, no_thread, said
from bridge.transfer.ucx import wire
from bridge.transfer.ucx.library import INSTALL, load
from bridge.transfer.ucx_environment import DEVICE_READS, STARTING, allowed_transports, environment
from bridge.transfer.waker import Waker

T = TypeVar("T")

_CONTROL_BUFFERS = 64
_MOST_CONTROL_BUFFERS = 1 << 12
"""While so many messages are unfinished, their senders having stopped. 64 MiB."""
_SPINS = 128  # progress calls between two looks at what has completed
_CLOSE_NANOSECONDS = 2 * 10**9
_LOOK_SECONDS = 0.001
OK = 0
NOT_STARTED = -1
"""The status of requests that UCX refused to start. Its own are other numbers."""

_LOG = logging.getLogger("kvbridge.transfer")


class _Watch:
    """Requests that were started together; `done` is called once with the first bad status, or OK."""

    def __init__(self, held: object, done: Callable[[int], None]) -> None:
        self.requests: deque[Any] = deque()
        self.held, self.done = held, done
        self.status = OK

    def completed(self) -> bool:
        while self.requests and self.requests[0].completed:
            status = int(self.requests.popleft().status)
            self.status = self.status or status
        return not self.requests


def _context(bindings: Any, options: dict[str, str]) -> Any:
    """A UCX context, with a registration cache where UCX can have one. Raises what ucxx raises.

    Without one, UCX (1.21) ends the process when a peer dies in the middle of a message (ucp_memh_invalidate, of no cache). It has none
    where it cannot watch the process's memory: for a further agent, once another UCX (NIXL's own, for one) was loaded after ours.
    """
    features = (bindings.Feature.TAG, bindings.Feature.WAKEUP)
    try:
        return bindings.UCXContext(options | {"RCACHE_ENABLE": "y"}, feature_flags=features)
    except Exception as error:  # the bindings raise types of their own
        context = bindings.UCXContext(options, feature_flags=features)
        _LOG.warning(
            "UCX has no registration cache (%s): it may end this process when a peer dies in the middle of a read; "
            "let one process use one of the agents ucx and nixl, and leave UCX_MEM_EVENTS at its default",
            said(error),
        )
        return context


class UcxWorker:
    """transports: UCX's, used where the environment has no UCX_TLS. handle: called with each control message; tick: after each round; both
    on the worker's thread. Raises AgentUnavailable.
    """

    def __init__(self, transports: Sequence[str] | None, handle: Callable[[wire.Message], None], tick: Callable[[], None]) -> None:
        self._handle, self._tick = handle, tick
        with STARTING, environment(DEVICE_READS):  # UCX's own variables are read as well
            tls, self.allowed = allowed_transports(transports)
            self._bindings, self._array = load()
            u = self._bindings
            options = {"WARN_UNUSED_ENV_VARS": "n", "RNDV_THRESH": str(wire.EAGER_BYTES)} | ({} if tls is None else {"TLS": tls})
            try:
                self._context = _context(u, options)
                self._worker = u.UCXWorker(self._context)
                self._worker.init_blocking_progress_mode()
                self.address: bytes = self._worker.address.tobytes()
            except Exception as error:  # the bindings raise types of their own
                names = "all its transports" if tls is None else f"UCX_TLS={tls}"
                raise AgentUnavailable(
                    f"UCX refuses to start with {names}: {said(error)}",
                    remedy="correct UCX_TLS or the configured transports, or " + INSTALL,
                ) from error
        self._waker = Waker()
        self._jobs: deque[Callable[[], None]] = deque()
        self._watches: list[_Watch] = []
        self._endpoints: list[Any] = []
        self._control: list[tuple[Any, np.ndarray]] = []
        for buffer in np.zeros((_CONTROL_BUFFERS, wire.CONTROL_BYTES), np.uint8):
            self._post_control(buffer)
        self._looked = 0.0
        self._closing = False
        self._behind: threading.Event | None = None
        self._surprised = False
        self.failure: str | None = None
        """Why the thread has ended by itself: nothing runs any more."""
        self.ignored = 0
        """Control messages that were malformed or out of turn."""
        self._thread = threading.Thread(target=self._run, name="kvbridge-ucx", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._waker.close()
            raise no_thread("the ucx agent", error) from error

    # -- from any thread

    def post(self, job: Callable[[], None]) -> None:
        """Runs `job` on the worker's thread, soon. Nothing runs after close."""
        self._jobs.append(job)
        self._waker.wake()

    def call(self, function: Callable[[], T], timeout: float) -> T:
        """Runs `function` on the worker's thread and returns its result. Raises TimeoutError, or what it raises.

        After TimeoutError it does not run, unless it had begun.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.check()
        if self._closing:
            raise AgentUnavailable("the ucx agent is closed", remedy="make a new one")
        self.post(job)
        try:
            return future.result(timeout)
        finally:
            future.cancel()

    def check(self) -> None:
        """Raises AgentUnavailable where the thread has ended by itself."""
        if self.failure is not None:
            raise AgentUnavailable(f"the ucx agent's thread has ended: {self.failure}", remedy="restart this process, and report it")

    def catch_up(self, seconds: float) -> None:
        """Waits until what was posted so far has run, `seconds` at most; not at all while an earlier wait has been in vain.

        So many callers wait no longer together than one of them alone.
        """
        behind = self._behind
        if self._closing or (behind is not None and not behind.is_set()):
            return
        ran = threading.Event()
        self.post(ran.set)
        if not ran.wait(seconds):
            self._behind = ran

    def close(self) -> bool:
        """Closes every endpoint and destroys the worker; whether nothing was left unfinished. Idempotent."""
        self._closing = True
        self._waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)
        return not self._thread.is_alive() and not self._watches

    # -- on the worker's thread

    def connect(self, address: bytes) -> Any:
        """An endpoint to another worker. Raises what ucxx raises."""
        remote = self._bindings.UCXAddress.create_from_buffer(address)
        endpoint = self._worker.create_endpoint_from_worker_address(remote, True)
        self._endpoints.append(endpoint)
        return endpoint

    def disconnect(self, endpoint: Any) -> None:
        """Closes an endpoint by force; what was under way with it completes with an error. Idempotent."""
        if endpoint in self._endpoints:
            self._endpoints.remove(endpoint)
            with contextlib.suppress(Exception):  # a peer that died may have closed it
                endpoint.close_blocking(period=_CLOSE_NANOSECONDS, max_attempts=1)
            # Where the endpoint had failed by itself, closing it does not end its receives; this does, and leaves other endpoints' alone.
            with contextlib.suppress(Exception):
                self._worker.cancel_inflight_requests(_CLOSE_NANOSECONDS, 1)

    def send(self, endpoint: Any, pairs: Sequence[tuple[np.ndarray, int]], done: Callable[[int], None]) -> None:
        """Sends arrays (uint8) under their tags. Raises what ucxx raises; `done` is called also then, once those that began have ended."""
        self._start(endpoint.tag_send, pairs, done)

    def say(self, endpoint: Any, message: wire.Message, done: Callable[[int], None] = lambda status: None) -> None:
        """Sends a control message."""
        self.send(endpoint, [(wire.encode(message), wire.CONTROL_TAG)], done)

    def receive(self, endpoint: Any, pairs: Sequence[tuple[np.ndarray, int]], done: Callable[[int], None]) -> None:
        """Receives into arrays (uint8) under their tags. Raises as `send` does."""
        self._start(endpoint.tag_recv, pairs, done)

    def _start(self, start: Callable[..., Any], pairs: Sequence[tuple[np.ndarray, int]], done: Callable[[int], None]) -> None:
        watch = _Watch(pairs, done)
        self._watches.append(watch)
        try:
            for data, tag in pairs:
                watch.requests.append(start(self._array(data), self._bindings.UCXXTag(tag)))
        except BaseException:
            watch.status = NOT_STARTED
            raise

    def _post_control(self, buffer: np.ndarray) -> None:
        buffer[:] = 0
        request = self._worker.tag_recv(self._array(buffer), self._bindings.UCXXTag(wire.CONTROL_TAG))
        self._control.append((request, buffer))

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._worker.epoll_file_descriptor, select.POLLIN)
        poller.register(self._waker, select.POLLIN)
        try:
            while not self._closing:
                moved = self._round()
                if not moved and not self._jobs and self._worker.arm():
                    poller.poll(200)
                    self._waker.clear()
        except Exception as error:  # the bindings raise types of their own
            self.failure = said(error)
            _LOG.exception("the ucx agent's thread has ended: nothing is read or served any more")
        finally:
            self._closing = True
            self._end()

    def _end(self) -> None:
        for endpoint in list(self._endpoints):
            self.disconnect(endpoint)
        with contextlib.suppress(Exception):
            self._worker.cancel_inflight_requests(_CLOSE_NANOSECONDS, 1)
        for _ in range(100):
            with contextlib.suppress(Exception):  # what ended the thread may come again
                if not self._round() and not self._watches:
                    break
        self._control.clear()
        self._waker.close()
        del self._worker, self._context

    def _round(self) -> bool:
        """One round of progress; whether anything happened."""
        spins = 0
        while spins < _SPINS and self._worker.progress_once():
            spins += 1
        moved = spins > 0
        while self._jobs:
            moved = True
            self._jobs.popleft()()
        moved |= self._receive_control(0)
        moved |= self._make_room()
        if any(watch.completed() for watch in self._watches):
            moved = True
            over = [watch for watch in self._watches if watch.completed()]
            self._watches = [watch for watch in self._watches if not watch.completed()]
            for watch in over:
                watch.done(watch.status)
        # Behind a message whose sender has stopped in the middle of it: it holds nobody up. Seldom, since asking each costs.
        now = time.monotonic()
        if not moved or now - self._looked > _LOOK_SECONDS:
            self._looked = now
            place = 1
            while place < len(self._control):
                if self._control[place][0].completed:
                    moved |= self._receive_control(place)
                else:
                    place += 1
        self._tick()
        return moved

    def _receive_control(self, place: int) -> bool:
        """Handles the control messages that have come to the receives from `place` on, until one that has not; whether any had."""
        moved = False
        while place < len(self._control) and self._control[place][0].completed:
            moved = True
            request, buffer = self._control.pop(place)
            if int(request.status) == OK:
                self._dispatch(buffer)
            if not self._closing and len(self._control) < _CONTROL_BUFFERS:
                self._post_control(buffer)
        return moved

    def _make_room(self) -> bool:
        """Posts more receives, up to _MOST_CONTROL_BUFFERS, where a control message has found none; whether any.

        All that there are may be held by senders that have stopped in the middle: others would wait until these are gone.
        """
        before = len(self._control)
        while not self._closing and len(self._control) < _MOST_CONTROL_BUFFERS and self._unexpected():
            self._post_control(np.empty(wire.CONTROL_BYTES, np.uint8))
        return len(self._control) > before

    def _unexpected(self) -> bool:
        """Whether a control message waits for a receive (0.7 us)."""
        probe = getattr(self._worker, "tag_probe", None)  # not in every ucxx, and a bare truth value in some
        if probe is None:
            return False
        found = probe(self._bindings.UCXXTag(wire.CONTROL_TAG))
        return bool(getattr(found, "matched", found))

    def _dispatch(self, buffer: np.ndarray) -> None:
        try:
            self._handle(wire.decode(buffer))
        except TransferError:
            self.ignored += 1  # the data port is not authenticated: what is not understood is dropped
        except Exception:  # nor may it end the thread that everybody needs
            self.ignored += 1
            if not self._surprised:
                self._surprised = True
                _LOG.exception("a control message of the ucx agent could not be handled; further ones are only counted")
