"""The prefiller's end of the hand-off: packs requests into staging memory and serves them to decoders."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bridge.counters import Counters
from bridge.devices import Device, DeviceWithMemory
from bridge.handoff import messages
from bridge.handoff.bounds import Bounds, Observer, ignore
from bridge.handoff.compatibility import check_chunks
from bridge.handoff.errors import BadBounds, Cancelled, CannotListen
from bridge.handoff.identity import Identity, PeerConfig
from bridge.handoff.lease import Lease, Mode
from bridge.handoff.leases import Leases
from bridge.handoff.listener import Listener
from bridge.handoff.loop import LoopThread
from bridge.handoff.messages import u64
from bridge.handoff.offer import Offer
from bridge.handoff.packing import Packer
from bridge.handoff.staging import Staging, StagingPool, Where
from bridge.pages import BlockTable, CacheGroup, PagedCache
from bridge.shares import as_groups, check_held
from bridge.transfer.agent import Agent
from bridge.wire import Manifest, new_key, seal

_EXPIRY_INTERVAL = 0.1
_LISTENER_CLOSES_SECONDS = 5.0


class Prefiller:
    """Offers payloads and serves them. Any engine uses it in three lines:

        prefiller = Prefiller(identity, peers, device, agent, staging_bytes=1 << 30)
        offer = prefiller.offer(manifest, cache, table)     # then offer.advance(tokens) as the engine computes
        ticket = offer.ticket                               # for the router, for the decoder

    identity, peers: this host's certificate and the decoders that may connect. device: what packs. agent: what carries the bytes.
    staging_bytes: the budget for packed payloads, in memory of the kind that `staging` says: "host", "device", or "auto", which is the
    device's own memory where the agent can register it; decoders without such memory then cannot read here. host, port: of the control
    channel (port 0: any free one). Raises CannotListen, BadIdentity, StagingFull, DeviceError or RegistrationFailed. `close` frees memory,
    port and registration; it does not close the agent.
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
        host: str = "127.0.0.1",
        port: int = 0,
        bounds: Bounds = Bounds(),
        stream_depth: int = 4,
        observe: Observer = ignore,
    ) -> None:
        self.identity, self.device, self.agent, self.bounds, self.observe = identity, device, agent, bounds, observe
        self.counters = Counters()
        if stream_depth < 1:
            raise BadBounds(f"{stream_depth} chunks of a stream in staging memory hold nothing", remedy="take at least one")
        if not host:
            raise CannotListen("no address was given for the control port", remedy="give one; 0.0.0.0 is all of IPv4")
        self._closed = False
        self._pool = StagingPool(staging_bytes)
        self._leases = Leases(self._pool, self.counters, bounds, observe, self._tell)
        self._listener = Listener(identity, peers, self._leases, self._welcome, bounds, self.counters, observe)
        opened = Staging.open(device, agent, self._pool, staging, self._leases.grants)
        self._memory, self._registration = opened.memory, opened.registration
        self._packer = Packer(device, self._memory, self._pool, self._leases, bounds, self.counters, observe, stream_depth)
        self._loop = LoopThread(f"kvbridge-prefiller-{identity.name}")
        if isinstance(device, DeviceWithMemory):
            self._loop.loop.call_soon_threadsafe(device.attach)
        try:
            self.port: int = self._loop.run(self._listener.open(host, port), bounds.connect)
        except (OSError, OverflowError, ValueError) as error:  # ValueError: a name that is none, such as "a..b"
            self._loop.close()
            self._registration.release()
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or "its name was not resolved in time"
            raise CannotListen(f"control port {host}:{port} cannot be opened: {reason}") from None
        self._loop.submit(self._expire())
        observe("listening", {"port": self.port})

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
        Raises StagingFull, PagesDoNotFit, StaleGeneration where a later generation is on offer, or the WireError that the manifest breaks.
        """
        if self._closed:
            raise Cancelled("this prefiller is closed")
        number, generation = lease or self._leases.next_number(manifest.request_id)
        manifest = replace(manifest, lease=number, generation=generation)
        key = new_key()
        sealed = seal(manifest, key)
        made = Lease(manifest, sealed, key, mode, as_groups(cache, table), time.monotonic() + self.bounds.lease)
        check_chunks(made.map)
        check_held(manifest, made.groups)
        self._leases.revoke_earlier(made)
        self._packer.reserve(made)
        self._leases.add(made)
        self.counters.add("offered")
        self.observe("offered", {"request_id": manifest.request_id})
        return Offer(self.identity.name, self._packer, self._leases, made)

    def staging(self) -> tuple[int, int]:
        """(bytes in use, budget) of the staging memory."""
        return self._pool.used, self._pool.capacity

    def staged_in(self) -> list[str]:
        """The kinds of memory that payloads are staged in: "cpu", or a device type."""
        return [self._memory.device]

    def live_leases(self) -> int:
        """Payloads that are neither committed nor failed."""
        return self._leases.live()

    def close(self) -> None:
        """Revokes every lease and frees staging memory, registration and port. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._leases.close()
        try:
            with contextlib.suppress(TimeoutError):
                self._loop.run(self._listener.close(), timeout=_LISTENER_CLOSES_SECONDS)
        finally:
            self._loop.close()
            self._registration.release()

    def _welcome(self) -> messages.Welcome:
        """The greeting: how to read the staging memory."""
        return messages.Welcome(
            major=messages.PROTOCOL_MAJOR,
            minor=messages.PROTOCOL_MINOR,
            agent=self.agent.kind,
            agent_metadata=self.agent.metadata(),
            address=u64(self._memory.address),
            nbytes=self._memory.nbytes,
            device=self._memory.device,
            index=self._memory.index,
        )

    def _tell(self, tell: Callable[..., None], *arguments: object) -> None:
        self._loop.loop.call_soon_threadsafe(tell, *arguments)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL)
            self._leases.expire()
