"""Who may read which bytes of a prefiller's staging memory: a packed chunk, by those who claimed its lease, until the lease lets it go."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Sequence

from bridge.handoff.lease import Lease
from bridge.handoff.staging import Extent, StagingPool


class Granted:
    """The extent of a packed chunk. reading: frames of it that are being sent. ended: given back as soon as there are none."""

    def __init__(self, extent: Extent, lease: Lease) -> None:
        self.extent, self.lease = extent, lease
        self.reading = 0
        self.ended = False


class Grants:
    """The packed chunks of all live leases, by where they lie. An extent goes back to the pool when no frame of it is being sent.

    lock: of the leases, held by whoever calls `add` and `end`. Agents that know who reads ask by `enter` (bridge.transfer.agent.Guard).
    """

    def __init__(self, lock: threading.Condition, pool: StagingPool) -> None:
        self._lock, self._pool = lock, pool
        self._starts: list[int] = []
        self._held: dict[int, Granted] = {}

    def add(self, extent: Extent, lease: Lease) -> None:
        """The extent holds a chunk of this lease from now on."""
        insort(self._starts, extent.offset)
        self._held[extent.offset] = Granted(extent, lease)

    def end(self, extent: Extent) -> None:
        """Nobody may read it any more, and it goes back to the pool."""
        granted = self._held.pop(extent.offset)
        del self._starts[bisect_right(self._starts, extent.offset) - 1]
        granted.ended = True
        if not granted.reading:
            self._pool.give_back(extent)

    def enter(self, reader: str, ranges: Sequence[tuple[int, int]]) -> list[Granted] | None:
        """What is to be left when the ranges (offset, bytes) were read, or None where this reader may not read all of them now."""
        found: dict[int, Granted] = {}
        with self._lock:
            for offset, nbytes in ranges:
                place = bisect_right(self._starts, offset) - 1
                granted = self._held[self._starts[place]] if place >= 0 else None
                if granted is None or offset + nbytes > granted.extent.offset + granted.extent.nbytes:
                    return None
                found[granted.extent.offset] = granted
            for granted in found.values():
                if all(session.peer != reader for session in granted.lease.sessions.values()):
                    return None
            for granted in found.values():
                granted.reading += 1
        return list(found.values())

    def leave(self, entered: list[Granted]) -> None:
        """Ends what `enter` began."""
        with self._lock:
            for granted in entered:
                granted.reading -= 1
                if granted.ended and not granted.reading:
                    self._pool.give_back(granted.extent)
