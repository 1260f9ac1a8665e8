"""The decoder's end of the hand-off: claims a ticket's payload, reads it chunk by chunk, verifies, lands, commits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.counters import Counters
from bridge.devices import Device, DeviceWithMemory, PlansLandings, engine_order
from bridge.errors import KVBridgeError
from bridge.handoff import messages, tls
from bridge.handoff.bounds import Bounds, Observer, ignore
from bridge.handoff.channel import Channel
from bridge.handoff.compatibility import check_chunks, check_fits, check_lossless, check_ticket
from bridge.handoff.errors import (
    BadBounds,
    Cancelled,
    CannotConnect,
    HandoffError,
    HandoffTimeout,
    PeerLost,
    PeerUnknown,
    ProtocolError,
    StagingDiffers,
    as_failure,
)
from bridge.handoff.identity import Identity, PeerConfig, PinnedPeers, client_context
from bridge.handoff.link import Claimed, Link, Receiving
from bridge.handoff.loop import Job, LoopThread, outlast
from bridge.handoff.move import Move, Resources, Wanted
from bridge.handoff.staging import Staging, StagingPool, Where
from bridge.handoff.ticket import Ticket
from bridge.pages import BlockTable, CacheGroup, PagedCache
from bridge.shares import as_groups, token_end
from bridge.transfer.agent import NOBODY, Agent
from bridge.transfer.errors import TransferTimeout
from bridge.wire import ContentKind, Manifest, PayloadMap, TagKeys, open_sealed

_LAST_COMMITS_SECONDS = 1.0
_SETTLE_INTERVAL = 0.1
_NAMED_PEERS = 8
_BUSY = "if that host is only busy, raise the bound `connect`"
_NO_CONTROL_PORT = "check that it is the control port and not the data port, and compare the versions of both sides"


@dataclass(frozen=True)
class Target:
    """Where a payload is to land, and what the decoder expects of it.

    cache, table: the decoder's own pages, of any block size, layout and element type; an engine with several KV groups gives those, each
    with its own block table, and None as the table. model_digest: as bridge.model.digest computes it.
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

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls back when it is done, or at once if it is: from any thread, so the callback must be quick and must not wait."""
        self._job.future.add_done_callback(lambda _: callback())

    def failure(self) -> BaseException | None:
        """What a hand-off that is done has failed by; None where it has committed."""
        return self._job.future.exception(0)

    def cancel(self) -> None:
        """Gives the hand-off up; it is done, and the pages are the engine's again, when `result` raises (Cancelled, as a rule)."""
        self._job.cancel()

    def result(self, timeout: float | None = None) -> Received:
        """Waits for the commit. Raises the typed failure, or HandoffTimeout when `timeout` seconds pass first (the fetch goes on)."""
        if not concurrent.futures.wait([self._job.future], timeout).done:
            raise HandoffTimeout(f"the hand-off did not finish within {timeout} s")
        return self._job.future.result()

    async def result_async(self) -> Received:
        """`result` for engines that run on an event loop. Cancelled, or out of time, it only waits no more: the fetch goes on."""
        return await asyncio.shield(self._on_loop())

    def _on_loop(self) -> asyncio.Future[Received]:
        """The hand-off as a future of the running loop, which must not be cancelled; its failure need not be asked for."""
        made = asyncio.wrap_future(self._job.future)
        # Or asyncio reports the failure of a fetch that nobody waits for any more as overlooked.
        made.add_done_callback(lambda done: done.cancelled() or done.exception())
        return made


