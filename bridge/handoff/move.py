"""The chunks of one payload on the decoder: the next landings are planned and their bytes read while one is verified and landed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from bridge.counters import Counters
from bridge.devices import Buffer, Device, PlansLandings, Shares
from bridge.handoff.bounds import Bounds, Observer
from bridge.handoff.errors import StagingFull
from bridge.handoff.link import Link, Receiving
from bridge.handoff.loop import outlast
from bridge.handoff.staging import Extent, Staging
from bridge.handoff.ticket import Ticket
from bridge.pages import CacheGroup
from bridge.shares import Batch, ChunkShare, batches, chunk_share
from bridge.transfer.agent import ReadRange, Transfer
from bridge.transfer.errors import TransferFailed, TransferTimeout
from bridge.wire import Manifest, PayloadMap, TagKeys

_BUSY_POLL_SECONDS = 0.002
_POLL_INTERVAL = 0.0002
_ROOM_INTERVAL = 0.001
_REASON_SECONDS = 0.1
_SOON_SECONDS = 0.001
"""As long as a plan takes, about."""


@dataclass(frozen=True)
class Resources:
    """What moves share: a decoder's device, staging memory of the prefiller's kind, and threads.

    planner: the device, where it can plan a landing before the bytes are there. turn: held while a move waits for room in the staging
    memory, so that moves get it in the order in which they asked. depth: chunks of one move that may be on their way or wait in staging
    memory at a time, besides the one that lands. alone: whether no other move is under way.
    """

    device: Device
    planner: PlansLandings | None
    staging: Staging
    turn: asyncio.Lock
    landing: ThreadPoolExecutor
    depth: int
    bounds: Bounds
    counters: Counters
    observe: Observer
    alone: Callable[[], bool]

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


Landing: TypeAlias = Callable[[Buffer], None]
"""What lands a chunk's bytes, or some of them, once they are in the given buffer."""


@dataclass
class Incoming:
    """A chunk on its way to `data`. start: when its read began. landings: what will land it."""

    share: ChunkShare
    extent: Extent
    data: Buffer
    transfer: Transfer
    start: float
    landings: list[Landing]


