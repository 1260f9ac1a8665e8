"""The serving side: answers reads from what is registered at that moment. UCX runs it on the worker's thread."""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from bridge.transfer.errors import said
from bridge.transfer.ranges import inside
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
        self.refusals = 0  # that it has not taken yet
        self.moved = time.monotonic()


class Owner:
    """Every method is called on the worker's thread, but for `sessions`."""

    def __init__(self, worker: Callable[[], UcxWorker], instance: bytes, find: Callable[[int], Served | None], silence: float) -> None:
        self._worker, self._instance, self._find, self._silence = worker, instance, find, silence
        self._sessions: dict[bytes, _Session] = {}
        self._turned_away = 0  # readers that are being told that there are too many
        self.refused = 0

    def sessions(self) -> int:
        """How many readers are connected."""
        return len(self._sessions)

    def handle(self, message: wire.Message) -> None:
        """A reader's message. Raises BadMessage."""
        try:
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
        except wire.BadMessage:
            raise
        except Exception as error:  # the bindings raise types of their own: the reader's endpoint has failed
            self._drop(message.session)
            raise wire.BadMessage(f"a reader that cannot be answered: {said(error)}") from error

    def _hello(self, hello: wire.Hello) -> None:
        if not hmac.compare_digest(hello.proof, wire.prove(self._instance, hello.session, hello.address)):
            raise wire.BadMessage("a reader that does not hold this agent's metadata")
        if hello.session in self._sessions:
            raise wire.BadMessage("a session that exists")
        full = len(self._sessions) >= MAX_SESSIONS
        if full and self._turned_away >= MAX_REQUESTS:
            raise wire.BadMessage("more readers than are served, or told so")
        worker = self._worker()
        try:
            endpoint = worker.connect(hello.address)
        except Exception as error:  # the bindings raise types of their own
            raise wire.BadMessage(f"a reader's address is not understood: {said(error)}") from error
        if full:
            self.refused += 1
            self._turned_away += 1

            def told(status: int) -> None:
                self._turned_away -= 1
                worker.disconnect(endpoint)

            worker.say(endpoint, wire.Welcome(hello.session, f"it serves {MAX_SESSIONS} readers already"), told)
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
        elif not inside(rows, len(region.array)):
            region.leave()
            sentence = "a range lies outside the registered memory"
        if sentence or region is None:
            self._refuse(session, read, len(rows), sentence)
            return
        worker = self._worker()
        session.under_way[read.request] = read.region
        session.moved = time.monotonic()
        array, served = region.array, region
        pairs = [(array[offset : offset + nbytes], wire.data_tag(read.request, i)) for i, (offset, nbytes) in enumerate(rows.tolist())]

        def sent(status: int) -> None:
            served.leave()
            session.moved = time.monotonic()
            session.under_way.pop(read.request, None)

        try:
            worker.say(session.endpoint, wire.Verdict(read.session, read.request, ""))
        except Exception:
            served.leave()
            raise
        worker.send(session.endpoint, pairs, sent)

    def _refuse(self, session: _Session, read: wire.Read, ranges: int, sentence: str) -> None:
        self.refused += 1
        if session.refusals >= MAX_REQUESTS:  # they would pile up here for as long as it takes none
            self._drop(read.session)
            return
        session.refusals += 1
        nothing = np.empty(0, np.uint8)

        def sent(status: int) -> None:
            session.refusals -= 1

        worker = self._worker()
        worker.say(session.endpoint, wire.Verdict(read.session, read.request, sentence))
        worker.send(session.endpoint, [(nothing, wire.data_tag(read.request, i)) for i in range(ranges)], sent)

    def tick(self) -> None:
        """Lets go of readers that have gone, or that take nothing of what they asked for."""
        now = time.monotonic()
        for number, session in list(self._sessions.items()):
            if not session.endpoint.alive or (session.under_way and now - session.moved > self._silence):
                self._drop(number)

    def sending(self) -> bool:
        """Whether something that a reader asked for is under way."""
        return any(session.under_way or session.refusals for session in self._sessions.values())

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