class Decoder:
    """Fetches payloads. Any engine uses it in two lines:

        decoder = Decoder(identity, peers, device, agent, staging_bytes=1 << 28)
        received = decoder.fetch(ticket, Target(cache, table, model_digest))

    identity, peers: this host's certificate, and the prefillers with their addresses; a ticket can name no other. device: what lands.
    agent: what carries the bytes. staging_bytes: the budget for payloads that are arriving. staging: in which memory, "host", "device" or
    "auto": what the prefiller has. A device with memory that the agent can register then has that budget in its own memory and, from the
    first prefiller on that stages in host memory, once more in the host's.
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
        staging: Where = "auto",
        bounds: Bounds = Bounds(),
        chunks_in_flight: int = 2,
        observe: Observer = ignore,
    ) -> None:
        if chunks_in_flight < 1:
            raise BadBounds(f"{chunks_in_flight} chunks in flight bring nothing in", remedy="take at least one")
        self.identity, self.device, self.agent, self.bounds, self.observe = identity, device, agent, bounds, observe
        self.counters = Counters()
        self._peers = dict(peers)
        self._links: dict[tuple[str, int], Link] = {}
        self._connecting: dict[tuple[str, int], asyncio.Task[Link]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._committing: dict[tuple[int, int, int], asyncio.Task[None]] = {}
        self._pool = StagingPool(staging_bytes)
        self._staging = {opened.memory.device: opened for opened in [Staging.open(device, agent, self._pool, staging, NOBODY)]}
        self._may_add_host, self._opening = staging == "auto", threading.Lock()
        attach = device.attach if isinstance(device, DeviceWithMemory) else None
        self._landing = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="kvbridge-land", initializer=attach)
        self._resources = Resources(
            device=device,
            planner=device if isinstance(device, PlansLandings) else None,
            staging=next(iter(self._staging.values())),
            turn=asyncio.Lock(),
            landing=self._landing,
            depth=chunks_in_flight,
            bounds=bounds,
            counters=self.counters,
            observe=observe,
            alone=lambda: self._fetching == 1,
        )
        self._fetching = 0
        self._loop = LoopThread(f"kvbridge-decoder-{identity.name}")
        if attach is not None:
            self._loop.loop.call_soon_threadsafe(attach)
        self._loop.submit(self._settle())
        self._closed = False

    # What the engine calls.

    def start(self, ticket: Ticket, target: Target) -> Fetch:
        """Begins a hand-off and returns at once. The pages belong to it until it is done, `cancel` included.

        Nothing is written before what the calling thread has queued on the device by now is done.
        """
        if self._closed:
            raise Cancelled("this decoder is closed")
        return Fetch(self._loop.start(self._counted(ticket, target, engine_order(self.device))))

    def fetch(self, ticket: Ticket, target: Target) -> Received:
        """A whole hand-off: returns when every block was verified and landed; the prefiller is told of it afterwards.

        Raises a HandoffError, TransferError, WireError or DeviceError; then nothing may be used of what the pages hold, and everything
        that the hand-off held on either side is freed.
        """
        return self.start(ticket, target).result()

    async def fetch_async(self, ticket: Ticket, target: Target) -> Received:
        """`fetch` for engines that run on an event loop. Cancelled, it gives the hand-off up and ends when the pages are free again."""
        fetch = self.start(ticket, target)
        try:
            return await fetch.result_async()
        except asyncio.CancelledError:
            fetch.cancel()
            await outlast([fetch._on_loop()])
            raise

    def decline(self, ticket: Ticket, target_model: bytes, reason: str) -> None:
        """Lets the prefiller free a payload that this decoder will not fetch; best effort, returns at once."""
        if not self._closed:
            self._loop.submit(self._decline(ticket, target_model, reason))

    def staging(self) -> tuple[int, int]:
        """(bytes in use, budget) of the staging memory; quarantined bytes count as used."""
        pools = [staging.pool for staging in list(self._staging.values())]
        return sum(pool.used for pool in pools), sum(pool.capacity for pool in pools)

    def staged_in(self) -> list[str]:
        """The kinds of memory that payloads are staged in: "cpu", or a device type."""
        return list(self._staging)

    def quarantined(self) -> int:
        """Bytes under transfers that were given up and may still arrive."""
        return sum(staging.pool.quarantined for staging in list(self._staging.values()))

    def close(self) -> None:
        """Ends every hand-off and frees staging memory, registration and connections. Idempotent.

        Prefillers are first told of what has landed, for which they have a second.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(HandoffError, concurrent.futures.TimeoutError):
            self._loop.run(self._end_commits(), _LAST_COMMITS_SECONDS)
        self._loop.close()
        self._landing.shutdown(wait=True)
        with self._opening:  # nothing is opened after `_closed`
            opened = list(self._staging.values())
        for staging in opened:
            try:
                staging.registration.release()
            except TransferTimeout:
                # A peer that hangs but lives may still write: the agent keeps the memory until it is closed itself.
                self.counters.add("registration_kept", TransferTimeout.clause)

    # One hand-off, on the loop's thread.

    async def _counted(self, ticket: Ticket, target: Target, order: dict[str, Any]) -> Received:
        self.counters.add("fetches")
        self._fetching += 1
        try:
            received = await self._fetch(ticket, target, order)
        except (Exception, asyncio.CancelledError) as error:
            failure = as_failure(error)
            self.counters.add("failed", failure.clause)
            if failure is error:
                raise
            # That the engine gave it up has no cause to be looked at.
            raise failure from None if isinstance(error, asyncio.CancelledError) else error
        finally:
            self._fetching -= 1
        self.counters.add("committed")
        self.counters.add("received_bytes", amount=received.nbytes)
        return received

    async def _fetch(self, ticket: Ticket, target: Target, order: dict[str, Any]) -> Received:
        start = time.perf_counter()
        link = await self._link(ticket.peer, ticket.rank)
        self.observe("claiming", {"request_id": ticket.request_id})
        earlier = self._committing.get(_lease_at(link, ticket))
        if earlier is not None:
            await asyncio.wait([earlier])
        claimed, receiving = await link.claim(ticket, target.reader, target.readers, target.model_digest)
        try:
            move = await self._take(link, claimed, receiving, ticket, target, order)
        except BaseException:
            link.forget(ticket)
            raise
        # From here on the decoder has everything: whether the prefiller hears of it changes nothing for the request, which does not wait.
        name = _lease_at(link, ticket)
        task = self._committing[name] = asyncio.create_task(self._commit(link, receiving, ticket))

        def committed(done: asyncio.Task[None]) -> None:
            # Here and not in the task, which may be cancelled before its first step.
            self._committing.pop(name, None)
            link.forget(ticket)
            if done.cancelled():
                self.counters.add("commit_unconfirmed", Cancelled.clause)

        task.add_done_callback(committed)
        return Received(move.wanted.manifest, move.nbytes, time.perf_counter() - start, move.transfer_seconds, move.land_seconds)

    async def _commit(self, link: Link, receiving: Receiving, ticket: Ticket) -> None:
        """Tells the prefiller that everything has landed, and counts where it does not confirm."""
        await asyncio.sleep(0)  # who waits for the pages hears of them first
        try:
            await link.commit(ticket)
            self.observe("commit_sent", {})
            await receiving.wait_released(self.bounds.claim)
            self.observe("released", {})
        except HandoffError as error:
            self.counters.add("commit_unconfirmed", error.clause)

    async def _take(
        self, link: Link, claimed: Claimed, receiving: Receiving, ticket: Ticket, target: Target, order: dict[str, Any]
    ) -> Move:
        """Everything between the grant and the last landing; abandons the lease if it fails."""
        try:
            self.observe("granted", {"request_id": ticket.request_id})
            manifest = open_sealed(claimed.manifest, claimed.key)
            check_ticket(manifest, ticket)
            check_chunks(PayloadMap(manifest))
            end_token = token_end(manifest) if target.end_token is None else target.end_token
            groups = as_groups(target.cache, target.table)
            check_fits(manifest, groups, target.model_digest, target.first_token, end_token, target.content)
            if target.lossless:
                check_lossless(manifest, groups)
            keys = TagKeys(claimed.key, manifest.lease, manifest.generation)
            resources = replace(self._resources, staging=self._staging[link.memory.device])
            move = Move(resources, link, receiving, Wanted(ticket, manifest, keys, groups, target.first_token, end_token, order))
            await move.run()
        except BaseException as error:
            with contextlib.suppress(HandoffError):
                await link.abandon(ticket, error)
            raise
        return move

    async def _settle(self) -> None:
        """Frees quarantined memory without waiting for somebody who wants room."""
        while True:
            await asyncio.sleep(_SETTLE_INTERVAL)
            for staging in list(self._staging.values()):
                if staging.pool.quarantined:
                    # An agent that is busy answers late, and the loop has others to serve.
                    await asyncio.to_thread(staging.pool.settle)

    async def _end_commits(self) -> None:
        while self._committing:
            await asyncio.wait(list(self._committing.values()))

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
            known = ", ".join(sorted(known for known, peer in self._peers.items() if peer.host)[:_NAMED_PEERS]) or "none"
            raise PeerUnknown(f"no prefiller named {name!r} with an address is configured here (configured: {known})")
        if not 0 < peer.port + rank < 1 << 16:
            raise PeerUnknown(f"prefiller {name!r} has no rank {rank}: port {peer.port + rank} cannot be")
        while (link := self._links.get((name, rank))) is not None and link.lost is None:
            if link.endpoint.failure is None:
                return link
            del self._links[name, rank]  # a data port that has failed stays so: everything is connected anew
            self._keep(link.retire())
        connecting = self._connecting.get((name, rank))
        if connecting is None:
            connecting = self._connecting[name, rank] = asyncio.create_task(self._open(name, rank, peer))
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await asyncio.shield(connecting)
        except KVBridgeError as error:
            # All that waited for this attempt fail with it, and none of them waits for another.
            raise error.anew() from None

    async def _open(self, name: str, rank: int, peer: PeerConfig) -> Link:
        try:
            link = self._links[name, rank] = await self._connect(name, replace(peer, port=peer.port + rank))
        finally:
            del self._connecting[name, rank]
        self._keep(link.run())
        return link

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs it beside everything else, until it ends or the decoder is closed."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stage_for(self, name: str, device: str) -> None:
        """Sees to staging of the kind that a prefiller has: between a device's memory and the host's, transfers are slow (0.4 GB/s)."""
        with self._opening:
            if device == "cpu" and device not in self._staging and self._may_add_host and not self._closed:
                self._staging[device] = Staging.open(self.device, self.agent, StagingPool(self._pool.capacity), "host", NOBODY)
        if device not in self._staging:
            held = " and ".join(self._staging)
            raise StagingDiffers(f"prefiller {name!r} stages in {device} memory, this decoder in {held} memory")

    async def _connect(self, name: str, peer: PeerConfig) -> Link:
        self.observe("connecting", {"peer": name})
        at = f"prefiller {name!r} at {peer.host}:{peer.port}"
        try:
            async with asyncio.timeout(self.bounds.connect):
                reader, writer = await tls.connect(peer.host, peer.port, client_context(self.identity, peer), self.bounds.connect)
        except ssl.SSLCertVerificationError:
            raise CannotConnect(
                f"{at} showed another certificate than the one configured for it",
                remedy="copy its current .crt file here, or correct its address",
            ) from None
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: a name that is none, such as "a..b"
            if isinstance(error, TimeoutError) and not str(error):
                raise CannotConnect(
                    f"{at} does not answer within {self.bounds.connect} s", remedy=f"check its address and port; {_BUSY}"
                ) from None
            raise CannotConnect(f"{at}: {error}") from None
        channel = Channel(reader, writer, name, self.bounds.silence)
        try:
            try:
                shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            except ValueError:  # the handshake's last message was spoilt
                raise PeerLost(f"{at} ended the handshake") from None
            PinnedPeers({name: peer}).name_of(shown)
            await channel.send(messages.Hello(messages.PROTOCOL_MAJOR, messages.PROTOCOL_MINOR, self.agent.kind))
            welcome = await self._welcome(channel, at)
            await asyncio.to_thread(self._stage_for, name, welcome.device)
            endpoint = await asyncio.to_thread(self.agent.connect, welcome.agent_metadata)
        except PeerLost as error:
            ended = channel.ended()
            await channel.close()
            if not ended:
                raise CannotConnect(f"{at} does not greet: {error.detail}", remedy=_BUSY) from None
            raise CannotConnect(
                f"{at} ended the connection before its greeting",
                remedy="most likely this host's certificate is not among its peers, or is an old copy",
            ) from None
        except BaseException:
            await channel.close()
            raise
        self.observe("connected", {"peer": name})
        return Link(channel, welcome, endpoint, self.bounds)

    async def _welcome(self, channel: Channel, at: str) -> messages.Welcome:
        """The prefiller's greeting. Raises ProtocolError, PeerLost."""
        try:
            welcome = await channel.receive(self.bounds.connect)
        except ProtocolError as error:
            raise ProtocolError(f"{at} does not answer as a control port: {error.detail}", remedy=_NO_CONTROL_PORT) from None
        if isinstance(welcome, messages.Refusal):
            raise ProtocolError(f"{at} refused: {welcome.detail}", remedy=welcome.remedy)
        if not isinstance(welcome, messages.Welcome) or welcome.agent != self.agent.kind:
            raise ProtocolError(f"{at} does not answer as a control port", remedy=_NO_CONTROL_PORT)
        return welcome


def _lease_at(link: Link, ticket: Ticket) -> tuple[int, int, int]:
    return id(link), ticket.lease, ticket.generation
