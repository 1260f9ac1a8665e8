"""Where kvbridge keeps what it can make again: compiled kernels, a copy of the demonstration's weights."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`kvbridge` in the user's cache directory (XDG base directory specification: a path that is not absolute is ignored)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvbridge"
