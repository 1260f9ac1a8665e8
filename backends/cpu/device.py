"""The CPU as a device: torch pages in host memory, packed and landed by compiled code, or by the reference where it is asked for."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from backends.cpu import reference
from bridge.devices import DeviceError, SpanShare
from bridge.pages import BlockTable, PagedCache
from bridge.wire import TagKeys


class HostMemory:
    """Anonymous pages of host memory, zero at first. Raises DeviceError where the host has not as many."""

    device = "cpu"
    index = 0

    def __init__(self, nbytes: int) -> None:
        try:
            self._map = mmap.mmap(-1, nbytes)
        except (OSError, OverflowError, ValueError):
            raise DeviceError(f"this host gives no {nbytes} bytes of memory for staging", remedy="lower staging_bytes") from None
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
    exact = True

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


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parts(share: SpanShare, count: int) -> list[SpanShare]:
    """The share as up to `count` shares of neighbouring heads."""
    bounds = [share.head_count * part // count for part in range(count + 1)]
    return [
        share._replace(
            head_first=share.head_first + first,
            head_count=end - first,
            model_head=share.model_head + first,
            offset=share.offset + first * share.span.run_bytes,
        )
        for first, end in pairwise(bounds)
        if first < end
    ]


def _all_of(work: Callable[[SpanShare], None], shares: Sequence[SpanShare]) -> None:
    for share in shares:
        work(share)


def _finish(futures: Iterable[Future[None]]) -> None:
    """Waits for all of them, then raises the first error."""
    errors = [error for error in [future.exception() for future in futures] if error is not None]
    if errors:
        raise errors[0]


class CpuDevice:
    """Compiled code on all cores: shares in parallel, and the heads of a share where shares are fewer than threads.

    threads: how many; by default as many as cores that the process may use. Raises DeviceError where numba is missing. The first device
    of a machine compiles for some twenty seconds; later ones read numba's cache.
    """

    name = "cpu"
    exact = True

    def __init__(self, threads: int | None = None) -> None:
        try:
            from backends.cpu import compiled
        except ImportError as error:
            raise DeviceError(
                f"the device cpu needs numba, which cannot be imported ({error})",
                remedy='pip install "kvbridge[cpu]", or use the device cpu-reference',
            ) from None
        if threads is not None and threads < 1:
            raise DeviceError(f"{threads} threads cannot work", remedy="give at least one, or leave it out")
        compiled.prepare()
        self._compiled = compiled
        self.threads = threads or _cores()
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="kvbridge-cpu")

    def probe(self) -> str:
        return f"host memory, code compiled by numba, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def allocate_staging(self, nbytes: int) -> HostMemory:
        return HostMemory(nbytes)

    def _each(self, work: Callable[[SpanShare], None], shares: Sequence[SpanShare]) -> None:
        """work(share) for all shares, in parallel; the first error, in their order, when all have ended."""
        if self.threads == 1 or len(shares) == 1:
            for share in shares:
                work(share)
        else:
            # A stretch of shares to a thread: a thread's turn costs as much as a small share.
            bounds = [len(shares) * part // (2 * self.threads) for part in range(2 * self.threads + 1)]
            stretches = [shares[first:end] for first, end in pairwise(bounds) if first < end]
            _finish([self._pool.submit(_all_of, work, stretch) for stretch in stretches])

    def pack(self, cache: PagedCache, table: BlockTable, shares: Sequence[SpanShare], keys: TagKeys, out: np.ndarray) -> None:
        call = self._compiled.Call(cache, table, keys, shares)
        if len(shares) < self.threads:
            for share in shares:
                call.place(share, share.span.first_token, share.span.end_token)
            shares = [part for share in shares for part in _parts(share, self.threads)]
        self._each(lambda share: self._compiled.pack_share(call, share, out), shares)

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
        call = self._compiled.Call(cache, table, keys, shares)
        if len(shares) >= self.threads:
            self._each(lambda share: self._compiled.land_share(call, share, data, write_first, write_end), shares)
            return
        # Few shares: each is checked and verified as a whole, then its heads are written in parallel.
        for share in shares:
            self._compiled.verify_share(call, share, self._compiled.held(data, share))
            first, end = self._compiled.written_range(share, write_first, write_end)
            if first >= end:
                continue
            call.place(share, first, end)
            parts = _parts(share, self.threads)
            self._each(
                lambda part: self._compiled.write_share(call, part, self._compiled.held(data, part), data, write_first, write_end), parts
            )
