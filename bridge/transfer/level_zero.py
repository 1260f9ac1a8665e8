"""Whether UCX can read and write the memory of Intel GPUs."""

from __future__ import annotations

import os
from pathlib import Path


def level_zero_in_ucx(folders: tuple[Path, ...] | None = None) -> Path | None:
    """UCX's Level Zero module, without which no transfer can read or write XPU memory; None where it is not found.

    folders: where to look; by default UCX_MODULE_DIR and the folders of LD_LIBRARY_PATH. The public wheels of NIXL and UCX are built
    without it, and are not searched. Source of the name: src/uct/ze/Makefile.am of openucx/ucx.
    """
    if folders is None:
        named = [os.environ.get("UCX_MODULE_DIR", ""), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
        folders = tuple(Path(name) for name in named if name)
    for folder in folders:
        for found in sorted({*folder.glob("libuct_ze.so*"), *folder.glob("ucx/libuct_ze.so*")}):
            return found
    return None
