"""The serving side: authenticated peers read what is registered at that moment, and nothing else."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from bridge.errors import KVBridgeError
from bridge.transfer.agent import Guard
from bridge.transfer.errors import TransferError
from bridge.transfer.ranges import inside
from bridge.transfer.stream import wire
from bridge.transfer.stream.reader import OUTSTANDING
from bridge.transfer.stream.tls import LOST, TlsChannel
from bridge.transfer.stream.wire import BadFrame, Kind
from bridge.transfer.waker import Waker

MAX_CONNECTIONS = 256
MAX_OF_ONE = 64
"""Connections of one peer: each process of it has one, and those that it has left behind end after `silence`."""
MAX_HANDSHAKES = 32
"""Connections that have not yet shown a configured certificate."""

_UNSENT_BYTES = wire.DATA_BYTES
_MAX_UNSENT = 1 << 20
"""Of answers that the peer has not taken: beyond, nothing more of what it says is looked at."""
_COPY_BELOW = 8 << 10  # smaller pieces are joined first: each write makes a TLS record of its own
_WINDOW = 64
_REQUESTS = 2 * OUTSTANDING  # those cancelled by the reader may overlap with new ones


class Served(Protocol):
    """Registered memory as the serving side sees it."""

    number: int
    nbytes: int
    guard: Guard | None

    def enter(self) -> memoryview | None:
        """The bytes, valid until `leave`; None where it was released. Then there is no `leave`."""
        ...

    def leave(self) -> None: ...


Find = Callable[[int], Served | None]


class _Sending:
    """A READ that is being answered. Its ranges stay as they came, 16 bytes each: as Python's numbers thousands would take megabytes."""

    def __init__(self, number: int, region: Served, rows: np.ndarray) -> None:
        self.number, self.region = number, region
        self.left = int(rows["nbytes"].sum())
        self._rows = rows
        self._first, self._window = 0, rows[:_WINDOW].tolist()
        self.index = self.at = 0

    def _range(self) -> tuple[int, int]:
        """(byte of the region, bytes) of the range whose turn it is."""
        if self.index - self._first >= len(self._window):
            self._first, self._window = self.index, self._rows[self.index : self.index + _WINDOW].tolist()
        offset, nbytes = self._window[self.index - self._first]
        return offset, nbytes

    def pieces(self, budget: int) -> list[tuple[int, int]]:
        """The next (byte of the region, bytes), `budget` bytes together or whatever is left; moves on."""
        found = []
        while budget and self.index < len(self._rows):
            offset, nbytes = self._range()
            size = min(budget, nbytes - self.at)
            found.append((offset + self.at, size))
            budget -= size
            self.left -= size
            self.at += size
            if self.at == nbytes:
                self.index, self.at = self.index + 1, 0
        return found


class OwnerConnection:
    """Serves one reader in the thread that calls `serve`. reader: its name in our configuration."""

    def __init__(self, channel: TlsChannel, reader: str, instance: bytes, find: Find, silence: float) -> None:
        self._channel, self._reader, self._instance, self._find, self._silence = channel, reader, instance, find, silence
        self._waker = Waker()
        self._stopping = False
        self._greeted = False
        self._received = bytearray()
        self._sending: deque[_Sending] = deque()
        self.reader, self.refused = reader, 0

    def stop(self) -> None:
        """Ends `serve` soon, from any thread."""
        self._stopping = True
        self._waker.wake()

    def serve(self) -> None:
        """Until the peer goes away, misbehaves, or `stop`. Raises BadFrame or one of LOST."""
        scratch = memoryview(bytearray(64 << 10))
        whole = moved = time.monotonic()  # when no frame of the peer was unfinished; when it last took bytes
        sent = 0
        try:
            while not self._stopping:
                if self._sending and not self._channel.unsent:
                    self._send_some()
                # before the wait, since the peer's first frame may have come with the end of its handshake
                while not (full := self._channel.unsent > _MAX_UNSENT) and (count := self._channel.read_into(scratch)):
                    self._received += scratch[:count]
                    self._parse()
                self._channel.flush()
                if self._poll(full):
                    self._channel.fill()
                now = time.monotonic()
                if full or (self._greeted and not self._received):
                    whole = now
                if not self._channel.unsent or self._channel.sent != sent:
                    moved, sent = now, self._channel.sent
                if now - min(whole, moved) > self._silence:
                    raise BadFrame(f"the peer has neither finished its frame nor taken a byte for {self._silence} s")
        except BadFrame as error:
            with contextlib.suppress(*LOST):
                self._channel.write(wire.frame(Kind.FAILED, 0, error.detail.encode()[: wire.MAX_SENTENCE]))
                self._channel.flush()
            raise
        finally:
            self._waker.close()

    def _poll(self, full: bool) -> bool:
        """Waits until something can be done; whether there is something to receive. full: what came before has to be looked at first."""
        poller = select.poll()
        unsent = self._channel.unsent
        poller.register(self._channel.socket, (0 if full else select.POLLIN) | (select.POLLOUT if unsent else 0))
        poller.register(self._waker, select.POLLIN)
        events = dict(poller.poll(1000 if unsent or not (full or self._sending) else 0))
        return bool(events.get(self._channel.socket.fileno(), 0) & ~select.POLLOUT)

    def _parse(self) -> None:
        """Handles the whole frames in what was received; what is left is less than one frame."""
        size = wire.HEADER.size
        while len(self._received) >= size:
            allowed = wire.FROM_READER - {Kind.HELLO} if self._greeted else {Kind.HELLO}
            kind, nbytes, number = wire.parse_header(bytes(self._received[:size]), allowed)
            if len(self._received) < size + nbytes:
                return
            body = bytes(self._received[size : size + nbytes])
            del self._received[: size + nbytes]
            if kind is Kind.HELLO:
                if wire.parse_greeting(body) != self._instance:
                    raise BadFrame("this agent was restarted; ask for its current metadata")
                self._greeted = True
                self._channel.write(wire.greeting(Kind.WELCOME, self._instance))
            elif kind is Kind.READ:
                self._read(number, body)
            else:
                self._cancel(number)

    def _read(self, number: int, body: bytes) -> None:
        if number == 0 or any(sending.number == number for sending in self._sending):
            raise BadFrame(f"request {number} cannot be")
        if len(self._sending) >= _REQUESTS:
            raise BadFrame(f"more than {_REQUESTS} requests at a time")
        region_number, rows = wire.parse_read(body)
        region = self._find(region_number)
        if region is None:
            self._refuse(number, "these bytes are not registered")
        elif not inside(rows, region.nbytes):
            self._refuse(number, "a range lies outside the registered memory")
        else:
            self._sending.append(_Sending(number, region, rows))

    def _refuse(self, number: int, sentence: str) -> None:
        self.refused += 1
        self._channel.write(wire.frame(Kind.FAILED, number, sentence.encode()))

    def _cancel(self, number: int) -> None:
        for sending in self._sending:
            if sending.number == number:
                self._sending.remove(sending)
                self._channel.write(wire.frame(Kind.CANCELLED, number))
                return

    def _send_some(self) -> None:
        """One DATA frame of the request whose turn it is; the requests of a peer take turns."""
        sending = self._sending.popleft()
        pieces = sending.pieces(min(sending.left, _UNSENT_BYTES))
        guard = sending.region.guard
        entered = guard.enter(self._reader, pieces) if guard is not None else None
        if guard is not None and entered is None:
            self._refuse(sending.number, "these bytes are not this reader's, or are no longer")
            return
        view = sending.region.enter()
        try:
            if view is None:
                self._refuse(sending.number, "the memory was released while it was being read")
                return
            total = sum(size for _, size in pieces)
            small = bytearray(wire.header(Kind.DATA, total, sending.number))
            for offset, size in pieces:
                if size < _COPY_BELOW:
                    small += view[offset : offset + size]
                if len(small) >= _COPY_BELOW or (size >= _COPY_BELOW and small):
                    self._channel.write(small)
                    small = bytearray()
                if size >= _COPY_BELOW:
                    self._channel.write(view[offset : offset + size])
            if small:
                self._channel.write(small)
        finally:
            if view is not None:
                view.release()
                sending.region.leave()
            if guard is not None:
                guard.leave(entered)
        if sending.left:
            self._sending.append(sending)


