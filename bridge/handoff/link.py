"""The decoder's side of one prefiller's control connection, and the endpoint that reads its staging memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from bridge.handoff import messages
from bridge.handoff.bounds import Bounds
from bridge.handoff.channel import Channel
from bridge.handoff.errors import AlreadyFetched, HandoffError, HandoffTimeout, PeerLost, ProtocolError, Refused, as_failure
from bridge.handoff.messages import from_u64, u64
from bridge.handoff.ticket import Ticket
from bridge.transfer.agent import Peer, RemoteMemory

_RETIRING_INTERVAL = 0.02


@dataclass(frozen=True)
class Claimed:
    """What a granted claim brings: the sealed manifest and its key."""

    manifest: bytes
    key: bytes


class Receiving:
    """What the prefiller says about one claimed lease. One fetch awaits it, from the loop's thread."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.error: HandoffError | None = None
        self.released = False
        self._changed = asyncio.Event()

    async def slot(self, chunk: int, timeout: float) -> int:
        """Byte of the prefiller's staging memory at which the chunk lies. Raises what ended the lease, or HandoffTimeout."""
        await self._wait(lambda: chunk in self.slots, timeout, f"chunk {chunk} was not packed")
        return self.slots[chunk]

    async def soon(self, chunk: int, seconds: float) -> bool:
        """Whether the chunk is packed within so many seconds. Raises what ended the lease."""
        with contextlib.suppress(HandoffTimeout):
            await self.slot(chunk, seconds)
        return chunk in self.slots

    async def wait_released(self, timeout: float) -> None:
        """Raises HandoffTimeout or what ended the lease unless the prefiller confirms the commit."""
        await self._wait(lambda: self.released, timeout, "the commit was not confirmed")

    async def wait_ended(self, timeout: float) -> None:
        """Raises what ended the lease if that becomes known within `timeout` seconds."""
        with contextlib.suppress(HandoffTimeout):
            await self._wait(lambda: False, timeout, "the lease did not end")

    async def _wait(self, ready: Callable[[], bool], timeout: float, what: str) -> None:
        try:
            async with asyncio.timeout(timeout):
                while not ready():
                    if self.error is not None:
                        raise self.error
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise HandoffTimeout(f"{what} within {timeout} s") from None

    def update(self, *, slot: messages.Slot | None = None, error: HandoffError | None = None, released: bool = False) -> None:
        """Takes over what a message says."""
        if slot is not None:
            self.slots[slot.chunk] = slot.offset
        if self.error is None:
            self.error = error
        self.released |= released
        self._changed.set()


class Link:
    """One connected prefiller. Made by `Decoder`, thrown away when the connection ends; the next fetch makes another."""

    def __init__(self, channel: Channel, welcome: messages.Welcome, endpoint: Peer, bounds: Bounds) -> None:
        self.channel, self.endpoint, self.bounds = channel, endpoint, bounds
        self.memory = RemoteMemory(from_u64(welcome.address), welcome.nbytes, welcome.device, welcome.index)
        self.lost: HandoffError | None = None
        self._sequence = itertools.count(1)
        self._claims: dict[int, asyncio.Future[messages.Grant]] = {}
        self._receiving: dict[tuple[int, int], Receiving] = {}

    async def run(self) -> None:
        """Handles messages until the connection ends, then fails whatever waits for it."""
        alive = asyncio.create_task(self.channel.keep_alive(self.bounds.heartbeat))
        try:
            while True:
                self._handle(await self.channel.receive(self.bounds.silence))
        except HandoffError as error:
            self.lost = error
        finally:
            alive.cancel()
            if self.lost is None:
                self.lost = PeerLost("this decoder is shutting down")
            for future in self._claims.values():
                if not future.done():
                    future.set_exception(self.lost)
            for receiving in self._receiving.values():
                receiving.update(error=self.lost)
            await self.channel.close()
            await asyncio.to_thread(self.endpoint.disconnect)

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, messages.Grant):
            future = self._claims.get(message.sequence)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, messages.Refusal):
            future = self._claims.get(message.sequence)
            if future is not None and not future.done():
                future.set_exception(Refused(message.clause, message.detail, message.remedy, self.channel.peer))
        elif isinstance(message, messages.Ready):
            receiving = self._receiving.get((from_u64(message.lease), message.generation))
            if receiving is not None:
                receiving.update(slot=message.slot)
        elif isinstance(message, messages.Released):
            receiving = self._receiving.get((from_u64(message.lease), message.generation))
            if receiving is not None:
                receiving.update(released=True)
        elif isinstance(message, messages.Revoked):
            receiving = self._receiving.get((from_u64(message.lease), message.generation))
            if receiving is not None:
                receiving.update(error=Refused(message.clause, message.detail, message.remedy, self.channel.peer))
        elif not isinstance(message, messages.Ping):
            raise ProtocolError(f"{self.channel.peer} sent {type(message).__name__}, which only a decoder sends")

    async def claim(self, ticket: Ticket, reader: int, readers: int, model_digest: bytes) -> tuple[Claimed, Receiving]:
        """Claims a lease. Raises Refused with the prefiller's clause, HandoffTimeout or PeerLost."""
        if self.lost is not None:
            raise self.lost
        lease = (ticket.lease, ticket.generation)
        if lease in self._receiving:
            raise AlreadyFetched(f"request {ticket.request_id!r} is being fetched already")
        sequence = next(self._sequence) % 2**32
        future: asyncio.Future[messages.Grant] = asyncio.get_running_loop().create_future()
        # Where sending the claim fails first, nobody asks for what the lost connection left here.
        future.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        receiving = Receiving()
        self._claims[sequence] = future
        self._receiving[lease] = receiving
        claim = messages.Claim(sequence, ticket.request_id, u64(ticket.lease), ticket.generation, reader, readers, model_digest)
        try:
            await self.channel.send(claim)
            async with asyncio.timeout(self.bounds.claim):
                grant = await future
        except Refused:
            self.forget(ticket)
            raise
        except BaseException as error:
            self.forget(ticket)
            timeout = HandoffTimeout(f"{self.channel.peer} did not answer a claim within {self.bounds.claim} s")
            failure = timeout if isinstance(error, TimeoutError) else error
            # The grant may be on its way: the prefiller must not keep the payload for a reader that has gone.
            with contextlib.suppress(HandoffError):
                await self.abandon(ticket, failure)
            raise failure from None
        finally:
            del self._claims[sequence]
        for slot in grant.ready:
            receiving.update(slot=slot)
        return Claimed(grant.manifest, grant.key), receiving

    def forget(self, ticket: Ticket) -> None:
        """Ignores what the prefiller may still say about this lease."""
        self._receiving.pop((ticket.lease, ticket.generation), None)

    async def retire(self) -> None:
        """Closes the connection when no hand-off needs it any more, at the latest after `claim` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.bounds.claim):
                while self._receiving and self.lost is None:
                    await asyncio.sleep(_RETIRING_INTERVAL)
        await self.channel.close()

    async def taken(self, ticket: Ticket, chunk: int) -> None:
        """Tells that a chunk's bytes have arrived."""
        await self.channel.send(messages.Taken(u64(ticket.lease), ticket.generation, chunk))

    async def commit(self, ticket: Ticket) -> None:
        """Tells that everything was verified and landed."""
        await self.channel.send(messages.Commit(u64(ticket.lease), ticket.generation))

    async def abandon(self, ticket: Ticket, error: BaseException) -> None:
        """Tells that this decoder gives up, and why."""
        failure = as_failure(error)
        await self.channel.send(messages.Abandon(u64(ticket.lease), ticket.generation, failure.clause, failure.detail[:1000]))
