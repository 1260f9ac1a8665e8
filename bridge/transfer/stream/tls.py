"""TLS 1.3 on a socket that never blocks, through memory buffers: one system call moves many records, and no call waits for the peer."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time

from bridge.transfer.errors import TransferTimeout

SOCKET_BYTES = 512 << 10
"""What is taken from the socket at a time, and so a bound on what is held undecrypted (and a record)."""

LOST = (OSError, ssl.SSLError, EOFError)


class TlsChannel:
    """Used by one thread at a time. Takes the socket over."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        self.socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._buffer = memoryview(bytearray(SOCKET_BYTES))
        self._unsent = memoryview(b"")
        self.sent = 0
        """Bytes that the socket took so far."""
        self.received = 0

    @property
    def certificate(self) -> bytes | None:
        """The peer's, DER."""
        return self._tls.getpeercert(binary_form=True)

    @property
    def cipher(self) -> str:
        """Such as "TLSv1.3 TLS_AES_256_GCM_SHA384"."""
        name, version, _ = self._tls.cipher() or ("none", "none", 0)
        return f"{version} {name}"

    @property
    def unsent(self) -> int:
        """Bytes that wait for the socket."""
        return len(self._unsent) + self._outgoing.pending

    def handshake(self, deadline: float) -> None:
        """Raises TransferTimeout at `deadline` (time.monotonic), ssl.SSLError or OSError."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush_until(deadline)
                self.wait(deadline)
                self.fill()
        self._flush_until(deadline)

    def wait(self, deadline: float, *, write: bool = False) -> None:
        """Until the socket can be read (or written). Raises TransferTimeout."""
        poller = select.poll()
        poller.register(self.socket, select.POLLOUT if write else select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TransferTimeout("the peer did not answer in time")

    def _flush_until(self, deadline: float) -> None:
        while not self.flush():
            self.wait(deadline, write=True)

    def fill(self) -> None:
        """Takes what the socket holds, at most SOCKET_BYTES. Raises EOFError at the peer's end of the stream."""
        try:
            count = self.socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        if not count:
            raise EOFError("the peer closed the connection")
        self.received += count
        self._incoming.write(self._buffer[:count])

    def read_into(self, target: memoryview) -> int:
        """Decrypts into `target` at most one record's bytes; 0 when the next record is not here yet. Raises EOFError, ssl.SSLError."""
        try:
            count = self._tls.read(len(target), target)
        except ssl.SSLWantReadError:
            return 0
        if not count:
            raise EOFError("the peer closed the connection")
        return int(count)

    def read_many(self, target: memoryview) -> int:
        """As read_into, record after record until `target` is full or no record is left."""
        read, size, have = self._tls.read, len(target), 0
        try:
            while have < size:
                count = int(read(size - have, target[have:]))
                if not count:
                    raise EOFError("the peer closed the connection")
                have += count
        except ssl.SSLWantReadError:
            pass
        return have

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypts; nothing is sent before `flush`."""
        self._tls.write(data)

    def flush(self) -> bool:
        """Sends what the socket takes; whether all is sent."""
        while True:
            if not self._unsent:
                if not self._outgoing.pending:
                    return True
                self._unsent = memoryview(self._outgoing.read())
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                return False
            self._unsent = self._unsent[sent:]
            self.sent += sent

    def close(self) -> None:
        """Idempotent; the peer sees the end of the stream."""
        with contextlib.suppress(*LOST):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def keep_alive(sock: socket.socket) -> None:
    """A peer whose host vanished is noticed after 20 seconds, also where nothing is being sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
