"""The prefiller's leases: which payloads are on offer, who reads them, and how each of them ends, exactly once."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bridge.counters import Counters
from bridge.handoff import messages
from bridge.handoff.bounds import Bounds, Observer
from bridge.handoff.errors import (
    Cancelled,
    HandoffError,
    LeaseExpired,
    LeaseTaken,
    ModelDiffers,
    ProtocolError,
    Refused,
    StaleGeneration,
    UnknownLease,
)
from bridge.handoff.grants import Grants
from bridge.handoff.lease import Lease, State
from bridge.handoff.messages import from_u64
from bridge.handoff.staging import Extent, StagingPool

if TYPE_CHECKING:
    from bridge.handoff.session import Session

REMEMBERED = 1 << 13
"""So many requests and ended leases are remembered, so that a late ticket is refused by its own clause."""


class Leases:
    """All leases of one prefiller, under one lock. Methods may be called from any thread, those that take a session from its loop's only.

    pool: what their extents go back to. tell: runs a session's method on its loop's thread.
    """

    def __init__(self, pool: StagingPool, counters: Counters, bounds: Bounds, observe: Observer, tell: Callable[..., Any]) -> None:
        self.lock = threading.Condition()
        """Guards every field of every lease; notified whenever one changes."""
        self.grants = Grants(self.lock, pool)
        self._pool, self._counters, self._bounds, self._observe, self._tell = pool, counters, bounds, observe, tell
        self._live: dict[int, Lease] = {}
        self._ended: OrderedDict[int, tuple[int, HandoffError | None]] = OrderedDict()
        self._requests: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._closed = False

    # What the engine's side asks for.

    def next_number(self, request_id: str) -> tuple[int, int]:
        """(lease, generation): a new lease number for a new request, the next generation for one that was offered before."""
        with self.lock:
            number, generation = self._requests.pop(request_id, (secrets.randbits(64), 0))
            self._requests[request_id] = (number, generation + 1)
            if len(self._requests) > REMEMBERED:
                self._requests.popitem(last=False)
        return number, generation + 1

    def revoke_earlier(self, lease: Lease) -> None:
        """Ends an earlier offer of the same request, so that its staging memory is free for this one. Raises StaleGeneration."""
        with self.lock:
            earlier = self._live.get(lease.manifest.lease)
            if earlier is None:
                return
            if earlier.manifest.generation > lease.manifest.generation:
                raise StaleGeneration(f"request {lease.manifest.request_id!r} was offered anew already")
            self._end(earlier, StaleGeneration(f"request {lease.manifest.request_id!r} was offered anew"))

    def add(self, lease: Lease) -> None:
        """Takes a lease on, with its reserved extents; they are given back if that fails. Raises Cancelled after close, StaleGeneration."""
        with self.lock:
            try:
                if self._closed:
                    raise Cancelled("this prefiller is closed")
                self.revoke_earlier(lease)
            except HandoffError:
                self._give_back(lease)
                raise
            self._live[lease.manifest.lease] = lease

    def live(self) -> int:
        """How many are neither committed nor failed."""
        with self.lock:
            return len(self._live)

    def wait_claimed(self, lease: Lease) -> None:
        """Waits until a decoder has claimed it, at most until it runs out. Raises what ended it before that."""
        with self.lock:
            while lease.state is State.OFFERED:
                self.lock.wait()
        if lease.error is not None:
            raise lease.error

    def packed(self, lease: Lease, chunk: int, extent: Extent) -> None:
        """A chunk of a live lease lies in this extent: its readers may read it, and are told. The lock is held."""
        lease.slots[chunk] = extent
        self.grants.add(extent, lease)
        for session in lease.sessions.values():
            self._tell(session.ready, lease, chunk, extent.offset)

    def finish(self, lease: Lease, error: HandoffError | None) -> None:
        """Ends a lease, once."""
        with self.lock:
            self._end(lease, error)

    def close(self) -> None:
        """Ends all of them, and takes no more."""
        with self.lock:
            self._closed = True
            for lease in list(self._live.values()):
                self._end(lease, Cancelled("the prefiller is shutting down"))

    # What decoders ask for.

    def claimed(self, session: Session, claim: messages.Claim) -> None:
        """Grants or refuses a claim."""
        try:
            with self.lock:
                lease = self._find(from_u64(claim.lease), claim.generation)
                if lease.manifest.request_id != claim.request_id:
                    raise UnknownLease("the ticket's request is not this lease's")
                if claim.model != lease.manifest.model_digest:
                    raise ModelDiffers("the prefiller serves another model than the decoder")
                if claim.reader >= claim.readers:
                    raise ProtocolError(
                        f"reader {claim.reader} of {claim.readers} claims the lease, which cannot be", remedy="readers count from 0"
                    )
                if lease.sessions and (claim.readers != lease.readers or claim.reader in lease.sessions):
                    raise LeaseTaken(f"reader {claim.reader} of {claim.readers} comes too late: another decoder has the lease")
                if not lease.sessions:  # a claim that is refused prolongs nothing
                    lease.readers = claim.readers
                    lease.deadline = time.monotonic() + self._bounds.lease
                lease.sessions[claim.reader] = session
                lease.state = State.CLAIMED
                session.grant(claim.sequence, lease)
                self.lock.notify_all()
        except HandoffError as error:
            self._counters.add("refused", error.clause)
            session.refuse(claim.sequence, error)
            return
        self._counters.add("claimed")
        self._observe("claimed", {"peer": session.peer})

    def _find(self, number: int, generation: int) -> Lease:
        lease = self._live.get(number)
        if lease is not None:
            if lease.manifest.generation != generation:
                raise StaleGeneration(f"the ticket is of generation {generation}, the lease of {lease.manifest.generation}")
            return lease
        ended, error = self._ended.get(number, (None, None))
        if ended == generation:
            raise UnknownLease("the lease was committed already") if error is None else error.anew()
        raise UnknownLease(f"no lease {number:016x} is open here")

    def taken(self, session: Session, number: int, generation: int, chunk: int) -> None:
        """A reader has a chunk's bytes; the slot is freed when all readers have."""
        with self.lock:
            lease = self._live.get(number)
            if lease is None or lease.manifest.generation != generation:
                return
            readers = {reader for reader, holder in lease.sessions.items() if holder is session}
            if not readers or chunk not in lease.slots:
                return
            taken = lease.taken.setdefault(chunk, set())
            if readers <= taken:
                return  # said before: no progress, which would keep the lease alive
            taken |= readers
            lease.deadline = time.monotonic() + self._bounds.lease
            if len(taken) >= lease.readers:
                self.grants.end(lease.slots.pop(chunk))
                self.lock.notify_all()
        self._observe("taken", {"chunk": chunk})

    def committed(self, session: Session, number: int, generation: int) -> None:
        """A reader has verified and landed everything. Raises ProtocolError where it cannot have."""
        with self.lock:
            lease = self._live.get(number)
            if lease is None or lease.manifest.generation != generation:
                return
            readers = {reader for reader, holder in lease.sessions.items() if holder is session}
            if not all(readers <= lease.taken.get(chunk, set()) for chunk in range(lease.map.chunk_count)):
                raise ProtocolError(f"{session.peer} commits request {lease.manifest.request_id!r} without having taken all of it")
            lease.committed |= readers
            for _ in readers:
                session.released(lease)
            if len(lease.committed) >= lease.readers:
                self._end(lease, None)
        self._observe("committed", {"peer": session.peer})

    def abandoned(self, session: Session, number: int, generation: int, clause: str, detail: str) -> None:
        """A reader gave up: the lease fails for all."""
        with self.lock:
            lease = self._live.get(number)
            if lease is None or lease.manifest.generation != generation or not _reads(session, lease):
                return
            self._end(lease, Refused(clause, detail, "", session.peer), told=session)

    def drop(self, session: Session, error: HandoffError) -> None:
        """Fails every lease of which a lost session had not committed its part; the other readers of what it has go on."""
        with self.lock:
            for lease in [lease for lease in self._live.values() if _reads(session, lease)]:
                self._end(lease, error, told=session)

    # How every lease ends.

    def expire(self) -> None:
        """Ends those whose time has run out."""
        now = time.monotonic()
        expired = []
        with self.lock:
            for lease in [lease for lease in self._live.values() if lease.deadline < now]:
                claimed = lease.state is State.CLAIMED
                state = "claimed" if claimed else "not claimed"
                self._end(lease, LeaseExpired(f"the lease of request {lease.manifest.request_id!r} ran out, {state}"))
                expired.append((lease.manifest.request_id, claimed))
        for request_id, claimed in expired:
            self._observe("expired", {"request_id": request_id, "claimed": claimed})

    def _end(self, lease: Lease, error: HandoffError | None, told: Session | None = None) -> None:
        """Frees everything of a live lease and tells its readers, except `told`. The lock is held."""
        if not lease.live:
            return
        lease.state = State.FAILED if error else State.COMMITTED
        lease.error = error
        number = lease.manifest.lease
        self._live.pop(number, None)
        # A copy: what the engine raises holds its frames, and those the pages.
        self._ended[number] = (lease.manifest.generation, error and error.anew())
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self._give_back(lease)
        if error is not None:
            self._counters.add("failed", error.clause)
            for session in set(lease.sessions.values()) - {told}:
                self._tell(session.revoke, lease, error)
        else:
            self._counters.add("committed")
        lease.sessions.clear()
        lease.finished.set()
        self.lock.notify_all()

    def _give_back(self, lease: Lease) -> None:
        for extent in lease.reserved.values():
            self._pool.give_back(extent)
        for extent in lease.slots.values():
            self.grants.end(extent)
        lease.reserved.clear()
        lease.slots.clear()


def _reads(session: Session, lease: Lease) -> bool:
    """Whether it has claimed a part of the lease and not committed it."""
    return any(holder is session and reader not in lease.committed for reader, holder in lease.sessions.items())
