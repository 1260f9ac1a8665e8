"""Paged decode attention directly over TurboQuant pages, for CUDA devices of compute capability 9.0 (docs/attend.md)."""

from .build import load
from .launch import Workspace, attend, configure
from .pages import PRESETS, Pages, block_bytes, slot_bytes

__all__ = ["PRESETS", "Pages", "Workspace", "attend", "block_bytes", "configure", "load", "slot_bytes"]
