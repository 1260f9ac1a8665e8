"""Counts of what happened, by event and clause. Nothing is lost silently: each failure is counted once, under its clause."""

from __future__ import annotations

import threading
from collections import Counter

MAX_NAMES = 256
"""Distinct counters, beyond which new clauses are counted as "other": some clauses come from peers."""


class Counters:
    """Monotonic counters, safe for several threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, event: str, clause: str = "", amount: int = 1) -> None:
        """Adds to `event`, or to `event{clause}` where a clause is given."""
        name = f"{event}{{{clause}}}" if clause else event
        with self._lock:
            if clause and name not in self._counts and len(self._counts) >= MAX_NAMES:
                name = f"{event}{{other}}"
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counts so far, by name."""
        with self._lock:
            return dict(self._counts)
