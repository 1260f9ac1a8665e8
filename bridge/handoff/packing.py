"""The prefiller's packing: chunks of a lease go from the engine's pages into staging memory, as their tokens are computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.counters import Counters
from bridge.devices import Device, StagingMemory, engine_order
from bridge.errors import KVBridgeError
from bridge.handoff.bounds import Bounds, Observer
from bridge.handoff.errors import HandoffError, HandoffTimeout, PackingFailed, StagingFull
from bridge.handoff.lease import Lease, Mode
from bridge.handoff.leases import Leases
from bridge.handoff.staging import Extent, StagingPool
from bridge.pages import BlockTable, CacheGroup, PagesDoNotFit
from bridge.shares import batches, chunk_share, token_end
from bridge.wire import ChunkMap, GroupKind, Manifest


@dataclass(frozen=True)
class Packer:
    """What packing needs of its prefiller. stream_depth: chunks of one lease that may be in staging memory at a time in stream mode."""

    device: Device
    memory: StagingMemory
    pool: StagingPool
    leases: Leases
    bounds: Bounds
    counters: Counters
    observe: Observer
    stream_depth: int

    def reserve(self, lease: Lease) -> None:
        """park: takes room for every chunk, or none. stream: only refuses what could never fit. Raises StagingFull."""
        try:
            if lease.mode is Mode.STREAM:
                bound = lease.map.chunk_bytes_bound
                if bound > self.pool.capacity:
                    raise StagingFull(f"a chunk has up to {bound} bytes, the staging budget is {self.pool.capacity}")
                return
            for index in range(lease.map.chunk_count):
                extent = self.pool.try_take(lease.map.chunk_bytes(index))
                if extent is None:
                    raise StagingFull(
                        f"the payload of {lease.map.payload_bytes} bytes does not fit: {self.pool.used} of {self.pool.capacity} are in use"
                    )
                lease.reserved[index] = extent
        except StagingFull as error:
            for extent in lease.reserved.values():
                self.pool.give_back(extent)
            lease.reserved.clear()
            self.counters.add("refused", error.clause)
            raise

    def advance(
        self,
        lease: Lease,
        computed_tokens: int,
        table: BlockTable | Sequence[BlockTable] | None = None,
        order: dict[str, Any] | None = None,
    ) -> None:
        """See Offer.advance. order: devices.engine_order of the engine's thread, where this is another."""
        if order is None:
            order = engine_order(self.device)
        with self.leases.lock:
            if table is not None:
                lease.groups = _with_tables(lease.groups, table)
            lease.deadline = time.monotonic() + self.bounds.lease
        while lease.next_chunk < lease.map.chunk_count:
            chunk = lease.map.chunk(lease.next_chunk)
            if _needed_tokens(lease.manifest, chunk) > computed_tokens:
                return
            extent = self._slot_for(lease, chunk.index, chunk.nbytes)
            start = time.perf_counter()
            try:
                self._pack(lease, chunk, extent, order)
            except BaseException as error:
                self.pool.give_back(extent)
                failure = PackingFailed(str(error) if isinstance(error, KVBridgeError) else f"{type(error).__name__}: {error}"[:1000])
                self.leases.finish(lease, failure)
                if isinstance(error, KVBridgeError) or not isinstance(error, Exception):
                    raise
                raise failure from error
            lease.pack_seconds += time.perf_counter() - start
            with self.leases.lock:
                lease.next_chunk += 1
                if not lease.live:
                    self.pool.give_back(extent)
                    break
                lease.deadline = time.monotonic() + self.bounds.lease
                self.leases.packed(lease, chunk.index, extent)
            self.counters.add("packed_bytes", amount=chunk.nbytes)
            self.observe("packed", {"chunk": chunk.index})
        if lease.error is not None:
            raise lease.error

    def _pack(self, lease: Lease, chunk: ChunkMap, extent: Extent, order: dict[str, Any]) -> None:
        view = self.memory.bytes()[extent.offset : extent.offset + chunk.nbytes]
        groups, manifest = lease.groups, lease.manifest
        share = chunk_share(manifest, chunk, [group.cache for group in groups])
        for number, shares, _ in batches(manifest, share, 0, manifest.end_token):
            self.device.pack(groups[number].cache, groups[number].table, shares, lease.keys, view, **order)

    def _slot_for(self, lease: Lease, chunk: int, nbytes: int) -> Extent:
        """Room for the next chunk; in stream mode, waits until the ring has a free place."""
        if lease.mode is Mode.PARK:
            with self.leases.lock:
                if lease.error is not None:
                    raise lease.error
                return lease.reserved.pop(chunk)
        deadline = time.monotonic() + self.bounds.chunk
        with self.leases.lock:
            while lease.live and len(lease.slots) >= self.stream_depth:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self.leases.finish(lease, HandoffTimeout(f"no decoder took a chunk within {self.bounds.chunk} s"))
                    break
                self.leases.lock.wait(remaining)
            if lease.error is not None:
                raise lease.error
        try:
            return self.pool.take(nbytes, self.bounds.staging, lambda: lease.live)
        except HandoffError as error:
            self.leases.finish(lease, error)
            raise lease.error or error from None


def _with_tables(groups: tuple[CacheGroup, ...], table: BlockTable | Sequence[BlockTable]) -> tuple[CacheGroup, ...]:
    tables = [table] if isinstance(table, BlockTable) else list(table)
    if len(tables) != len(groups):
        raise PagesDoNotFit(f"{len(tables)} block tables were given for {len(groups)} KV groups")
    return tuple(replace(group, table=one) for group, one in zip(groups, tables, strict=True))


def _needed_tokens(manifest: Manifest, chunk: ChunkMap) -> int:
    """How many tokens must be computed before the chunk can be packed: its own; all, where it has a state."""
    spans = [column.like for column in chunk.columns if column is not None]
    if any(manifest.groups[manifest.layers[span.layer].group].kind is GroupKind.STATE for span in spans):
        return token_end(manifest)
    return max((span.end_token for span in spans), default=0)
