"""How long each step of a hand-off may take. Every wait in this package is bounded by one of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from bridge.handoff.errors import BadBounds

Observer = Callable[[str, dict[str, Any]], None]
"""Called as observer(step, details) at each step, from the thread that takes it: for tracing, metrics, and tests that kill processes."""


def ignore(step: str, details: dict[str, Any]) -> None:
    """The observer that does nothing."""


LEAST_SECONDS, MOST_SECONDS = 0.001, 366 * 86400.0
"""Shorter than any step, and longer than any process; timers of the system know no more."""


@dataclass(frozen=True)
class Bounds:
    """Seconds.

    connect: TCP, TLS and greetings. claim: the answer to a claim. chunk: the wait for the next chunk to be packed. transfer: one chunk's
    bytes. staging: the wait for room in the staging memory. lease: from an offer, or the decoder's last sign of progress on it, to its
    expiry. heartbeat: an idle channel's interval. silence: without any message for so long, the peer is lost.
    """

    connect: float = 5.0
    claim: float = 10.0
    chunk: float = 60.0
    transfer: float = 60.0
    staging: float = 30.0
    lease: float = 60.0
    heartbeat: float = 2.0
    silence: float = 7.0

    def __post_init__(self) -> None:
        """Raises BadBounds for what would end every hand-off, or none."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not LEAST_SECONDS <= value <= MOST_SECONDS:
                raise BadBounds(f"{field.name} is {value} s", remedy=f"give seconds between {LEAST_SECONDS} and {MOST_SECONDS:.0f}")
        if self.heartbeat >= self.silence:
            raise BadBounds(f"a heartbeat every {self.heartbeat} s is no sign of life where {self.silence} s of silence end a connection")
