"""The reading side of one connection: requests out, bytes straight into registered memory, in a thread of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.transfer.errors import PeerUnreachable, TransferError, no_thread, said
from bridge.transfer.stream import wire
from bridge.transfer.stream.tls import LOST, TlsChannel
from bridge.transfer.stream.wire import BadFrame, Kind
from bridge.transfer.waker import Waker

OUTSTANDING = 32
"""Requests that the owner has at a time; the rest of a long list of ranges waits here."""

_SCRATCH = memoryview(bytearray(64 << 10))  # bytes of cancelled reads, never looked at


class Landing:
    """Where a read's bytes go, and what became of it. Changed under the connection's lock."""

    def __init__(
        self, target: memoryview, region: int, pieces: list[np.ndarray], nbytes: int, ended: Callable[[Landing, bool, bool], None]
    ) -> None:
        """pieces: int64 [n, 3] of (byte of the region, byte of the target, bytes), one for each request; nbytes: of all.

        ended: called once as ended(landing, failed, given up), before `over` is true.
        """
        self.target, self.region, self.nbytes = target, region, nbytes
        self.waiting = deque(pieces)
        self.left = len(pieces)  # requests that are not complete
        self.complete = False
        self.given_up = False
        self.failure: str | None = None
        self._ended = ended

    @property
    def over(self) -> bool:
        return self.complete or self.given_up or self.failure is not None

    def end(self, *, failure: str | None = None, given_up: bool = False) -> None:
        """As complete, unless told otherwise."""
        self.waiting.clear()
        self._ended(self, failure is not None, given_up)
        self.failure, self.given_up, self.complete = failure, given_up, failure is None and not given_up


class _Request:
    """One READ under way: the next byte lands at `at` of range `index`."""

    def __init__(self, number: int, landing: Landing, table: np.ndarray) -> None:
        self.number, self.landing = number, landing
        self.local: list[int] = table[:, 1].tolist()
        self.nbytes: list[int] = table[:, 2].tolist()
        self.left = sum(self.nbytes)
        self.index = self.at = 0


class ReaderConnection:
    """An authenticated connection to one owner. Its thread ends with it; without a thread it raises RuntimeError.

    silence: seconds without a byte from an owner that has requests of ours; then the connection is failed.
    """

    def __init__(self, channel: TlsChannel, peer: str, silence: float) -> None:
        self.peer = peer
        self.cipher = channel.cipher
        self.address = channel.socket.getpeername()[:2]
        self.failure: str | None = None
        self.users = 0  # Peer objects, counted by the agent
        self._channel = channel
        self._silence = silence
        self._lock = threading.Lock()
        self._waker = Waker()
        self._numbers = itertools.count(1)
        self._queue: deque[Landing] = deque()
        self._requests: dict[int, _Request] = {}
        self._cancels: list[int] = []
        self._closing = False
        self._head = memoryview(bytearray(wire.HEADER.size))
        self._have = 0
        self._frame: tuple[Kind, int] | None = None
        self._left = 0
        self._text = bytearray()
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"kvbridge-stream-{peer}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._waker.close()
            raise

    # -- from any thread

    def start(self, landing: Landing) -> str | None:
        """Queues a read. Returns why it cannot, where the connection has failed."""
        with self._lock:
            if self.failure is not None:
                return self.failure
            self._queue.append(landing)
        self._waker.wake()
        return None

    def give_up(self, landing: Landing) -> None:
        """No byte lands after this has returned; the owner is told to send no more."""
        with self._lock:
            if landing.over:
                return
            landing.end(given_up=True)
            self._cancels += [number for number, request in self._requests.items() if request.landing is landing]
        self._waker.wake()

    def close(self) -> None:
        """Ends the connection, idempotent; reads under way fail. Waits for its thread, at most five seconds."""
        self._closing = True
        self._waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._fail("the connection was closed")

    # -- the connection's thread

    def _run(self) -> None:
        try:
            self._receive()  # what came with the greeting
            while not self._closing:
                self._send_requests()
                self._channel.flush()
                self._wait()
                self._receive()
            self._fail("the connection was closed")
        except TransferError as error:
            self._fail(error.detail)
        except LOST as error:
            self._fail(f"the peer is gone ({said(error)})")
        finally:
            self._fail("the connection ended")  # never leaves a read without an end
            self._channel.close()
            self._waker.close()

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._channel.socket, select.POLLIN | (select.POLLOUT if self._channel.unsent else 0))
        poller.register(self._waker, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(1000)}
        if self._waker.fileno() in ready:
            self._waker.clear()
        if self._channel.socket.fileno() in ready:
            self._channel.fill()
            self._heard = time.monotonic()
        elif self._requests and time.monotonic() - self._heard > self._silence:
            raise BadFrame(f"the peer was silent for {self._silence} s")

    def _send_requests(self) -> None:
        with self._lock:
            cancels, self._cancels = self._cancels, []
            fresh = []
            while self._queue and len(self._requests) < OUTSTANDING:
                landing = self._queue[0]
                if not landing.waiting:
                    self._queue.popleft()
                    continue
                table = landing.waiting.popleft()
                number = next(self._numbers)
                if not self._requests:
                    self._heard = time.monotonic()
                self._requests[number] = _Request(number, landing, table)
                fresh.append((number, landing.region, table))
        for number, region, table in fresh:
            body = wire.read_body(region, table[:, 0], table[:, 2])
            self._channel.write(wire.frame(Kind.READ, number, body))
        for number in cancels:
            self._channel.write(wire.frame(Kind.CANCEL, number))

    def _receive(self) -> None:
        """Everything that can be decrypted now."""
        channel = self._channel
        while True:
            if self._frame is None:
                count = channel.read_into(self._head[self._have :])
                if not count:
                    return
                self._have += count
                if self._have == len(self._head):
                    self._begin()
            elif self._frame[0] is Kind.DATA:
                if not self._land(self._requests[self._frame[1]]):
                    return
            else:
                count = channel.read_into(_SCRATCH[: self._left])
                if not count:
                    return
                self._text += _SCRATCH[:count]
                self._left -= count
                if not self._left:
                    self._finish_text()

    def _begin(self) -> None:
        self._have = 0
        kind, nbytes, number = wire.parse_header(bytes(self._head), wire.FROM_OWNER - {Kind.WELCOME})
        request = self._requests.get(number)
        if request is None and not (kind is Kind.FAILED and number == 0):
            raise BadFrame(f"the peer sent {kind.name} for a read that was not asked for")
        if kind is Kind.DATA and request is not None and nbytes > request.left:
            raise BadFrame("the peer sent more bytes than were asked for")
        self._frame, self._left = (kind, number), nbytes
        if not nbytes:
            self._finish_text()

    def _land(self, request: _Request) -> bool:
        """Decrypts the next bytes of a DATA frame to where they belong; False when none are here."""
        size = min(request.nbytes[request.index] - request.at, self._left)
        landing = request.landing
        with self._lock:  # so that nothing lands after give_up has returned
            if landing.over:
                count = self._channel.read_into(_SCRATCH[: min(size, len(_SCRATCH))])
            else:
                start = request.local[request.index] + request.at
                count = self._channel.read_many(landing.target[start : start + size])
        if not count:
            return False
        self._left -= count
        request.left -= count
        request.at += count
        if request.at == request.nbytes[request.index]:
            request.index, request.at = request.index + 1, 0
        if not self._left:
            self._frame = None
            if not request.left:
                self._forget(request)
        return True

    def _forget(self, request: _Request) -> None:
        landing = request.landing
        with self._lock:
            del self._requests[request.number]
            landing.left -= 1
            if not landing.left and not landing.over:
                landing.end()
        self._send_requests()

    def _finish_text(self) -> None:
        """A FAILED or CANCELLED frame is complete."""
        if self._frame is None:
            return
        (kind, number), self._frame = self._frame, None
        sentence, self._text = self._text.decode(errors="replace"), bytearray()
        if number == 0:
            raise BadFrame(f"the peer ends the connection: {sentence}")
        with self._lock:
            landing = self._requests.pop(number).landing
            if kind is Kind.CANCELLED and not landing.over:
                sentence = "the peer cancelled it"
            if not landing.over:
                landing.end(failure=sentence)
                self._cancels += [n for n, request in self._requests.items() if request.landing is landing]

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = reason
            landings = {id(r.landing): r.landing for r in self._requests.values()} | {id(queued): queued for queued in self._queue}
            self._requests.clear()
            self._queue.clear()
            for landing in landings.values():
                if not landing.over:
                    landing.end(failure=self.failure)


def open_connection(
    address: tuple[str, int],
    context: ssl.SSLContext,
    certificate: bytes,
    instance: bytes,
    peer: str,
    *,
    connect_seconds: float,
    silence: float,
) -> ReaderConnection:
    """Connects, authenticates, greets. Raises PeerUnreachable within `connect_seconds`, AgentUnavailable where no thread can be had."""
    deadline = time.monotonic() + connect_seconds
    sock: socket.socket | None = None
    channel: TlsChannel | None = None
    try:
        sock = _connect(address, deadline)
        channel = TlsChannel(sock, context, server_side=False)
        channel.handshake(deadline)
        if channel.certificate != certificate:
            raise PeerUnreachable(f"{peer} shows another certificate than the configured one")
        channel.write(wire.greeting(Kind.HELLO, instance))
        if wire.parse_greeting(_answer(channel, deadline)) != instance:
            raise PeerUnreachable(f"{peer} has been restarted", remedy="connect again, with its current metadata")
        return ReaderConnection(channel, peer, silence)
    except BaseException as error:
        for held in (channel, sock):
            if held is not None:
                with contextlib.suppress(OSError):
                    held.close()
        if isinstance(error, PeerUnreachable):
            raise
        if isinstance(error, TransferError):
            raise PeerUnreachable(f"{peer} at {address[0]}:{address[1]} does not answer: {error.detail}") from error
        if isinstance(error, RuntimeError):
            raise no_thread("a connection", error) from error
        if isinstance(error, (*LOST, ValueError)):  # ValueError: a name that is none, such as "a..b"
            raise PeerUnreachable(f"{peer} at {address[0]}:{address[1]} does not answer: {said(error)}") from error
        raise


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    """A TCP connection to the first of a name's addresses that answers; each has its share of the time. Raises OSError, UnicodeError."""
    failure: OSError = TimeoutError("time is up")
    found = _addresses(address, deadline)
    for tried, (family, kind, protocol, _, where) in enumerate(found):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left / (len(found) - tried))
            sock.connect(where)
            return sock
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failure = error
    raise failure