class Move:
    """Brings one claimed payload in. Made and run on the decoder's loop; `nbytes` and the seconds are for the report."""

    def __init__(self, resources: Resources, link: Link, receiving: Receiving, wanted: Wanted) -> None:
        self._resources, self._link, self._receiving, self.wanted = resources, link, receiving, wanted
        self._places = asyncio.Semaphore(resources.depth)
        self._under_way: asyncio.Queue[Incoming | None] = asyncio.Queue()
        self._arrived: asyncio.Queue[Incoming | None] = asyncio.Queue()
        self._last_arrival = 0.0
        self.nbytes = 0
        self.transfer_seconds = 0.0
        """While at least one read was under way and none had arrived that was asked for later."""
        self.land_seconds = 0.0

    async def run(self) -> None:
        """Returns when everything has landed. On failure nothing of this payload is under way any more, and staging is given back."""
        tasks = [asyncio.create_task(step) for step in (self._read_all(), self._await_all(), self._land_all())]
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
                for incoming in _left_in(self._under_way):
                    self._give_up(incoming)
                for incoming in _left_in(self._arrived):
                    self._drop(incoming)

    async def _read_all(self) -> None:
        """Begins the reads, in order, as places in staging memory allow."""
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
            calls = list(batches(manifest, share, wanted.first_token, wanted.end_token))
            await self._places.acquire()
            if not calls:
                await self._receiving.slot(index, resources.bounds.chunk)
                self._places.release()
                await self._link.taken(wanted.ticket, index)
                continue
            # Planned while its bytes are on their way or, where the prefiller has yet to compute the chunk, while it does.
            landings = None if await self._receiving.soon(index, _SOON_SECONDS) else self._plan(calls, share.nbytes)
            slot = await self._receiving.slot(index, resources.bounds.chunk)
            extent = await resources.take_staging(share.nbytes)
            ranges = [ReadRange(slot + remote - chunk.offset, extent.offset + local, size) for remote, local, size in share.ranges]
            incoming = self._begin(share, extent, ranges)
            try:
                incoming.landings = self._plan(calls, share.nbytes) if landings is None else landings
            except BaseException:
                self._give_up(incoming)
                raise
            self._under_way.put_nowait(incoming)
        self._under_way.put_nowait(None)

    def _begin(self, share: ChunkShare, extent: Extent, ranges: list[ReadRange]) -> Incoming:
        """Begins a read into `extent`, which is given back if that fails."""
        resources, start = self._resources, time.perf_counter()
        try:
            resources.observe("reading", {"chunk": share.chunk})
            data = resources.staging.view(extent, share.nbytes)
            transfer = self._link.endpoint.read(self._link.memory, resources.staging.registration, ranges)
        except BaseException:
            resources.staging.pool.give_back(extent)
            raise
        return Incoming(share, extent, data, transfer, start, [])

    async def _await_all(self) -> None:
        """Waits for the reads, in order, and tells the prefiller of each."""
        while (incoming := await self._under_way.get()) is not None:
            try:
                await self._arrival(incoming)
                incoming.transfer.release()
            except BaseException:
                self._give_up(incoming)
                raise
            now = time.perf_counter()
            self.transfer_seconds += now - max(incoming.start, self._last_arrival)
            self._last_arrival = now
            self._arrived.put_nowait(incoming)
            self.nbytes += incoming.share.nbytes
            self._resources.observe("arrived", {"chunk": incoming.share.chunk})
            await self._link.taken(self.wanted.ticket, incoming.share.chunk)
        self._arrived.put_nowait(None)

    async def _arrival(self, incoming: Incoming) -> None:
        transfer, bound = incoming.transfer, self._resources.bounds.transfer
        start = time.perf_counter()
        while not await self._done(transfer):
            elapsed = time.perf_counter() - start
            if self._receiving.error is not None:
                raise self._receiving.error
            if elapsed > bound:
                raise TransferTimeout(f"{transfer.nbytes} bytes did not arrive within {bound} s")
            # Short transfers are waited for without sleeping; long ones leave the processor to others.
            await asyncio.sleep(0 if elapsed < _BUSY_POLL_SECONDS else _POLL_INTERVAL)

    async def _done(self, transfer: Transfer) -> bool:
        try:
            return transfer.done()
        except TransferFailed:
            # A prefiller that ends a lease may stop its reads at once; its reason comes a moment later.
            await self._receiving.wait_ended(_REASON_SECONDS)
            raise

    def _give_up(self, incoming: Incoming) -> None:
        """Of a read that may still be under way."""
        if _settled(incoming.transfer):
            self._drop(incoming)
        else:
            self._resources.counters.add("quarantined")
            # The transfer alone: landings hold the engine's pages, which may be wanted back before the last byte has come.
            self._resources.staging.pool.quarantine(incoming.extent, partial(_settled, incoming.transfer))

    def _drop(self, incoming: Incoming) -> None:
        """Of a chunk that has arrived, or of which nothing can arrive any more."""
        self._resources.staging.pool.give_back(incoming.extent)

    async def _land_all(self) -> None:
        resources = self._resources
        while (incoming := await self._arrived.get()) is not None:
            self._places.release()
            try:
                start = time.perf_counter()
                await self._land_one(incoming)
            finally:
                self._drop(incoming)
            self.land_seconds += time.perf_counter() - start
            resources.observe("landed", {"chunk": incoming.share.chunk})

    async def _land_one(self, incoming: Incoming) -> None:
        """On a landing thread; or here, where it is short and nobody else waits for the loop: two threads would wake each other for it."""
        resources = self._resources
        if resources.staging.memory.device != "cpu" and resources.alone():
            await asyncio.sleep(0)  # the next chunk's read begins first
            # What takes long would keep heartbeats from the peers, and their messages from being read.
            if all(map(_short, incoming.landings)):
                _call_all(incoming.landings, incoming.data)
                return
        landing = asyncio.get_running_loop().run_in_executor(resources.landing, _call_all, incoming.landings, incoming.data)
        # The pages are the engine's again, and the extent another chunk's, only when nobody uses them any more.
        await outlast([landing])
        landing.result()

    def _plan(self, calls: list[Batch], nbytes: int) -> list[Landing]:
        """What is to be called with a chunk's buffer once its bytes are there; nothing is read or written before.

        On the loop: a plan takes a fraction of a millisecond, and from another thread it would take Python's lock from the read.
        """
        wanted, planner = self.wanted, self._resources.planner
        if planner is None:
            return [partial(self._land, *call) for call in calls]
        memory, made = self._resources.staging.memory.device, []
        for number, shares, rows in calls:
            group = wanted.groups[number]
            made.append(planner.landing(group.cache, group.table, shares, wanted.keys, nbytes, memory, *rows, **wanted.order))
        return made

    def _land(self, number: int, shares: Shares, rows: tuple[int, int], data: Buffer) -> None:
        wanted, group = self.wanted, self.wanted.groups[number]
        self._resources.device.land(group.cache, group.table, shares, wanted.keys, data, *rows, **wanted.order)


def _short(landing: Landing) -> bool:
    """What a planner says of its call, see PlansLandings."""
    asked: Callable[[], bool] | None = getattr(landing, "short", None)
    return asked is not None and asked()


def _call_all(landings: list[Landing], data: Buffer) -> None:
    for landing in landings:
        landing(data)


def _left_in(queue: asyncio.Queue[Incoming | None]) -> Iterator[Incoming]:
    while not queue.empty():
        incoming = queue.get_nowait()
        if incoming is not None:
            yield incoming


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
