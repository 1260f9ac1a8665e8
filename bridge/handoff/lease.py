"""A lease: one payload that a prefiller keeps ready for its readers, and the few states that it can be in."""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING

from bridge.handoff.errors import HandoffError
from bridge.handoff.staging import Extent
from bridge.pages import CacheGroup
from bridge.wire import Manifest, PayloadMap, TagKeys

if TYPE_CHECKING:
    from bridge.handoff.session import Session


class Mode(Enum):
    """park: the whole payload waits in staging memory, since no decoder is known yet. stream: chunks pass through a fixed ring."""

    PARK = "park"
    STREAM = "stream"


class State(Enum):
    OFFERED = "offered"
    """No decoder yet."""
    CLAIMED = "claimed"
    """At least one reader is taking chunks."""
    COMMITTED = "committed"
    """Every reader has verified and landed everything."""
    FAILED = "failed"
    """Cancelled, expired, abandoned, or the peer was lost; `error` says which."""


class Lease:
    """State of one offered payload. Fields are guarded by the prefiller's lock; `finished` may be waited for without it."""

    def __init__(
        self,
        manifest: Manifest,
        sealed: bytes,
        key: bytes,
        mode: Mode,
        groups: tuple[CacheGroup, ...],
        deadline: float,
    ) -> None:
        self.manifest, self.sealed, self.key = manifest, sealed, key
        self.keys = TagKeys(key, manifest.lease, manifest.generation)
        self.map = PayloadMap(manifest)
        self.mode, self.groups = mode, groups
        self.readers = 1
        """How many take the payload; the first claim says it."""
        self.deadline = deadline
        self.state = State.OFFERED
        self.error: HandoffError | None = None
        self.finished = threading.Event()
        self.next_chunk = 0
        self.pack_seconds = 0.0
        self.reserved: dict[int, Extent] = {}
        """Extents of chunks that are not packed yet (park)."""
        self.slots: dict[int, Extent] = {}
        """Extents of packed chunks that some reader still needs."""
        self.taken: dict[int, set[int]] = {}
        self.sessions: dict[int, Session] = {}
        self.committed: set[int] = set()

    @property
    def live(self) -> bool:
        return self.state in (State.OFFERED, State.CLAIMED)
