"""The chunks of one payload on the decoder: each is read while the one before is verified and landed."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bridge.counters import Counters
from bridge.devices import Buffer, Device
from bridge.handoff.bounds import Bounds, Observer
from bridge.handoff.errors import StagingFull
from bridge.handoff.link import Link, Receiving
from bridge.handoff.loop import outlast
from bridge.handoff.staging import Extent, Staging
from bridge.handoff.ticket import Ticket
from bridge.pages import CacheGroup
from bridge.shares import ChunkShare, batches, chunk_share
from bridge.transfer.agent import ReadRange, Transfer
from bridge.transfer.errors import TransferTimeout
from bridge.wire import Manifest, PayloadMap, TagKeys

_BUSY_POLL_SECONDS = 0.002
_POLL_INTERVAL = 0.0002
_ROOM_INTERVAL = 0.001


@dataclass(frozen=True)
class Resources:
    """What moves share: a decoder's device, staging memory of the prefiller's kind, and threads.

    turn: held while a move waits for room in the staging memory, so that moves get it in the order in which they asked.
    depth: chunks of one move that may be in staging memory at a time, besides the one that lands.
    """

    device: Device
    staging: Staging
    turn: asyncio.Lock
    landing: ThreadPoolExecutor
    depth: int
    bounds: Bounds
    counters: Counters
    observe: Observer

    async def take_staging(self, nbytes: int) -> Extent:
        """Room for a chunk. Raises StagingFull."""
        try:
            async with asyncio.timeout(self.bounds.staging), self.turn:
                while (extent := self.staging.pool.try_take(nbytes)) is None:
                    await asyncio.sleep(_ROOM_INTERVAL)
                return extent
        except TimeoutError:
            raise StagingFull(f"no room for a chunk of {nbytes} bytes within {self.bounds.staging} s") from None


@dataclass(frozen=True)
class Wanted:
    """What is to land where. first_token, end_token: the tokens that are written, of those that the manifest carries.

    order: devices.engine_order of the engine's thread.
    """

    ticket: Ticket
    manifest: Manifest
    keys: TagKeys
    groups: tuple[CacheGroup, ...]
    first_token: int
    end_token: int
    order: dict[str, Any]


class Move:
    """Brings one claimed payload in. Made and run on the decoder's loop; `nbytes` and the seconds are for the report."""

    def __init__(self, resources: Resources, link: Link, receiving: Receiving, wanted: Wanted) -> None:
        self._resources, self._link, self._receiving, self.wanted = resources, link, receiving, wanted
        self._arrived: asyncio.Queue[tuple[ChunkShare, Extent] | None] = asyncio.Queue(maxsize=max(resources.depth - 1, 1))
        self.nbytes = 0
        self.transfer_seconds = 0.0
        self.land_seconds = 0.0

    async def run(self) -> None:
        """Returns when everything has landed. On failure nothing of this payload is under way any more, and staging is given back."""
        tasks = [asyncio.create_task(self._read_all()), asyncio.create_task(self._land_all())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            try:
                await outlast(tasks)
            finally:
                for task in tasks:
                    _ = task.cancelled() or task.exception()
                while not self._arrived.empty():
                    item = self._arrived.get_nowait()
                    if item is not None:
                        self._resources.staging.pool.give_back(item[1])

    async def _read_all(self) -> None:
        resources, wanted, manifest = self._resources, self.wanted, self.wanted.manifest
        payload = PayloadMap(manifest)
        held = _token_ranges(manifest, wanted.groups)
        for index in range(payload.chunk_count):
            # Layers that nobody holds here may make any number of chunks, and others wait for this loop meanwhile.
            await asyncio.sleep(0)
            start = (payload.first_chunk + index) * manifest.chunk_tokens
            if not any(first < start + manifest.chunk_tokens and start < end for first, end in held):
                await self._receiving.slot(index, resources.bounds.chunk)
                await self._link.taken(wanted.ticket, index)
                continue
            chunk = payload.chunk(index)
            share = chunk_share(manifest, chunk, [group.cache for group in wanted.groups])
            slot = await self._receiving.slot(index, resources.bounds.chunk)
            if any(batches(manifest, share, wanted.first_token, wanted.end_token)):
                extent = await resources.take_staging(share.nbytes)
                ranges = [ReadRange(slot + remote - chunk.offset, extent.offset + local, size) for remote, local, size in share.ranges]
                resources.observe("reading", {"chunk": index})
                await self._read(ranges, extent)
                resources.observe("arrived", {"chunk": index})
                try:
                    await self._arrived.put((share, extent))
                except BaseException:
                    resources.staging.pool.give_back(extent)
                    raise
                self.nbytes += share.nbytes
            await self._link.taken(wanted.ticket, index)
        await self._arrived.put(None)

    async def _read(self, ranges: list[ReadRange], extent: Extent) -> None:
        """Reads into `extent`, which is given back or quarantined if that fails."""
        resources, start = self._resources, time.perf_counter()
        try:
            transfer = self._link.endpoint.read(self._link.memory, resources.staging.registration, ranges)
        except BaseException:
            resources.staging.pool.give_back(extent)
            raise
        try:
            await self._arrival(transfer)
            transfer.release()
        except BaseException:
            self._give_up(transfer, extent)
            raise
        self.transfer_seconds += time.perf_counter() - start

    async def _arrival(self, transfer: Transfer) -> None:
        start = time.perf_counter()
        while not transfer.done():
            elapsed = time.perf_counter() - start
            if self._receiving.error is not None:
                raise self._receiving.error
            if elapsed > self._resources.bounds.transfer:
                raise TransferTimeout(f"{transfer.nbytes} bytes did not arrive within {self._resources.bounds.transfer} s")
            # Short transfers are waited for without sleeping; long ones leave the processor to others.
            await asyncio.sleep(0 if elapsed < _BUSY_POLL_SECONDS else _POLL_INTERVAL)

    def _give_up(self, transfer: Transfer, extent: Extent) -> None:
        if _settled(transfer):
            self._resources.staging.pool.give_back(extent)
        else:
            self._resources.counters.add("quarantined")
            self._resources.staging.pool.quarantine(extent, lambda: _settled(transfer))

    async def _land_all(self) -> None:
        resources, loop = self._resources, asyncio.get_running_loop()
        while (item := await self._arrived.get()) is not None:
            share, extent = item
            try:
                data = resources.staging.view(extent, share.nbytes)
                start = time.perf_counter()
                landing = loop.run_in_executor(resources.landing, self._land, share, data)
                # The pages are the engine's again, and the extent another chunk's, only when nobody uses them any more.
                await outlast([landing])
                landing.result()
            finally:
                resources.staging.pool.give_back(extent)
            self.land_seconds += time.perf_counter() - start
            resources.observe("landed", {"chunk": share.chunk})

    def _land(self, share: ChunkShare, data: Buffer) -> None:
        wanted = self.wanted
        for number, shares, rows in batches(wanted.manifest, share, wanted.first_token, wanted.end_token):
            group = wanted.groups[number]
            self._resources.device.land(group.cache, group.table, shares, wanted.keys, data, *rows, **wanted.order)


def _token_ranges(manifest: Manifest, groups: tuple[CacheGroup, ...]) -> set[tuple[int, int]]:
    """[first, end) of the tokens of each manifest group that has a layer of these pages."""
    layers = {index for group in groups for index in group.cache.layers}
    found = [manifest.groups[layer.group] for layer in manifest.layers if layer.index in layers]
    return {(group.first_token, group.end_token) for group in found}


def _settled(transfer: Transfer) -> bool:
    """Whether no byte of a given-up transfer can arrive any more."""
    try:
        transfer.release()
    except TransferTimeout:
        return False
    return True
