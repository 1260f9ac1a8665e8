"""The decoder's end of the hand-off: claims a ticket's payload, reads it chunk by chunk, verifies, lands, commits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bridge.counters import Counters
from bridge.devices import Device
from bridge.errors import KVBridgeError
from bridge.handoff import messages
from bridge.handoff.bounds import Bounds, Observer, ignore
from bridge.handoff.channel import Channel
from bridge.handoff.compatibility import check_fits, check_lossless, check_ticket
from bridge.handoff.errors import Cancelled, CannotConnect, HandoffError, HandoffTimeout, PeerLost, PeerUnknown, ProtocolError, StagingFull
from bridge.handoff.identity import Identity, PeerConfig, PinnedPeers, client_context
from bridge.handoff.link import Claimed, Link, Receiving
from bridge.handoff.loop import Job, LoopThread
from bridge.handoff.staging import Extent, StagingPool
from bridge.handoff.ticket import Ticket
from bridge.pages import BlockTable, CacheGroup, PagedCache
from bridge.shares import ChunkShare, as_groups, batches, chunk_share, token_end
from bridge.transfer.agent import Agent, Memory, ReadRange, Transfer
from bridge.transfer.errors import TransferTimeout
from bridge.wire import ContentKind, Manifest, PayloadMap, TagKeys, open_sealed

_BUSY_POLL_SECONDS = 0.002
_POLL_INTERVAL = 0.0002


@dataclass(frozen=True)
class Target:
    """Where a payload is to land, and what the decoder expects of it.

    cache, table: the decoder's own pages, of any block size, layout and element type; an engine with several KV groups gives those, each
    with its own block table, and None as the table. model_digest: as geometry.model_digest computes it.
    first_token: tokens before it are here already and are never written. end_token: one past the last token that is wanted (None: the
    payload's last). content: the digests that the payload must have (None: not compared). reader, readers: this rank's number among those
    that take the payload. lossless: whether a payload that a lossy codec changed is refused.
    """

    cache: PagedCache | Sequence[CacheGroup]
    table: BlockTable | None
    model_digest: bytes
    first_token: int = 0
    end_token: int | None = None
    content: tuple[tuple[ContentKind, bytes], ...] | None = None
    reader: int = 0
    readers: int = 1
    lossless: bool = False


@dataclass(frozen=True)
class Received:
    """A committed hand-off. Times in seconds; `transfer` and `land` overlap."""

    manifest: Manifest
    nbytes: int
    total: float
    transfer: float
    land: float


class Fetch:
    """A hand-off under way."""

    def __init__(self, job: Job[Received]) -> None:
        self._job = job

    def done(self) -> bool:
        return self._job.future.done()

    def cancel(self) -> None:
        """Gives the hand-off up; it is done, and the pages are the engine's again, when `result` raises (Cancelled, as a rule)."""
        self._job.cancel()

    def result(self, timeout: float | None = None) -> Received:
        """Waits for the commit. Raises the typed failure, or HandoffTimeout when `timeout` seconds pass first (the fetch goes on)."""
        if not concurrent.futures.wait([self._job.future], timeout).done:
            raise HandoffTimeout(f"the hand-off did not finish within {timeout} s")
        return self._job.future.result()

    async def result_async(self) -> Received:
        """`result` for engines that run on an event loop."""
        return await asyncio.wrap_future(self._job.future)


class Decoder:
    """Fetches payloads. Any engine uses it in two lines:

        decoder = Decoder(identity, peers, device, agent, staging_bytes=1 << 28)
        received = decoder.fetch(ticket, Target(cache, table, model_digest))

    identity, peers: this host's certificate, and the prefillers with their addresses; a ticket can name no other. device: what lands.
    agent: what carries the bytes. staging_bytes: the budget of host memory for payloads that are arriving.
    `close` frees memory and registration; it does not close the agent, whose own close ends transfers that were given up.
    """

    def __init__(
        self,
        identity: Identity,
        peers: Mapping[str, PeerConfig],
        device: Device,
        agent: Agent,
        *,
        staging_bytes: int,
        bounds: Bounds = Bounds(),
        chunks_in_flight: int = 2,
        observe: Observer = ignore,
    ) -> None:
        self.identity, self.device, self.agent, self.bounds, self.observe = identity, device, agent, bounds, observe
        self.counters = Counters()
        self._peers = dict(peers)
        self._depth = chunks_in_flight
        self._links: dict[tuple[str, int], Link] = {}
        self._connecting: dict[tuple[str, int], asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool = StagingPool(staging_bytes)
        self._memory = device.allocate_staging(self._pool.capacity)
        self._registration = agent.register(Memory(self._memory.address, self._memory.nbytes, owner=self._memory))
        self._landing = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="kvbridge-land")
        self._loop = LoopThread(f"kvbridge-decoder-{identity.name}")
        self._closed = False

    # What the engine calls.

    def start(self, ticket: Ticket, target: Target) -> Fetch:
        """Begins a hand-off and returns at once. The pages belong to it until it is done, `cancel` included."""
        if self._closed:
            raise Cancelled("this decoder is closed")
        return Fetch(self._loop.start(self._counted(ticket, target)))

    def fetch(self, ticket: Ticket, target: Target) -> Received:
        """A whole hand-off: returns when every block was verified and landed.

        Raises a HandoffError, TransferError, WireError or DeviceError; then nothing may be used of what the pages hold, and everything
        that the hand-off held on either side is freed.
        """
        return self.start(ticket, target).result()

    async def fetch_async(self, ticket: Ticket, target: Target) -> Received:
        """`fetch` for engines that run on an event loop."""
        return await self.start(ticket, target).result_async()

    def decline(self, ticket: Ticket, target_model: bytes, reason: str) -> None:
        """Lets the prefiller free a payload that this decoder will not fetch; best effort, returns at once."""
        if not self._closed:
            self._loop.submit(self._decline(ticket, target_model, reason))

    def staging(self) -> tuple[int, int]:
        """(bytes in use, budget) of the staging memory; quarantined bytes count as used."""
        return self._pool.used, self._pool.capacity

    def quarantined(self) -> int:
        """Bytes under transfers that were given up and may still arrive."""
        return self._pool.quarantined

    def close(self) -> None:
        """Ends every hand-off and frees staging memory, registration and connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.close()
        self._landing.shutdown(wait=True)
        try:
            self._registration.release()
        except TransferTimeout:
            # A peer that hangs but lives may still write: the agent keeps the memory until it is closed itself.
            self.counters.add("registration_kept", TransferTimeout.clause)

    # One hand-off, on the loop's thread.

    async def _counted(self, ticket: Ticket, target: Target) -> Received:
        self.counters.add("fetches")
        try:
            received = await self._fetch(ticket, target)
        except KVBridgeError as error:
            self.counters.add("failed", error.clause)
            raise
        except asyncio.CancelledError:
            self.counters.add("failed", Cancelled.clause)
            raise Cancelled("the decoder's engine gave the request up") from None
        self.counters.add("committed")
        self.counters.add("received_bytes", amount=received.nbytes)
        return received

    async def _fetch(self, ticket: Ticket, target: Target) -> Received:
        start = time.perf_counter()
        link = await self._link(ticket.peer, ticket.rank)
        self.observe("claiming", {"request_id": ticket.request_id})
        claimed, receiving = await link.claim(ticket, target.reader, target.readers, target.model_digest)
        try:
            move = await self._take(link, claimed, receiving, ticket, target)
            # From here on the decoder has everything: whether the prefiller hears of it changes nothing for the request.
            try:
                await receiving.wait_released(self.bounds.claim)
            except HandoffError as error:
                self.counters.add("commit_unconfirmed", error.clause)
        finally:
            link.forget(ticket)
        self.observe("released", {})
        return Received(move.manifest, move.nbytes, time.perf_counter() - start, move.transfer_seconds, move.land_seconds)

    async def _take(self, link: Link, claimed: Claimed, receiving: Receiving, ticket: Ticket, target: Target) -> _Move:
        """Everything between the grant and the commit; abandons the lease if it fails."""
        try:
            self.observe("granted", {"request_id": ticket.request_id})
            manifest = open_sealed(claimed.manifest, claimed.key)
            check_ticket(manifest, ticket)
            end_token = token_end(manifest) if target.end_token is None else target.end_token
            groups = as_groups(target.cache, target.table)
            check_fits(manifest, groups, target.model_digest, target.first_token, end_token, target.content)
            if target.lossless:
                check_lossless(manifest, groups)
            keys = TagKeys(claimed.key, manifest.lease, manifest.generation)
            move = _Move(self, link, receiving, ticket, manifest, keys, target, groups, end_token)
            await move.run()
        except BaseException as error:
            with contextlib.suppress(HandoffError):
                await link.abandon(ticket, error)
            raise
        try:
            await link.commit(ticket)
        except HandoffError as error:
            self.counters.add("commit_unconfirmed", error.clause)
        self.observe("commit_sent", {})
        return move

    async def _decline(self, ticket: Ticket, model_digest: bytes, reason: str) -> None:
        with contextlib.suppress(KVBridgeError):
            link = await self._link(ticket.peer, ticket.rank)
            await link.claim(ticket, 0, 1, model_digest)
            link.forget(ticket)
            await link.abandon(ticket, Cancelled(reason))
            self.counters.add("declined")

    # Connections.

    async def _link(self, name: str, rank: int) -> Link:
        """The open connection to a prefiller's rank, or a new one. Raises PeerUnknown or CannotConnect."""
        peer = self._peers.get(name)
        if peer is None or not peer.host:
            raise PeerUnknown(f"no prefiller named {name!r} with an address is configured here")
        if not 0 < peer.port + rank < 1 << 16:
            raise PeerUnknown(f"prefiller {name!r} has no rank {rank}: port {peer.port + rank} cannot be")
        async with self._connecting.setdefault((name, rank), asyncio.Lock()):
            link = self._links.get((name, rank))
            if link is None or link.lost is not None:
                link = self._links[name, rank] = await self._connect(name, replace(peer, port=peer.port + rank))
                task = asyncio.create_task(link.run())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            return link

    async def _connect(self, name: str, peer: PeerConfig) -> Link:
        self.observe("connecting", {"peer": name})
        try:
            async with asyncio.timeout(self.bounds.connect):
                reader, writer = await asyncio.open_connection(
                    peer.host,
                    peer.port,
                    ssl=client_context(self.identity, peer),
                    ssl_handshake_timeout=self.bounds.connect,
                    limit=messages.MAX_MESSAGE_BYTES,
                )
        except (OSError, ssl.SSLError, TimeoutError) as error:
            reason = str(error) or f"no answer within {self.bounds.connect} s"
            raise CannotConnect(f"prefiller {name!r} at {peer.host}:{peer.port}: {reason}") from None
        channel = Channel(reader, writer, name, self.bounds.silence)
        try:
            PinnedPeers({name: peer}).name_of(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
            await channel.send(messages.Hello(messages.PROTOCOL_MAJOR, messages.PROTOCOL_MINOR, self.agent.kind))
            welcome = await channel.receive(self.bounds.connect)
            if isinstance(welcome, messages.Refusal):
                raise ProtocolError(welcome.detail, remedy=welcome.remedy)
            if not isinstance(welcome, messages.Welcome) or welcome.agent != self.agent.kind:
                raise ProtocolError(f"{name} did not answer the greeting")
            endpoint = await asyncio.to_thread(self.agent.connect, welcome.agent_metadata)
        except PeerLost as error:
            await channel.close()
            raise CannotConnect(f"prefiller {name!r} at {peer.host}:{peer.port} does not take this decoder: {error.detail}") from None
        except BaseException:
            await channel.close()
            raise
        self.observe("connected", {"peer": name})
        return Link(channel, welcome, endpoint, self.bounds)

    async def take_staging(self, nbytes: int) -> Extent:
        """Room for a chunk. Raises StagingFull."""
        deadline = time.monotonic() + self.bounds.staging
        while True:
            extent = self._pool.try_take(nbytes)
            if extent is not None:
                return extent
            if time.monotonic() > deadline:
                raise StagingFull(f"no room for a chunk of {nbytes} bytes within {self.bounds.staging} s")
            await asyncio.sleep(0.001)


class _Move:
    """The chunks of one payload: each is read while the one before lands."""

    def __init__(
        self,
        decoder: Decoder,
        link: Link,
        receiving: Receiving,
        ticket: Ticket,
        manifest: Manifest,
        keys: TagKeys,
        target: Target,
        groups: tuple[CacheGroup, ...],
        end_token: int,
    ) -> None:
        self._decoder, self._link, self._receiving, self._ticket = decoder, link, receiving, ticket
        self.manifest, self._keys, self._target, self._groups, self._end_token = manifest, keys, target, groups, end_token
        self._arrived: asyncio.Queue[tuple[ChunkShare, Extent] | None] = asyncio.Queue(maxsize=max(decoder._depth - 1, 1))
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
            await asyncio.gather(*tasks, return_exceptions=True)
            while not self._arrived.empty():
                item = self._arrived.get_nowait()
                if item is not None:
                    self._decoder._pool.give_back(item[1])

    async def _read_all(self) -> None:
        bounds, pool = self._decoder.bounds, self._decoder._pool
        payload = PayloadMap(self.manifest)
        for index in range(payload.chunk_count):
            chunk = payload.chunk(index)
            slot = await self._receiving.slot(index, bounds.chunk)
            share = chunk_share(self.manifest, chunk, [group.cache for group in self._groups])
            if any(batches(self.manifest, share, self._target.first_token, self._end_token)):
                extent = await self._decoder.take_staging(share.nbytes)
                ranges = [ReadRange(slot + remote - chunk.offset, extent.offset + local, size) for remote, local, size in share.ranges]
                self._decoder.observe("reading", {"chunk": index})
                await self._read(ranges, extent)
                self._decoder.observe("arrived", {"chunk": index})
                try:
                    await self._arrived.put((share, extent))
                except BaseException:
                    pool.give_back(extent)
                    raise
                self.nbytes += share.nbytes
            await self._link.taken(self._ticket, index)
        await self._arrived.put(None)

    async def _read(self, ranges: list[ReadRange], extent: Extent) -> None:
        """Reads into `extent`, which is given back or quarantined if that fails."""
        decoder, start = self._decoder, time.perf_counter()
        try:
            transfer = self._link.endpoint.read(self._link.memory, decoder._registration, ranges)
        except BaseException:
            decoder._pool.give_back(extent)
            raise
        try:
            await self._arrival(transfer)
        except BaseException:
            self._give_up(transfer, extent)
            raise
        transfer.release()
        self.transfer_seconds += time.perf_counter() - start

    async def _arrival(self, transfer: Transfer) -> None:
        start = time.perf_counter()
        while not transfer.done():
            elapsed = time.perf_counter() - start
            if self._receiving.error is not None:
                raise self._receiving.error
            if elapsed > self._decoder.bounds.transfer:
                raise TransferTimeout(f"{transfer.nbytes} bytes did not arrive within {self._decoder.bounds.transfer} s")
            # Short transfers are waited for without sleeping; long ones leave the processor to others.
            await asyncio.sleep(0 if elapsed < _BUSY_POLL_SECONDS else _POLL_INTERVAL)

    def _give_up(self, transfer: Transfer, extent: Extent) -> None:
        if _settled(transfer):
            self._decoder._pool.give_back(extent)
        else:
            self._decoder.counters.add("quarantined")
            self._decoder._pool.quarantine(extent, lambda: _settled(transfer))

    def _land(self, share: ChunkShare, data: np.ndarray) -> None:
        for number, shares, rows in batches(self.manifest, share, self._target.first_token, self._end_token):
            group = self._groups[number]
            self._decoder.device.land(group.cache, group.table, shares, self._keys, data, *rows)

    async def _land_all(self) -> None:
        decoder, loop = self._decoder, asyncio.get_running_loop()
        while (item := await self._arrived.get()) is not None:
            share, extent = item
            data = decoder._memory.bytes()[extent.offset : extent.offset + share.nbytes]
            start = time.perf_counter()
            landing = loop.run_in_executor(decoder._landing, self._land, share, data)
            try:
                await asyncio.shield(landing)
            except asyncio.CancelledError:
                # The pages are the engine's again only when nobody writes to them any more.
                await asyncio.gather(landing, return_exceptions=True)
                raise
            finally:
                decoder._pool.give_back(extent)
            self.land_seconds += time.perf_counter() - start
            decoder.observe("landed", {"chunk": share.chunk})


def _settled(transfer: Transfer) -> bool:
    """Whether no byte of a given-up transfer can arrive any more."""
    try:
        transfer.release()
    except TransferTimeout:
        return False
    return True
