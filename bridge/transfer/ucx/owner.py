"""The serving side: answers reads from what is registered at that moment. UCX runs it on the worker's thread."""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from bridge.transfer.ucx import wire
from bridge.transfer.ucx.worker import UcxWorker

MAX_SESSIONS = 256
MAX_REQUESTS = 64
"""Of one reader at a time."""


class Served(Protocol):
    """Registered memory as the serving side sees it."""

    array: np.ndarray
    """uint8 [nbytes]"""

    def enter(self) -> bool:
        """Whether it may be read until `leave`; False after release."""
        ...

    def leave(self) -> None: ...


class _Session:
    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self.under_way: dict[int, int] = {}  # request: region
        self.moved = time.monotonic()


class Owner:
    """Every method is called on the worker's thread, but for `sessions`."""

    def __init__(self, worker: Callable[[], UcxWorker], instance: bytes, find: Callable[[int], Served | None], silence: float) -> None:
        self._worker, self._instance, self._find, self._silence = worker, instance, find, silence
        self._sessions: dict[bytes, _Session] = {}
        self.refused = 0

    def sessions(self) -> int:
        """How many readers are connected."""
        return len(self._sessions)

    def handle(self, message: wire.Message) -> None:
        """A reader's message. Raises BadMessage."""
        if isinstance(message, wire.Hello):
            self._hello(message)
            return
        session = self._sessions.get(message.session)
        if session is None:
            raise wire.BadMessage("a message of no session")
        if isinstance(message, wire.Read):
            self._read(session, message)
        elif isinstance(message, wire.Bye):
            self._drop(message.session)

    def _hello(self, hello: wire.Hello) -> None:
        if not hmac.compare_digest(hello.proof, wire.prove(self._instance, hello.session, hello.address)):
            raise wire.BadMessage("a reader that does not hold this agent's metadata")
        if hello.session in self._sessions:
            raise wire.BadMessage("a session that exists")
        worker = self._worker()
        try:
            endpoint = worker.connect(hello.address)
        except Exception as error:  # the bindings raise types of their own
            raise wire.BadMessage(f"a reader's address is not understood: {error}") from error
        if len(self._sessions) >= MAX_SESSIONS:
            self.refused += 1
            sentence = f"it serves {MAX_SESSIONS} readers already"
            worker.say(endpoint, wire.Welcome(hello.session, sentence), lambda status: worker.disconnect(endpoint))
            return
        self._sessions[hello.session] = _Session(endpoint)
        worker.say(endpoint, wire.Welcome(hello.session, ""))

    def _read(self, session: _Session, read: wire.Read) -> None:
        rows = wire.read_rows(read)
        region = self._find(read.region)
        sentence = ""
        if read.request in session.under_way or len(session.under_way) >= MAX_REQUESTS:
            sentence = f"more than {MAX_REQUESTS} requests at a time"
        elif region is None or not region.enter():
            sentence = "these bytes are not registered"
        elif not _inside(rows, len(region.array)):
            region.leave()
            sentence = "a range lies outside the registered memory"
        worker = self._worker()
        worker.say(session.endpoint, wire.Verdict(read.session, read.request, sentence))
        if sentence or region is None:
            self.refused += 1
            nothing = np.empty(0, np.uint8)
            pairs = [(nothing, wire.data_tag(read.request, i)) for i in range(len(rows))]
            worker.send(session.endpoint, pairs, lambda status: None)
            return
        session.under_way[read.request] = read.region
        session.moved = time.monotonic()
        array, served = region.array, region
        pairs = [(array[offset : offset + nbytes], wire.data_tag(read.request, i)) for i, (offset, nbytes) in enumerate(rows.tolist())]

        def sent(status: int) -> None:
            served.leave()
            session.moved = time.monotonic()
            session.under_way.pop(read.request, None)

        worker.send(session.endpoint, pairs, sent)

    def tick(self) -> None:
        """Lets go of readers that have gone, or that take nothing of what they asked for."""
        now = time.monotonic()
        for number, session in list(self._sessions.items()):
            if not session.endpoint.alive or (session.under_way and now - session.moved > self._silence):
                self._drop(number)

    def let_go(self, region: int) -> None:
        """Ends the sessions that are still being sent bytes of this region."""
        for number, session in list(self._sessions.items()):
            if region in session.under_way.values():
                self._drop(number)

    def _drop(self, number: bytes) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            with contextlib.suppress(Exception):  # what is under way completes with an error, and leaves its memory
                self._worker().disconnect(session.endpoint)


def _inside(rows: np.ndarray, region_bytes: int) -> bool:
    """Whether every range has at least one byte and lies in a region of so many bytes; no sum can overflow."""
    size = np.uint64(region_bytes)
    nbytes, offset = rows["nbytes"], rows["offset"]
    return bool(((nbytes > 0) & (nbytes <= size)).all() and (offset <= size - nbytes).all())
