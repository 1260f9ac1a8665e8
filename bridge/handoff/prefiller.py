"""The prefiller's end of the hand-off: packs requests into staging memory and serves them to decoders."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bridge.counters import Counters
from bridge.devices import Device
from bridge.handoff import messages
from bridge.handoff.bounds import Bounds, Observer, ignore
from bridge.handoff.channel import Channel
from bridge.handoff.errors import (
    Cancelled,
    CannotListen,
    HandoffError,
    HandoffTimeout,
    LeaseExpired,
    LeaseTaken,
    ModelDiffers,
    PeerLost,
    ProtocolError,
    Refused,
    StagingFull,
    StaleGeneration,
    UnknownLease,
)
from bridge.handoff.identity import Identity, PeerConfig, PinnedPeers, server_context
from bridge.handoff.lease import Lease, Mode, State
from bridge.handoff.loop import LoopThread
from bridge.handoff.messages import from_u64, u64
from bridge.handoff.session import Session
from bridge.handoff.staging import Extent, StagingPool
from bridge.handoff.ticket import Ticket
from bridge.pages import BlockTable, CacheGroup, PagedCache, PagesDoNotFit
from bridge.shares import as_groups, batches, check_held, chunk_share, token_end
from bridge.transfer.agent import Agent, Memory
from bridge.wire import ChunkMap, GroupKind, Manifest, new_key, seal
from bridge.wire.errors import TooLarge

_REMEMBERED = 1 << 16
_MAX_SESSIONS = 1024
_EXPIRY_INTERVAL = 0.1


class Prefiller:
    """Offers payloads and serves them. Any engine uses it in three lines:

        prefiller = Prefiller(identity, peers, device, agent, staging_bytes=1 << 30)
        offer = prefiller.offer(manifest, cache, table)     # then offer.advance(tokens) as the engine computes
        ticket = offer.ticket                               # for the router, for the decoder

    identity, peers: this host's certificate and the decoders that may connect. device: what packs. agent: what carries the bytes.
    staging_bytes: the budget of host memory for packed payloads. host, port: of the control channel (port 0: any free one).
    Raises CannotListen, BadIdentity or StagingFull. `close` frees memory, port and registration; it does not close the agent.
    """

    def __init__(
        self,
        identity: Identity,
        peers: Mapping[str, PeerConfig],
        device: Device,
        agent: Agent,
        *,
        staging_bytes: int,
        host: str = "127.0.0.1",
        port: int = 0,
        bounds: Bounds = Bounds(),
        stream_depth: int = 4,
        observe: Observer = ignore,
    ) -> None:
        self.identity, self.device, self.agent, self.bounds, self.observe = identity, device, agent, bounds, observe
        self.counters = Counters()
        self.stream_depth = stream_depth
        self._instance = secrets.token_bytes(16)
        self._pinned = PinnedPeers(peers)
        self._lock = threading.Condition()
        self._leases: dict[int, Lease] = {}
        self._ended: OrderedDict[int, tuple[int, HandoffError]] = OrderedDict()
        self._requests: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._sessions = 0
        self._closed = False
        self._pool = StagingPool(staging_bytes)
        context = server_context(identity, peers)
        self._memory = device.allocate_staging(self._pool.capacity)
        self._registration = agent.register(Memory(self._memory.address, self._memory.nbytes, owner=self._memory))
        self._loop = LoopThread(f"kvbridge-prefiller-{identity.name}")
        try:
            self._server = self._loop.run(self._listen(context, host, port), bounds.connect)
        except (OSError, OverflowError) as error:
            self._loop.close()
            self._registration.release()
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise CannotListen(f"control port {host}:{port} cannot be opened: {reason}") from None
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._loop.submit(self._expire())
        observe("listening", {"port": self.port})

    async def _listen(self, context: Any, host: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(
            self._accept, host, port, ssl=context, ssl_handshake_timeout=self.bounds.connect, limit=messages.MAX_MESSAGE_BYTES
        )

    # What the engine calls.

    def offer(
        self,
        manifest: Manifest,
        cache: PagedCache | Sequence[CacheGroup],
        table: BlockTable | None = None,
        *,
        mode: Mode = Mode.PARK,
        lease: tuple[int, int] | None = None,
    ) -> Offer:
        """Takes a request on. Nothing is packed before `Offer.advance`; until its last chunk is packed the pages must stay as they are.

        manifest: what the payload will be; its lease and generation are replaced by the prefiller's own. cache, table: the pages;
        engines with several KV groups give those, each with its own block table, and no table.
        mode: park reserves room for the whole payload now; stream passes it through a ring of `stream_depth` chunks.
        lease: (number, generation) where the engine's scheduler had to name the lease before its workers offer it; the prefiller chooses
        otherwise. An earlier offer of the same request is revoked.
        Raises StagingFull, PagesDoNotFit, or the WireError that the manifest breaks.
        """
        if self._closed:
            raise Cancelled("this prefiller is closed")
        number, generation = lease or self._next_lease(manifest.request_id)
        manifest = replace(manifest, lease=number, generation=generation)
        key = new_key()
        sealed = seal(manifest, key)
        made = Lease(manifest, sealed, key, mode, as_groups(cache, table), time.monotonic() + self.bounds.lease)
        if made.map.chunk_count > messages.MAX_CHUNKS:
            raise TooLarge(f"{made.map.chunk_count} chunks, the limit is {messages.MAX_CHUNKS}", remedy="choose a larger chunk size")
        check_held(manifest, made.groups)
        earlier = self._leases.get(number)
        if earlier is not None:
            self.finish(earlier, StaleGeneration(f"request {manifest.request_id!r} was offered anew"))
        self._reserve(made)
        with self._lock:
            self._leases[number] = made
        self.counters.add("offered")
        self.observe("offered", {"request_id": manifest.request_id})
        return Offer(self, made)

    def _next_lease(self, request_id: str) -> tuple[int, int]:
        """A new lease number for a new request, the next generation for one that was offered before."""
        with self._lock:
            number, generation = self._requests.pop(request_id, (secrets.randbits(64), 0))
            self._requests[request_id] = (number, generation + 1)
            while len(self._requests) > _REMEMBERED:
                self._requests.popitem(last=False)
        return number, generation + 1

    def _reserve(self, lease: Lease) -> None:
        """park: takes room for every chunk, or none. stream: only refuses what could never fit."""
        if lease.mode is Mode.STREAM:
            bound = lease.map.chunk_bytes_bound
            if bound > self._pool.capacity:
                raise StagingFull(f"a chunk has up to {bound} bytes, the staging budget is {self._pool.capacity}")
            return
        for index in range(lease.map.chunk_count):
            extent = self._pool.try_take(lease.map.chunk(index).nbytes)
            if extent is None:
                for taken in lease.reserved.values():
                    self._pool.give_back(taken)
                self.counters.add("refused", StagingFull.clause)
                raise StagingFull(
                    f"the payload of {lease.map.payload_bytes} bytes does not fit: {self._pool.used} of {self._pool.capacity} are in use"
                )
            lease.reserved[index] = extent

    def advance(self, lease: Lease, computed_tokens: int, table: BlockTable | Sequence[BlockTable] | None = None) -> None:
        """See Offer.advance."""
        with self._lock:
            if table is not None:
                lease.groups = _with_tables(lease.groups, table)
            lease.deadline = time.monotonic() + self.bounds.lease
        while lease.next_chunk < lease.map.chunk_count:
            chunk = lease.map.chunk(lease.next_chunk)
            if _needed_tokens(lease.manifest, chunk) > computed_tokens:
                return
            extent = self._slot_for(lease, chunk.index, chunk.nbytes)
            view = self._memory.bytes()[extent.offset : extent.offset + chunk.nbytes]
            start = time.perf_counter()
            try:
                groups, manifest = lease.groups, lease.manifest
                share = chunk_share(manifest, chunk, [group.cache for group in groups])
                for number, shares, _ in batches(manifest, share, 0, manifest.end_token):
                    self.device.pack(groups[number].cache, groups[number].table, shares, lease.keys, view)
            except BaseException as error:
                self._pool.give_back(extent)
                failure = error if isinstance(error, HandoffError) else Cancelled(f"packing failed: {error}")
                self.finish(lease, failure)
                raise
            lease.pack_seconds += time.perf_counter() - start
            with self._lock:
                lease.next_chunk += 1
                if not lease.live:
                    self._pool.give_back(extent)
                    break
                lease.slots[chunk.index] = extent
                lease.deadline = time.monotonic() + self.bounds.lease
                for session in lease.sessions.values():
                    self._loop.loop.call_soon_threadsafe(session.ready, lease, chunk.index, extent.offset)
            self.counters.add("packed_bytes", amount=chunk.nbytes)
            self.observe("packed", {"chunk": chunk.index})
        if lease.error is not None:
            raise lease.error

    def _slot_for(self, lease: Lease, chunk: int, nbytes: int) -> Extent:
        """Room for the next chunk; in stream mode, waits until the ring has a free place."""
        if lease.mode is Mode.PARK:
            with self._lock:
                if lease.error is not None:
                    raise lease.error
                return lease.reserved.pop(chunk)
        deadline = time.monotonic() + self.bounds.chunk
        with self._lock:
            while lease.live and len(lease.slots) >= self.stream_depth:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._lock.wait(remaining)
            if lease.error is not None:
                raise lease.error
            if len(lease.slots) >= self.stream_depth:
                error = HandoffTimeout(f"no decoder took a chunk within {self.bounds.chunk} s")
                self._end(lease, error)
                raise error
        try:
            return self._pool.take(nbytes, self.bounds.staging)
        except StagingFull as error:
            self.finish(lease, error)
            raise

    def wait_claimed(self, lease: Lease) -> None:
        """See Offer.wait_claimed."""
        with self._lock:
            while lease.state is State.OFFERED:
                self._lock.wait()
        if lease.error is not None:
            raise lease.error

    def staging(self) -> tuple[int, int]:
        """(bytes in use, budget) of the staging memory."""
        return self._pool.used, self._pool.capacity

    def live_leases(self) -> int:
        """Payloads that are neither committed nor failed."""
        with self._lock:
            return len(self._leases)

    def close(self) -> None:
        """Revokes every lease and frees staging memory, registration and port. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            leases = list(self._leases.values())
        for lease in leases:
            self.finish(lease, Cancelled("the prefiller is shutting down"))
        self._loop.run(self._stop_listening(), timeout=5.0)
        self._loop.close()
        self._registration.release()

    # What decoders ask for; these run on the loop's thread.

    def welcome(self) -> messages.Welcome:
        """The greeting: how to read the staging memory."""
        return messages.Welcome(
            major=messages.PROTOCOL_MAJOR,
            minor=messages.PROTOCOL_MINOR,
            agent=self.agent.kind,
            instance=self._instance,
            agent_metadata=self.agent.metadata(),
            address=u64(self._memory.address),
            nbytes=self._memory.nbytes,
            device="cpu",
            index=0,
            heartbeat=self.bounds.heartbeat,
        )

    def claimed(self, session: Session, claim: messages.Claim) -> None:
        """Grants or refuses a claim."""
        try:
            with self._lock:
                lease = self._find(from_u64(claim.lease), claim.generation)
                if lease.manifest.request_id != claim.request_id:
                    raise UnknownLease("the ticket's request is not this lease's")
                if claim.model != lease.manifest.model_digest:
                    raise ModelDiffers("the prefiller serves another model than the decoder")
                if not lease.sessions:
                    lease.readers = claim.readers
                if claim.readers != lease.readers or claim.reader >= lease.readers or claim.reader in lease.sessions:
                    raise LeaseTaken(f"reader {claim.reader} of {claim.readers} comes too late: another decoder has the lease")
                lease.sessions[claim.reader] = session
                lease.state = State.CLAIMED
                lease.deadline = time.monotonic() + self.bounds.lease
                session.grant(claim.sequence, lease)
                self._lock.notify_all()
        except HandoffError as error:
            self.counters.add("refused", error.clause)
            session.refuse(claim.sequence, error)
            return
        self.counters.add("claimed")
        self.observe("claimed", {"peer": session.peer})

    def taken(self, session: Session, number: int, generation: int, chunk: int) -> None:
        """A reader has a chunk's bytes; the slot is freed when all readers have."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.manifest.generation != generation:
                return
            readers = {reader for reader, holder in lease.sessions.items() if holder is session}
            if not readers or chunk not in lease.slots:
                return
            taken = lease.taken.setdefault(chunk, set())
            taken |= readers
            lease.deadline = time.monotonic() + self.bounds.lease
            if len(taken) >= lease.readers:
                self._pool.give_back(lease.slots.pop(chunk))
                self._lock.notify_all()
        self.observe("taken", {"chunk": chunk})

    def committed(self, session: Session, number: int, generation: int) -> None:
        """A reader has verified and landed everything."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.manifest.generation != generation:
                return
            readers = {reader for reader, holder in lease.sessions.items() if holder is session}
            lease.committed |= readers
            for _ in readers:
                session.released(lease)
            if len(lease.committed) >= lease.readers:
                self._end(lease, None)
        self.observe("committed", {"peer": session.peer})

    def abandoned(self, session: Session, number: int, generation: int, clause: str, detail: str) -> None:
        """A reader gave up: the lease fails for all."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.manifest.generation != generation or session not in lease.sessions.values():
                return
            self._end(lease, Refused(clause, detail, ""), told=session)

    def _find(self, number: int, generation: int) -> Lease:
        lease = self._leases.get(number)
        if lease is not None:
            if lease.manifest.generation != generation:
                raise StaleGeneration(f"the ticket is of generation {generation}, the lease of {lease.manifest.generation}")
            return lease
        ended = self._ended.get(number)
        if ended is not None and ended[0] == generation:
            raise ended[1]
        raise UnknownLease(f"no lease {number:016x} is open here")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer, "an unknown peer", self.bounds.silence)
        session: Session | None = None
        try:
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            channel.peer = self._pinned.name_of(certificate)
            if self._sessions >= _MAX_SESSIONS:
                raise ProtocolError(f"{_MAX_SESSIONS} control connections are open already")
            self._sessions += 1
            session = Session(self, channel)
            await session.serve()
        except HandoffError as error:
            if session is None:
                self.counters.add("refused", error.clause)
            self._drop(session, error)
        except asyncio.CancelledError:
            # The prefiller is closing; asyncio would log this as a failure of its own.
            pass
        finally:
            if session is not None:
                self._sessions -= 1
                self._drop(session, PeerLost(f"the connection to {channel.peer} ended"))
            await channel.close()

    def _drop(self, session: Session | None, error: HandoffError) -> None:
        """Fails every lease that a lost session still held."""
        with self._lock:
            for lease in [lease for lease in self._leases.values() if session in lease.sessions.values()]:
                self._end(lease, error, told=session)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL)
            now = time.monotonic()
            with self._lock:
                for lease in [lease for lease in self._leases.values() if lease.deadline < now]:
                    state = "claimed" if lease.state is State.CLAIMED else "not claimed"
                    self._end(lease, LeaseExpired(f"the lease of request {lease.manifest.request_id!r} ran out, {state}"))

    async def _stop_listening(self) -> None:
        self._server.close()
        # Lets revocations leave before the loop ends.
        await asyncio.sleep(0.05)

    # How every lease ends.

    def finish(self, lease: Lease, error: HandoffError | None) -> None:
        """Ends a lease, once, from any thread."""
        with self._lock:
            self._end(lease, error)

    def _end(self, lease: Lease, error: HandoffError | None, told: Session | None = None) -> None:
        """Frees everything of a live lease and tells its readers, except `told`. The lock is held."""
        if not lease.live:
            return
        lease.state = State.FAILED if error else State.COMMITTED
        lease.error = error
        number = lease.manifest.lease
        self._leases.pop(number, None)
        self._ended[number] = (lease.manifest.generation, error or UnknownLease("the lease was committed already"))
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        for extent in (*lease.reserved.values(), *lease.slots.values()):
            self._pool.give_back(extent)
        lease.reserved.clear()
        lease.slots.clear()
        if error is not None:
            self.counters.add("failed", error.clause)
            for session in set(lease.sessions.values()) - {told}:
                self._loop.loop.call_soon_threadsafe(session.revoke, lease, error)
        else:
            self.counters.add("committed")
        lease.sessions.clear()
        lease.finished.set()
        self._lock.notify_all()


def _with_tables(groups: tuple[CacheGroup, ...], table: BlockTable | Sequence[BlockTable]) -> tuple[CacheGroup, ...]:
    tables = [table] if isinstance(table, BlockTable) else list(table)
    if len(tables) != len(groups):
        raise PagesDoNotFit(f"{len(tables)} block tables were given for {len(groups)} KV groups")
    return tuple(replace(group, table=one) for group, one in zip(groups, tables, strict=True))


def _needed_tokens(manifest: Manifest, chunk: ChunkMap) -> int:
    """How many tokens must be computed before the chunk can be packed: its own; all, where it has a state."""
    kinds = [manifest.groups[manifest.layers[span.layer].group].kind for span in chunk.spans]
    if GroupKind.STATE in kinds:
        return token_end(manifest)
    return max((span.end_token for span in chunk.spans), default=0)


class Offer:
    """One offered request, as the engine sees it."""

    def __init__(self, prefiller: Prefiller, lease: Lease) -> None:
        self._prefiller, self._lease = prefiller, lease
        manifest = lease.manifest
        self.manifest, self.mode = manifest, lease.mode
        self.ticket = Ticket(prefiller.identity.name, manifest.request_id, manifest.lease, manifest.generation)

    def advance(self, computed_tokens: int, table: BlockTable | Sequence[BlockTable] | None = None) -> None:
        """Packs every chunk whose tokens are all below `computed_tokens`, and returns when their pages are no longer needed.

        table: the block table as it is now (with several KV groups, one of each), where it has grown or changed since the offer. In stream
        mode this waits for the decoder to take earlier chunks. Raises what ended the lease, if something did, and PagesDoNotFit where the
        table is too short.
        """
        self._prefiller.advance(self._lease, computed_tokens, table)

    async def advance_async(self, computed_tokens: int, table: BlockTable | Sequence[BlockTable] | None = None) -> None:
        """`advance` for engines that run on an event loop."""
        await asyncio.to_thread(self.advance, computed_tokens, table)

    def cancel(self, reason: str = "the prefiller's engine gave the request up") -> None:
        """Revokes the lease; nothing happens if it has ended."""
        self._prefiller.finish(self._lease, Cancelled(reason))

    def wait_claimed(self) -> None:
        """Waits until a decoder has claimed the payload, at most until the lease runs out. Raises what ended it before that."""
        self._prefiller.wait_claimed(self._lease)

    def wait(self, timeout: float) -> None:
        """Waits until every reader has committed. Raises what ended the lease otherwise, or HandoffTimeout (the lease lives on)."""
        if not self._lease.finished.wait(timeout):
            raise HandoffTimeout(f"request {self.manifest.request_id!r} was not taken within {timeout} s")
        if self._lease.error is not None:
            raise self._lease.error

    async def wait_async(self, timeout: float) -> None:
        """`wait` for engines that run on an event loop."""
        await asyncio.to_thread(self.wait, timeout)

    @property
    def packed(self) -> bool:
        """Whether every chunk is packed, so that the engine's pages are free."""
        return self._lease.next_chunk == self._lease.map.chunk_count

    @property
    def payload_bytes(self) -> int:
        return self._lease.map.payload_bytes

    @property
    def pack_seconds(self) -> float:
        """Time spent packing so far."""
        return self._lease.pack_seconds
