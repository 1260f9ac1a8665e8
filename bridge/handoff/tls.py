"""asyncio's streams over TLS, reading into memory of their own.

asyncio asks for 256 KiB a read, of which a control message keeps some hundred bytes: between the pieces that stay, glibc's heap grew by 80
to 190 bytes a hand-off for as long as a decoder lived.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from bridge.handoff.messages import MAX_MESSAGE_BYTES

_READ_BYTES = 16 << 10
"""What one TLS record holds at most."""


class _Protocol(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    def __init__(
        self, reader: asyncio.StreamReader, connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None
    ) -> None:
        super().__init__(reader, connected)
        self._into = memoryview(bytearray(_READ_BYTES))
        self._tls: Any = None  # an ssl.SSLObject

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tls = transport.get_extra_info("ssl_object")
        super().connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._into

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._into[:nbytes]))
        # At the end of a connection asyncio asks but once, and drops what is left.
        while nbytes == _READ_BYTES and self._tls is not None:
            try:
                nbytes = self._tls.read(_READ_BYTES, self._into)
            except ssl.SSLError:  # nothing is left, or it is damaged: asyncio meets that at its own next read
                return
            if nbytes:
                self.data_received(bytes(self._into[:nbytes]))


async def connect(
    host: str, port: int, context: ssl.SSLContext, handshake_seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As asyncio.open_connection. Raises OSError, ssl.SSLError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(MAX_MESSAGE_BYTES)
    transport, protocol = await loop.create_connection(
        lambda: _Protocol(reader), host, port, ssl=context, ssl_handshake_timeout=handshake_seconds
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def serve(
    accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    host: str,
    port: int,
    context: ssl.SSLContext,
    handshake_seconds: float,
    refused: Callable[[str], None],
) -> asyncio.Server:
    """As asyncio.start_server. refused: called with the reason where a handshake fails, of which asyncio tells nobody.

    Raises OSError or OverflowError.
    """

    class Watched(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                refused(getattr(error, "verify_message", "") or (error.reason or str(error)).replace("_", " ").lower())
                raise

    context.sslobject_class = Watched
    return await asyncio.get_running_loop().create_server(
        lambda: _Protocol(asyncio.StreamReader(MAX_MESSAGE_BYTES), accept), host, port, ssl=context, ssl_handshake_timeout=handshake_seconds
    )
