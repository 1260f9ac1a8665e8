"""Waiting for what another thread or process brings about, without a bound that a busy machine would break.

For all that is not about time itself. What is about time is compared with something that was measured in the same run, or has a bound that
is many times what a free machine takes, and far below what the fault would take.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 30.0
"""Seconds after which what has not come counts as never coming. Nothing waits for so long but a test that fails."""


def eventually(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Whether the condition becomes true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
