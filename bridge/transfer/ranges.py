"""Ranges of a read: checked against both memories before the library sees them, and cut into pieces of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int

import numpy as np

from bridge.transfer.agent import Memory, ReadRange, RemoteMemory
from bridge.transfer.errors import BadRange

MAX_RANGES = 1 << 16
RANGES_PER_PIECE = 1024
SEGMENTS = {"cpu": "DRAM", "cuda": "VRAM", "xpu": "VRAM"}
RANGE = np.dtype([("offset", "<u8"), ("nbytes", "<u8")])
"""A range of a region, as it is asked for."""

_ADDRESSES = 1 << 64


def check_memory(memory: Memory | RemoteMemory, whose: str) -> None:
    """Raises BadRange."""
    try:
        address, nbytes, ordinal = as_int(memory.address), as_int(memory.nbytes), as_int(memory.index)
    except TypeError as error:
        raise BadRange(f"{whose} memory has an address, size or index that is no integer") from error
    if memory.device not in SEGMENTS:
        raise BadRange(f"{whose} memory is on {memory.device!r}; NIXL over UCX knows {', '.join(SEGMENTS)}")
    if address <= 0 or nbytes <= 0 or address + nbytes > _ADDRESSES or not 0 <= ordinal < 1 << 16:
        raise BadRange(f"{whose} memory of {nbytes} bytes at {address:#x}, index {ordinal}, cannot be")


def check_ranges(source: RemoteMemory, target: Memory, ranges: Sequence[ReadRange]) -> np.ndarray:
    """The ranges as int64 [n, 3] (remote, local, nbytes), in the caller's order. Raises BadRange."""
    if not 0 < len(ranges) <= MAX_RANGES:
        raise BadRange(f"a read of {len(ranges)} ranges; it needs 1 to {MAX_RANGES}")
    try:
        table = np.array([(as_int(r.remote), as_int(r.local), as_int(r.nbytes)) for r in ranges], dtype=np.int64)
    except (TypeError, OverflowError) as error:
        raise BadRange(f"a range holds no 64-bit integer ({error})") from error
    remote, local, nbytes = table.T
    # each compared with what is left, so that no sum can overflow
    bad = (remote < 0) | (local < 0) | (nbytes <= 0)
    bad |= (remote > source.nbytes - nbytes) | (local > target.nbytes - nbytes)
    if bad.any():
        i = int(bad.argmax())
        raise BadRange(f"range {i} reads {nbytes[i]} bytes from byte {remote[i]} of {source.nbytes} to byte {local[i]} of {target.nbytes}")
    order = np.argsort(local, kind="stable")
    if (local[order][1:] < (local + nbytes)[order][:-1]).any():
        raise BadRange("two ranges of one read write the same bytes")
    return table


def pieces_of(table: np.ndarray, piece_bytes: int, most: int = RANGES_PER_PIECE) -> list[np.ndarray]:
    """Cuts ranges into pieces of at most `piece_bytes` bytes and `most` ranges."""
    if (table[:, 2] > piece_bytes).any():
        parts = []
        for remote, local, nbytes in table.tolist():
            at = np.arange(0, nbytes, piece_bytes, dtype=np.int64)
            parts.append(np.stack([remote + at, local + at, np.minimum(piece_bytes, nbytes - at)], axis=1))
        table = np.concatenate(parts)
    pieces, start, held = [], 0, 0
    for i, nbytes in enumerate(table[:, 2].tolist()):
        if i > start and (held + nbytes > piece_bytes or i - start == most):
            pieces.append(table[start:i])
            start, held = i, 0
        held += nbytes
    pieces.append(table[start:])
    return pieces


def inside(rows: np.ndarray, region_bytes: int) -> bool:
    """Whether every range of RANGE [n] has at least one byte and lies in a region of so many bytes; no sum can overflow."""
    size = np.uint64(region_bytes)
    nbytes, offset = rows["nbytes"], rows["offset"]
    return bool(((nbytes > 0) & (nbytes <= size)).all() and (offset <= size - nbytes).all())