def _addresses(address: tuple[str, int], deadline: float) -> list[Any]:
    """As socket.getaddrinfo, which asks for as long as it likes where a name has to be looked up: so in a thread of its own."""
    host, port = address
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    found: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()

    def look() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=look, name="kvbridge-stream-name", daemon=True).start()
    try:
        return found.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise TimeoutError(f"the name {host!r} was not resolved in time") from None


def _answer(channel: TlsChannel, deadline: float) -> bytes:
    """The body of the owner's WELCOME. Raises PeerUnreachable with the owner's sentence where it refuses."""
    while not channel.flush():
        channel.wait(deadline, write=True)
    head = _exactly(channel, wire.HEADER.size, deadline)
    kind, nbytes, _ = wire.parse_header(head, {Kind.WELCOME, Kind.FAILED})
    body = _exactly(channel, nbytes, deadline)
    if kind is Kind.FAILED:
        raise PeerUnreachable(f"the peer refuses the connection: {body.decode(errors='replace')}")
    return body


def _exactly(channel: TlsChannel, nbytes: int, deadline: float) -> bytes:
    data = memoryview(bytearray(nbytes))
    have = 0
    while have < nbytes:
        count = channel.read_into(data[have:])
        have += count
        if not count:
            channel.wait(deadline)
            channel.fill()
    return bytes(data)
