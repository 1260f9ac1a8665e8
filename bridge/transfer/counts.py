"""What an agent has done so far, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadCounters:
    """started = finished + failed + given up + those under way."""

    reads_started: int
    reads_finished: int
    reads_failed: int
    reads_given_up: int
    """Released or disconnected before they had finished."""
    reads_quarantined: int
    """Of those given up: with bytes that might still arrive."""
    bytes_read: int
    """By finished reads."""
    in_quarantine: int
    """Reads that are in quarantine now."""


class Tally:
    """The mutable side of ReadCounters, changed under its agent's lock."""

    def __init__(self) -> None:
        self.started = self.finished = self.failed = self.given_up = self.quarantined = self.bytes = 0

    def counters(self, in_quarantine: int) -> ReadCounters:
        return ReadCounters(self.started, self.finished, self.failed, self.given_up, self.quarantined, self.bytes, in_quarantine)
