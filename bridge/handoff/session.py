"""The prefiller's side of one decoder's control connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from bridge.errors import KVBridgeError
from bridge.handoff import messages
from bridge.handoff.bounds import Bounds, Observer
from bridge.handoff.channel import Channel
from bridge.handoff.errors import HandoffError, ProtocolError
from bridge.handoff.messages import from_u64, u64

if TYPE_CHECKING:
    from bridge.handoff.lease import Lease
    from bridge.handoff.leases import Leases

MAX_UNSENT = 4096
"""Answers that may wait for a decoder that reads slowly; while there are as many, no more of its questions are read."""


class Session:
    """Serves one authenticated decoder until it goes away; whatever it still held is then freed.

    welcome: makes the greeting. It and `observe` are called on the loop's thread.
    """

    def __init__(
        self, channel: Channel, leases: Leases, welcome: Callable[[], messages.Welcome], bounds: Bounds, observe: Observer
    ) -> None:
        self._channel, self._leases, self._welcome, self._bounds, self._observe = channel, leases, welcome, bounds, observe
        self.peer, self.greeted = channel.peer, False
        self._outbox: asyncio.Queue[messages.Message] = asyncio.Queue()
        self._room = asyncio.Event()

    async def serve(self) -> None:
        """Greets, then handles messages. Raises PeerLost or ProtocolError when the connection ends, or what the greeting failed by."""
        hello = await self._channel.receive(self._bounds.connect)
        if not isinstance(hello, messages.Hello):
            raise ProtocolError(f"{self.peer} did not say hello first")
        self._observe("hello", {"peer": self.peer})
        try:
            welcome = self._welcome()
        except KVBridgeError as error:
            await self._channel.send(messages.Refusal(0, error.clause, error.detail[:1000], error.advice[:1000]))
            raise
        if hello.major != messages.PROTOCOL_MAJOR or hello.agent != welcome.agent:
            detail = (
                f"this prefiller speaks protocol {messages.PROTOCOL_MAJOR} over {welcome.agent}, "
                f"the decoder {hello.major} over {hello.agent}"
            )
            await self._channel.send(messages.Refusal(0, ProtocolError.clause, detail, "run the same version and transfer agent"))
            raise ProtocolError(detail)
        await self._channel.send(welcome)
        self.greeted = True
        alive = asyncio.create_task(self._channel.keep_alive(self._bounds.heartbeat))
        tasks = [alive, asyncio.create_task(self._receive()), asyncio.create_task(self._send_outbox())]
        try:
            done, _ = await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def post(self, message: messages.Message) -> None:
        """Queues a message, in order; from the loop's thread."""
        self._outbox.put_nowait(message)

    async def _send_outbox(self) -> None:
        while True:
            await self._channel.send(await self._outbox.get())
            self._room.set()

    async def _receive(self) -> None:
        while True:
            self._handle(await self._channel.receive(self._bounds.silence))
            while self._outbox.qsize() >= MAX_UNSENT:
                self._room.clear()
                await self._room.wait()

    def _handle(self, message: messages.Message) -> None:
        leases = self._leases
        if isinstance(message, messages.Claim):
            leases.claimed(self, message)
        elif isinstance(message, messages.Taken):
            leases.taken(self, from_u64(message.lease), message.generation, message.chunk)
        elif isinstance(message, messages.Commit):
            leases.committed(self, from_u64(message.lease), message.generation)
        elif isinstance(message, messages.Abandon):
            leases.abandoned(self, from_u64(message.lease), message.generation, message.clause, message.detail)
        elif not isinstance(message, messages.Ping):
            raise ProtocolError(f"{self.peer} sent {type(message).__name__}, which only a prefiller sends")

    def grant(self, sequence: int, lease: Lease) -> None:
        """Answers a claim with the manifest, its key and the chunks that are ready."""
        ready = [messages.Slot(chunk, extent.offset) for chunk, extent in sorted(lease.slots.items())]
        self.post(messages.Grant(sequence, lease.sealed, lease.key, ready))

    def refuse(self, sequence: int, error: HandoffError) -> None:
        """Answers a claim with the clause that it failed by."""
        self.post(messages.Refusal(sequence, error.clause, error.detail[:1000], error.advice[:1000]))

    def ready(self, lease: Lease, chunk: int, offset: int) -> None:
        """Tells that a chunk was packed."""
        manifest = lease.manifest
        self.post(messages.Ready(u64(manifest.lease), manifest.generation, messages.Slot(chunk, offset)))

    def revoke(self, lease: Lease, error: HandoffError) -> None:
        """Takes a lease back."""
        manifest = lease.manifest
        self.post(messages.Revoked(u64(manifest.lease), manifest.generation, error.clause, error.detail[:1000], error.advice[:1000]))

    def released(self, lease: Lease) -> None:
        """Confirms a commit."""
        self.post(messages.Released(u64(lease.manifest.lease), lease.manifest.generation))
