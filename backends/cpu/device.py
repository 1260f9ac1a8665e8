"""The CPU as a device: torch pages in host memory, packed and landed by compiled code, or by the reference where it is asked for."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from backends.cpu import reference
from bridge.devices import BlockTable, PagedCache, SpanShare
from bridge.wire import TagKeys


class HostMemory:
    """Anonymous pages of host memory, zero at first."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self._bytes = np.frombuffer(self._map, np.uint8)

    @property
    def address(self) -> int:
        return self._bytes.ctypes.data

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    def bytes(self) -> np.ndarray:
        return self._bytes


class CpuReferenceDevice:
    """NumPy, slow, written for reading: what other devices are compared with."""

    name = "cpu-reference"

    def probe(self) -> str:
        return "host memory, NumPy reference"

    def allocate_staging(self, nbytes: int) -> HostMemory:
        return HostMemory(nbytes)

    def pack(self, cache: PagedCache, table: BlockTable, shares: Sequence[SpanShare], keys: TagKeys, out: np.ndarray) -> None:
        for share in shares:
            reference.pack_share(cache, table, share, keys, out)

    def land(
        self,
        cache: PagedCache,
        table: BlockTable,
        shares: Sequence[SpanShare],
        keys: TagKeys,
        data: np.ndarray,
        write_first: int,
        write_end: int,
    ) -> None:
        for share in shares:
            reference.land_share(cache, table, share, keys, data, write_first, write_end)
