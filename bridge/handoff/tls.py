"""asyncio's streams over TLS, reading into memory of their own.

asyncio asks for 256 KiB a read, of which a control message keeps some hundred bytes: between the pieces that stay, glibc's heap grew by 80
to 190 bytes a hand-off for as long as a decoder lived.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from bridge.handoff.messages import MAX_MESSAGE_BYTES

MAX_HANDSHAKES = 64
"""Connections of which nobody knows yet whose they are. Each lasts as long as a handshake may take."""

ENDED = "it went away before a handshake"
"""What a health check does, or a port scanner."""

_READ_BYTES = 16 << 10
"""What one TLS record holds at most."""
_BACKLOG = 128
_ACCEPT_AGAIN_SECONDS = 0.05
_NEXT_ADDRESS_SECONDS = 0.25
"""After so long a name's next address is tried beside the one that has not answered (RFC 8305)."""


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
        lambda: _Protocol(reader),
        host,
        port,
        ssl=context,
        ssl_handshake_timeout=handshake_seconds,
        happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS,
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class Server:
    """A listening port. Each handshake is a task of its own, of which there are so many at a time: other connections wait to be accepted.

    accept: serves one authenticated connection, from the client's address, which the connection may no longer know. refused: called with
    the client's address and the reason, where a handshake fails.
    """

    def __init__(
        self,
        accept: Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        context: ssl.SSLContext,
        handshake_seconds: float,
        refused: Callable[[str, str], None],
    ) -> None:
        self._accept, self._context, self._seconds, self._refused = accept, context, handshake_seconds, refused
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_HANDSHAKES)
        self.port = 0

    async def open(self, host: str, port: int) -> None:
        """Listens on every address of `host`, all with one port number (0: any free one). Raises OSError or OverflowError."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                try:
                    self._listen(socket.socket(family, kind, protocol), (address[0], self.port or port, *address[2:]))
                except OSError as error:
                    # A family that the host's name has and the host itself has not, such as IPv6 switched off.
                    if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) or len(found) == 1:
                        raise
            if not self._sockets:
                raise OSError(errno.EADDRNOTAVAIL, "none of its addresses is this host's")
        except OSError:
            self._close_sockets()
            raise
        for sock in self._sockets:
            self._keep(self._serve(sock))

    def _listen(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        self.port = sock.getsockname()[1]
        self._sockets.append(sock)

    async def close(self) -> None:
        """Accepts no more and ends what is shaking hands. Connections live on."""
        # First: a client that comes just now would be accepted for a task that is cancelled already, and stay open.
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        # Before the sockets: the loop still watches their descriptors, which may soon be others'.
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, listening: socket.socket) -> None:
        while True:
            await self._room.acquire()
            try:
                sock, address = await asyncio.get_running_loop().sock_accept(listening)
            except OSError:  # out of descriptors, or the client has gone again
                self._room.release()
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
            else:
                self._keep(self._shake_hands(sock, address[0]))

    async def _shake_hands(self, sock: socket.socket, address: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Protocol(asyncio.StreamReader(MAX_MESSAGE_BYTES), functools.partial(self._accept, address)),
                sock,
                ssl=self._context,
                ssl_handshake_timeout=self._seconds,
            )
        except ssl.SSLError as error:
            self._refused(address, getattr(error, "verify_message", "") or (error.reason or str(error)).replace("_", " ").lower())
        except OSError as error:
            self._refused(address, str(error) or ENDED)
        finally:
            self._room.release()
