"""Reads over NIXL: posted in pieces, polled, counted, and in quarantine for as long as a read that was given up may still write."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.transfer.agent import RemoteMemory
from bridge.transfer.counts import ReadCounters, Tally
from bridge.transfer.errors import BadRange, TransferFailed, TransferTimeout
from bridge.transfer.nixl.library import BACKEND, said
from bridge.transfer.ranges import SEGMENTS, pieces_of

if TYPE_CHECKING:
    from bridge.transfer.nixl.agent import NixlPeer, NixlRegistration

PIECES_IN_FLIGHT = 4
"""Of one read."""

_LOCK_SECONDS = 0.005


class NixlTransfer:
    """A read under way, in pieces. Made by NixlPeer.read."""

    def __init__(
        self, reads: Reads, peer: NixlPeer, source: RemoteMemory, target: NixlRegistration, pieces: list[np.ndarray], nbytes: int
    ) -> None:
        self.nbytes = nbytes
        self._reads = reads
        self._peer = peer
        self._source = source
        self._target = target
        self._waiting = pieces[::-1]  # the next piece is the last
        self._in_flight: list[Any] = []
        self._failure: str | None = None
        self._given_up = False
        self._posted = False
        self._asked = False  # to be released
        self._counted = False

    @property
    def settled(self) -> bool:
        """Whether no byte of this read can arrive any more."""
        return not self._in_flight and (not self._waiting or self._given_up or self._failure is not None)

    def done(self) -> bool:
        """Whether all bytes have arrived; also asks for the next pieces, so it must be polled.

        Takes at most as long as it takes to copy what is in flight. Raises TransferFailed when the read failed or was given up.
        """
        if not self.settled:
            self._reads.poll(self)
        if self._failure is not None:
            raise TransferFailed(f"a read from {self._peer.name} failed: {self._failure}")
        if self._given_up:
            raise TransferFailed(f"a read from {self._peer.name} was given up before it had finished")
        return self.settled

    def release(self) -> None:
        """Gives the handle back; an unfinished read is given up: no further byte is asked for.

        Raises TransferTimeout while bytes may still arrive. The read then is in the agent's quarantine and its target must not be
        reused; call again later (or `NixlAgent.progress`): it returns when the target is safe.
        """
        self._reads.release(self)


class Reads:
    """All reads of one native agent that are under way or in quarantine. Called with the agent's lock held; `start`, `poll` and `release`
    take it themselves, or do without: where a host is silent NIXL connects for 7 s (measured), and that is to hold up no other's reads.

    errors: the bindings' exceptions. lock: the agent's. piece_bytes: of a piece, at most.
    failed, ended: told of a read whose endpoint failed, and of one that has settled; each with the native name of its peer.
    """

    def __init__(
        self,
        native: Any,
        errors: ModuleType,
        lock: threading.RLock,
        piece_bytes: int,
        failed: Callable[[str], None],
        ended: Callable[[str], None],
    ) -> None:
        self._native, self._errors, self._lock, self._piece_bytes = native, errors, lock, piece_bytes
        self._failed, self._ended = failed, ended
        self._tally = Tally()
        self._fresh: deque[NixlTransfer] = deque()  # started without the lock: under way, but neither posted nor counted yet
        self._active: list[NixlTransfer] = []
        self._quarantine: list[NixlTransfer] = []

    def _admit(self) -> None:
        while self._fresh:
            self._tally.started += 1
            self._active.append(self._fresh.popleft())

    def _all(self) -> list[NixlTransfer]:
        self._admit()
        return self._active + self._quarantine

    @property
    def finished(self) -> int:
        """How many reads have finished. Needs no lock."""
        return self._tally.finished

    def counters(self) -> ReadCounters:
        """What was read so far."""
        self._admit()
        return self._tally.counters(len(self._quarantine))

    def of(self, native_name: str) -> list[NixlTransfer]:
        """Reads from one remote agent."""
        return [transfer for transfer in self._all() if transfer._peer._native == native_name]

    def given_up(self, native_name: str) -> list[NixlTransfer]:
        """Those of them that nobody polls any more."""
        return [transfer for transfer in self._quarantine if transfer._peer._native == native_name]

    def into(self, target: NixlRegistration) -> bool:
        """Whether a read may still write into this memory."""
        return any(transfer._target is target for transfer in self._all())

    def progress(self) -> int:
        """Polls the quarantine and forgets what has settled. Returns how many reads are still in it."""
        for transfer in list(self._quarantine):
            self.advance(transfer)
        return len(self._quarantine)

    def start(self, peer: NixlPeer, source: RemoteMemory, target: NixlRegistration, table: np.ndarray) -> NixlTransfer:
        """table: int64 [n, 3] of (remote, local, nbytes), checked. Raises BadRange, TransferFailed; `done` does where NIXL was busy."""
        nbytes = int(table[:, 2].sum())
        transfer = NixlTransfer(self, peer, source, target, pieces_of(table, self._piece_bytes), nbytes)
        self._fresh.append(transfer)
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            return transfer
        try:
            self._admit()
            self.progress()
            try:
                self._post(transfer)
            except BadRange:
                self._active.remove(transfer)
                self._tally.started -= 1
                raise
            self._settle(transfer)
        finally:
            self._lock.release()
        if transfer._failure is not None and transfer.settled:
            raise TransferFailed(f"a read from {peer.name} failed: {transfer._failure}")
        return transfer

    def _post(self, transfer: NixlTransfer) -> None:
        """Asks for as many pieces as may be in flight. Raises BadRange where the first of them lies in nothing that the peer registered."""
        if transfer._target.released or transfer._peer._closed:  # since the read was started
            transfer._failure = "its target was released, or its peer disconnected"
            return
        native, source, target = self._native, transfer._source, transfer._target.memory
        if native is None:  # since the read was started
            transfer._failure = "the agent was closed"
            return
        for _ in range(PIECES_IN_FLIGHT - len(transfer._in_flight)):
            if not transfer._waiting:
                return
            remote, local, nbytes = transfer._waiting[-1].T
            try:
                handle = native.initialize_xfer(
                    "READ",
                    native.get_xfer_descs(_descriptors(target.address, local, nbytes, target.index), SEGMENTS[target.device]),
                    native.get_xfer_descs(_descriptors(source.address, remote, nbytes, source.index), SEGMENTS[source.device]),
                    transfer._peer._native,
                    b"",
                    BACKEND,
                )
            except self._errors.nixlNotFoundError as error:
                if transfer._posted:
                    transfer._failure = "the peer has not registered all of these bytes"
                    return
                raise BadRange(f"{transfer._peer.name} has not registered these bytes") from error
            except Exception as error:  # the bindings raise types of their own
                self._fail(transfer, said(error))
                return
            transfer._posted = True
            # In flight before it is off the waiting list: `settled` is asked without the lock, and must not find both empty.
            transfer._in_flight.append(handle)
            transfer._waiting.pop()
            try:
                state = native.transfer(handle)
            except Exception as error:
                # some of its descriptors may have been posted before the error, so the handle must settle like any other
                self._fail(transfer, said(error))
                return
            if state == "DONE":
                native.release_xfer_handle(handle)
                transfer._in_flight.remove(handle)

    def poll(self, transfer: NixlTransfer) -> None:
        """As `advance`, unless another thread holds the lock for longer."""
        if self._lock.acquire(timeout=_LOCK_SECONDS):
            try:
                self.advance(transfer)
            finally:
                self._lock.release()

    def advance(self, transfer: NixlTransfer) -> None:
        """Polls one read and asks for its next pieces."""
        native = self._native
        self._admit()
        if native is None:
            transfer._given_up = True
        if native is None or transfer.settled:
            self._settle(transfer)
            return
        unfinished = []
        for handle in transfer._in_flight:
            try:
                state = native.check_xfer_state(handle)
            except Exception as error:  # the bindings raise types of their own
                state = "ERR"
                self._fail(transfer, said(error))
            if state == "PROC":
                unfinished.append(handle)
                continue
            if state == "ERR":
                self._fail(transfer, "NIXL reports an error")
            with contextlib.suppress(Exception):
                native.release_xfer_handle(handle)
        transfer._in_flight = unfinished
        if transfer._failure is None and not transfer._given_up:
            try:
                self._post(transfer)
            except BadRange as error:
                transfer._failure = error.detail
        self._settle(transfer)

    def _fail(self, transfer: NixlTransfer, reason: str) -> None:
        transfer._failure = transfer._failure or reason
        self._failed(transfer._peer._native)

    def _settle(self, transfer: NixlTransfer) -> None:
        """Counts the outcome of a read, once, and takes a read that has ended off the lists."""
        if not transfer._counted and (transfer.settled or transfer._given_up):
            transfer._counted = True
            if transfer._failure is not None:
                self._tally.failed += 1
            elif transfer._given_up:
                self._tally.given_up += 1
            else:
                self._tally.finished += 1
                self._tally.bytes += transfer.nbytes
        if transfer.settled:
            for held in (self._active, self._quarantine):
                if transfer in held:
                    held.remove(transfer)
                    self._ended(transfer._peer._native)

    def give_up(self, transfer: NixlTransfer) -> None:
        """Asks for nothing more; what is under way goes into quarantine."""
        self._admit()
        if transfer._given_up or transfer.settled:
            return
        transfer._given_up = True
        if transfer._in_flight:
            self._tally.quarantined += 1
            self._active.remove(transfer)
            self._quarantine.append(transfer)
        self._settle(transfer)

    def release(self, transfer: NixlTransfer) -> None:
        """See NixlTransfer.release. Waits hardly at all for another thread's call of NIXL, and only once: many may ask at a time."""
        if transfer.settled:
            return
        patience, transfer._asked = 0 if transfer._asked else _LOCK_SECONDS, True
        if self._lock.acquire(timeout=patience):
            try:
                self.give_up(transfer)
                self.advance(transfer)
                if transfer.settled:
                    return
            finally:
                self._lock.release()
        raise TransferTimeout(f"a read from {transfer._peer.name} is unfinished and its bytes may still arrive")

    def end(self) -> bool:
        """Gives every read up and lets go of its handles, each of which holds the native agent alive; whether there was none."""
        unfinished = self._all()
        for transfer in unfinished:
            transfer._given_up = True
            self._settle(transfer)
        self._native = None
        for transfer in unfinished:
            transfer._in_flight = []
        self._active, self._quarantine = [], []
        return not unfinished


def _descriptors(base: int, offsets: np.ndarray, nbytes: np.ndarray, ordinal: int) -> np.ndarray:
    rows = np.empty((len(offsets), 3), dtype=np.uint64)
    rows[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
    rows[:, 1] = nbytes
    rows[:, 2] = ordinal
    return rows
