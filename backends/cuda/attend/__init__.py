"""Paged decode attention directly over TurboQuant pages, for CUDA devices of compute capability 9.0 (docs/attend.md)."""

from backends.cuda.attend.build import load
from backends.cuda.attend.launch import Workspace, attend, configure

__all__ = ["Workspace", "attend", "configure", "load"]