class Listener:
    """Accepts peers on one port; each is served by a thread of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext,
        authenticate: Callable[[bytes | None], str],
        instance: bytes,
        find: Find,
        *,
        connect_seconds: float,
        silence: float,
    ) -> None:
        """authenticate: the peer's name by its DER certificate, or raises KVBridgeError. Raises OSError, RuntimeError without a thread."""
        self._context, self._authenticate, self._instance, self._find = context, authenticate, instance, find
        self._connect_seconds, self._silence = connect_seconds, silence
        self._lock = threading.Lock()
        self._closing = False
        self._shaking: dict[socket.socket, threading.Thread] = {}
        self._open: dict[OwnerConnection, threading.Thread] = {}
        self.refused = 0
        """Connections that were turned away: no configured certificate, too many, malformed, or no thread to serve them."""
        self._refused_reads = 0  # of connections that have ended
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="kvbridge-stream-accept", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._socket.close()
            raise

    def connections(self) -> int:
        """How many authenticated readers are being served."""
        with self._lock:
            return len(self._open)

    def refused_reads(self) -> int:
        """Reads of memory that is not registered, or not that reader's."""
        with self._lock:
            return self._refused_reads + sum(connection.refused for connection in self._open)

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.05)  # out of descriptors, say
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="kvbridge-stream-serve", daemon=True)
            with self._lock:
                taken = len(self._shaking) < MAX_HANDSHAKES and len(self._open) < MAX_CONNECTIONS and not self._closing
                if taken:
                    try:
                        thread.start()  # under the lock: `close` joins whatever it finds
                        self._shaking[sock] = thread
                    except RuntimeError:  # no more threads: this peer is turned away, the next may be luckier
                        taken = False
                self.refused += not taken
            if not taken:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        channel, connection = None, None
        try:
            channel = TlsChannel(sock, self._context, server_side=True)
            channel.handshake(time.monotonic() + self._connect_seconds)
            reader = self._authenticate(channel.certificate)
            connection = OwnerConnection(channel, reader, self._instance, self._find, self._silence)
            with self._lock:
                del self._shaking[sock]
                if self._closing:
                    return
                if sum(other.reader == reader for other in self._open) >= MAX_OF_ONE:
                    raise BadFrame(f"{reader} has {MAX_OF_ONE} connections already")
                self._open[connection] = threading.current_thread()
            connection.serve()
        except (KVBridgeError, *LOST) as error:
            if connection is None or isinstance(error, TransferError):
                with self._lock:
                    self.refused += 1
        finally:
            with self._lock:
                self._shaking.pop(sock, None)
                if connection is not None and self._open.pop(connection, None) is not None:
                    self._refused_reads += connection.refused
            if channel is not None:
                channel.close()
            else:
                sock.close()

    def close(self) -> None:
        """Ends every connection, idempotent. Waits for their threads, at most five seconds."""
        with self._lock:
            self._closing = True
            serving, shaking = dict(self._open), dict(self._shaking)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._socket.close()
        for sock in shaking:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for connection in serving:
            connection.stop()
        deadline = time.monotonic() + 5.0
        for thread in (*serving.values(), *shaking.values(), self._thread):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
