"""One control connection: length-prefixed messages over TLS, bounded in size and time."""

from __future__ import annotations

import asyncio
import contextlib

from bridge.handoff import messages
from bridge.handoff.errors import HandoffTimeout, PeerLost, ProtocolError

_PREFIX_BYTES = 4
_LOST = (OSError, EOFError)  # TLS's errors and asyncio's incomplete read among them


class Channel:
    """Messages to and from one authenticated peer. `peer` is its name in our configuration."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, send_timeout: float) -> None:
        self.peer = peer
        self._reader, self._writer = reader, writer
        self._send_timeout = send_timeout
        self._sending = asyncio.Lock()

    async def send(self, message: messages.Message) -> None:
        """Sends one message. Raises PeerLost when the peer is gone, HandoffTimeout when it does not read."""
        body = messages.encode(message)
        try:
            async with self._sending:
                if self._writer.is_closing():
                    raise PeerLost(f"the control channel to {self.peer} is closed")
                self._writer.write(len(body).to_bytes(_PREFIX_BYTES, "little") + body)
                async with asyncio.timeout(self._send_timeout):
                    await self._writer.drain()
        except TimeoutError:
            raise HandoffTimeout(f"{self.peer} did not read a control message within {self._send_timeout} s") from None
        except _LOST as error:
            raise PeerLost(f"the control channel to {self.peer} broke while sending: {str(error) or type(error).__name__}") from None

    async def receive(self, timeout: float) -> messages.Message:
        """The next message, whole within `timeout` seconds. Raises PeerLost (silence included) or ProtocolError."""
        try:
            async with asyncio.timeout(timeout):
                return await self._receive()
        except TimeoutError:
            raise PeerLost(f"{self.peer} was silent for {timeout} s") from None
        except asyncio.IncompleteReadError as error:
            raise PeerLost(f"{self.peer} closed the control channel{' in the middle of a message' if error.partial else ''}") from None
        except _LOST as error:
            raise PeerLost(f"{self.peer} closed the control channel: {str(error) or type(error).__name__}") from None

    async def _receive(self) -> messages.Message:
        prefix = await self._reader.readexactly(_PREFIX_BYTES)
        size = int.from_bytes(prefix, "little")
        if size > messages.MAX_MESSAGE_BYTES:
            raise ProtocolError(f"{self.peer} announces a control message of {size} bytes, the limit is {messages.MAX_MESSAGE_BYTES}")
        return messages.decode(await self._reader.readexactly(size))

    def ended(self) -> bool:
        """Whether the peer has ended the connection; a peer that is only silent has not."""
        return self._reader.at_eof() or self._reader.exception() is not None

    async def keep_alive(self, interval: float) -> None:
        """Sends Ping every `interval` seconds until the channel breaks."""
        with contextlib.suppress(PeerLost, HandoffTimeout):
            while True:
                await asyncio.sleep(interval)
                await self.send(messages.Ping())

    async def close(self) -> None:
        """Closes the connection, idempotent, without waiting for the peer."""
        with contextlib.suppress(*_LOST):
            self._writer.close()
            # A dead peer never answers TLS's closing message.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._writer.wait_closed()
        transport = self._writer.transport
        if transport is not None:
            transport.abort()
