"""The reading side: one link to each owner, and the reads that run over it. All of it runs on the worker's thread."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.transfer.errors import said
from bridge.transfer.ranges import RANGE
from bridge.transfer.ucx import wire
from bridge.transfer.ucx.library import transports_of
from bridge.transfer.ucx.worker import OK, UcxWorker

_PIECES_OF_A_READ = 16
_PIECES_OF_A_LINK = 32
_BYE_SECONDS = 0.2
_TRANSPORTS_SECONDS = 1.0
_LEAVE_SECONDS = 0.5
"""For what is under way when a link is left: endpoints that are closed by force may keep their sockets (UCX 1.21, TCP)."""


class Reading:
    """One read: its pieces, and what became of it."""

    def __init__(
        self, target: np.ndarray, region: int, pieces: list[np.ndarray], nbytes: int, window: int, ended: Callable[[Reading], None]
    ) -> None:
        """target: uint8, the registered memory. pieces: int64 [n, 3] of (byte of the region, byte of the target, bytes).

        window: bytes that are asked for at a time, and at least one piece. ended: called once, when the outcome is known, before `settled`
        is true.
        """
        self.target, self.region, self.nbytes, self.window = target, region, nbytes, window
        self.waiting = deque(pieces)
        self.in_flight = self.bytes_in_flight = 0
        self.failure: str | None = None
        self.given_up = False
        self.settled = False
        """No byte can arrive any more. Read from any thread, set on the worker's."""
        self._ended: Callable[[Reading], None] | None = ended

    @property
    def may_ask(self) -> bool:
        """Whether there is another piece, and room for it on the way."""
        if not self.waiting or self.in_flight >= _PIECES_OF_A_READ:
            return False
        return not self.in_flight or self.bytes_in_flight + int(self.waiting[0][:, 2].sum()) <= self.window

    def update(self) -> None:
        """Notes the end when there is one."""
        if (self.failure is not None or self.given_up) and self.waiting:
            self.waiting.clear()
        settled = not self.in_flight and not self.waiting
        if (settled or self.given_up) and self._ended is not None:
            ended, self._ended = self._ended, None
            ended(self)
        self.settled = settled


class _Piece:
    def __init__(self, reading: Reading, nbytes: int) -> None:
        self.reading, self.nbytes = reading, nbytes
        self.verdict: str | None = None
        self.status: int | None = None


class Link:
    """A reader's connection to one owner.

    patience: seconds after which an owner that sends nothing of what was given up loses its endpoint, so that the targets are safe.
    """

    def __init__(self, worker: UcxWorker, peer: str, instance: bytes, address: bytes, patience: float) -> None:
        self.peer = peer
        self.users = 0  # Peer objects, counted by the agent
        self.failure: str | None = None
        self.transports: list[str] = []
        """Those of the endpoint, as UCX last reported them. Read from any thread."""
        self.ready = threading.Event()
        self.readings: list[Reading] = []
        self._worker, self._patience = worker, patience
        self._session = secrets.token_bytes(wire.SESSION_BYTES)
        self._next = secrets.randbelow(wire.REQUESTS)
        self._pieces: dict[int, _Piece] = {}
        self._moved = time.monotonic()
        self._looked = 0.0
        self._closed, self._close_by = False, 0.0
        self._leave_by: float | None = None
        self._endpoint: Any = worker.connect(address)
        proof = wire.prove(instance, self._session, worker.address)
        try:
            worker.say(self._endpoint, wire.Hello(self._session, proof, worker.address))
        except Exception:
            worker.disconnect(self._endpoint)
            raise

    @property
    def session(self) -> bytes:
        return self._session

    def handle(self, message: wire.Welcome | wire.Verdict) -> None:
        """The owner's answers."""
        self._moved = time.monotonic()
        if isinstance(message, wire.Welcome):
            if message.sentence:
                self.fail(f"it refuses: {message.sentence}")
            self._look()
            self.ready.set()
        else:
            piece = self._pieces.get(message.request)
            if piece is not None:
                piece.verdict = message.sentence
                self._finish(message.request, piece)

    def start(self, reading: Reading) -> None:
        """Begins a read."""
        if reading.given_up:
            reading.update()
            return
        self.readings.append(reading)
        if self.failure is not None:
            reading.failure = self.failure
            reading.update()
        self.pump()

    def give_up(self, reading: Reading) -> None:
        """Asks for nothing more."""
        if not reading.settled and not reading.given_up:
            reading.given_up = True
            self._moved = time.monotonic()
            reading.update()

    def pump(self) -> None:
        """Asks for the next pieces; reads take turns."""
        self.readings = [reading for reading in self.readings if not reading.settled]
        if self.failure is None and not self._endpoint.alive:
            self.fail("the peer is gone")
        progress = self.failure is None
        while progress and len(self._pieces) < _PIECES_OF_A_LINK:
            progress = False
            for reading in self.readings:
                if reading.may_ask and len(self._pieces) < _PIECES_OF_A_LINK:
                    self._ask(reading)
                    progress = True

    def _ask(self, reading: Reading) -> None:
        table = reading.waiting.popleft()
        self._next = (self._next + 1) % wire.REQUESTS
        number = self._next
        rows = np.empty(len(table), RANGE)
        rows["offset"], rows["nbytes"] = table[:, 0], table[:, 2]
        target = reading.target
        pairs = [(target[at : at + n], wire.data_tag(number, i)) for i, (_, at, n) in enumerate(table.tolist())]
        piece = self._pieces[number] = _Piece(reading, int(rows["nbytes"].sum()))
        reading.in_flight += 1
        reading.bytes_in_flight += piece.nbytes

        def received(status: int) -> None:
            piece.status = status
            self._finish(number, piece)

        try:
            self._worker.receive(self._endpoint, pairs, received)
            self._worker.say(self._endpoint, wire.Read(self._session, number, reading.region, rows.tobytes()))
        except Exception as error:  # the bindings raise types of their own: the endpoint has failed
            self.fail(f"the peer is gone ({said(error)})")

    def _look(self) -> None:
        """Asks UCX for the endpoint's transports."""
        with contextlib.suppress(Exception):  # an endpoint that fails meanwhile
            if self.failure is None and self._endpoint.alive:
                self.transports = transports_of(self._endpoint.handle) or self.transports

    def _finish(self, number: int, piece: _Piece) -> None:
        self._moved = time.monotonic()
        if piece.status is None or (piece.status == OK and piece.verdict is None):
            return
        if self._pieces.pop(number, None) is None:
            return
        if self._moved - self._looked > _TRANSPORTS_SECONDS:  # they may change once there is something to carry
            self._looked = self._moved
            self._look()
        reading = piece.reading
        reading.in_flight -= 1
        reading.bytes_in_flight -= piece.nbytes
        if piece.status != OK:
            reading.failure = reading.failure or self.failure or f"UCX reports status {piece.status}"
        elif piece.verdict:
            reading.failure = reading.failure or piece.verdict
        reading.update()
        self.pump()
        if self._leave_by is not None and not self._pieces:
            self._part()

    def tick(self) -> None:
        """Notices an owner that has gone, or that is silent while the target of a read that was given up is not safe."""
        now = time.monotonic()
        if self._leave_by is not None:
            if now > self._leave_by:
                self._part()
            return
        if self.failure is not None:
            if not self._closed and now > self._close_by:
                self._close()
            return
        if not self._endpoint.alive:
            self.fail("the peer is gone")
        elif now - self._moved > self._patience and any(r.given_up and not r.settled for r in self.readings):
            self.fail(f"the peer was silent for {self._patience} s after a read was given up")

    def fail(self, reason: str) -> None:
        """Closes the endpoint: UCX then completes what was under way, with an error. Idempotent."""
        if self.failure is not None:
            return
        self.failure = reason
        self._part()
        for reading in self.readings:
            if not reading.settled and not reading.given_up:
                reading.failure = reading.failure or reason
                reading.update()
        self.ready.set()

    def leave(self) -> None:
        """Nobody uses this link any more: nothing more is asked for, and what is under way gets a moment to arrive."""
        if self.failure is not None:
            return
        self.failure = "it was disconnected"
        for reading in self.readings:
            self.give_up(reading)
        if self._pieces:
            self._leave_by = time.monotonic() + _LEAVE_SECONDS
        else:
            self._part()

    @property
    def over(self) -> bool:
        """Whether nothing remains to be done."""
        return self._closed and all(reading.settled for reading in self.readings)

    def _part(self) -> None:
        """Tells the owner, whose own endpoint notices nothing, and closes ours; at once where it cannot be told soon."""
        self._leave_by, self._close_by = None, time.monotonic() + _BYE_SECONDS
        try:
            if self._endpoint.alive:
                self._worker.say(self._endpoint, wire.Bye(self._session), lambda status: self._close())
            else:
                self._close()
        except Exception:  # the bindings raise types of their own
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._worker.disconnect(self._endpoint)
