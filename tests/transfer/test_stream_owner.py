"""The serving side of the stream agent by itself: over a channel without a network, whose peer takes bytes when the test says so."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from bridge.transfer.stream import owner, wire
from bridge.transfer.stream.owner import OwnerConnection
from bridge.transfer.stream.wire import Kind
from tests.transfer.serving import MIB, content

INSTANCE = bytes(range(16))
HELLO = wire.greeting(Kind.HELLO, INSTANCE)


class Channel:
    """What TlsChannel is to its user. frames: what the peer says; it is gone when it has taken so many bytes of answers.

    patience: flushes of which it takes nothing before.
    """

    def __init__(self, frames, answers, patience=0):
        self.socket, self._other = socket.socketpair()
        self._frames, self._waiting, self._answers, self._patience = memoryview(frames), bytearray(), answers, patience
        self.taken, self.most, self.filled_while_full, self.sent = bytearray(), 0, 0, 0
        self._other.send(b"x")  # the socket can always be read

    @property
    def unsent(self):
        return len(self._waiting)

    def write(self, data):
        self._waiting += data
        self.most = max(self.most, len(self._waiting))

    def flush(self):
        self._patience -= 1
        if self._patience < 0:
            self.taken += self._waiting
            self.sent += len(self._waiting)
            self._waiting.clear()
        return not self._waiting

    def read_into(self, target):
        part, self._frames = self._frames[: len(target)], self._frames[len(target) :]
        target[: len(part)] = part
        return len(part)

    def fill(self):
        self.filled_while_full += self.unsent > owner._MAX_UNSENT
        if len(self.taken) >= self._answers:
            raise EOFError

    def close(self):
        self.socket.close()
        self._other.close()


class Region:
    number, guard = 1, None

    def __init__(self, data):
        self.data, self.nbytes = memoryview(data), len(data)

    def enter(self):
        return self.data[:]

    def leave(self):
        pass


def serve(channel, data):
    connection = OwnerConnection(channel, "reader", INSTANCE, lambda number: Region(data) if number == 1 else None, 60.0)
    try:
        with pytest.raises(EOFError):
            connection.serve()
    finally:
        channel.close()


def read(number, region, nbytes):
    return wire.frame(Kind.READ, number, wire.read_body(region, np.array([0]), np.array([nbytes])))


def answers(taken):
    """(type, request, body) of each frame."""
    at = 0
    while at < len(taken):
        kind, nbytes, number = wire.parse_header(bytes(taken[at : at + wire.HEADER.size]), wire.FROM_OWNER)
        at += wire.HEADER.size
        yield kind, number, bytes(taken[at : at + nbytes])
        at += nbytes


def test_refusals_that_a_peer_does_not_take_do_not_pile_up():
    """There was no end of them: 18 MiB in six seconds. What was not looked at meanwhile is answered when the peer has taken the others."""
    numbers = range(1, 40_001)
    refusal = wire.frame(Kind.FAILED, 1, b"these bytes are not registered")
    asked = HELLO + b"".join(read(number, 99, 8) for number in numbers)
    channel = Channel(asked, len(numbers) * len(refusal), patience=2000)
    serve(channel, content(4096, 3))
    assert owner._MAX_UNSENT < channel.most < owner._MAX_UNSENT + (256 << 10)
    assert not channel.filled_while_full, "what is not looked at must stay with the peer"
    assert [number for kind, number, _ in answers(channel.taken) if kind is Kind.FAILED] == list(numbers)


def test_the_reads_of_a_peer_take_turns():
    """A small one does not wait for a large one."""
    data = content(4 * MIB, 3)
    channel = Channel(HELLO + read(1, 1, 4 * MIB) + read(2, 1, MIB // 2), 4 * MIB + MIB // 2)
    serve(channel, data)
    frames = [(number, body) for kind, number, body in answers(channel.taken) if kind is Kind.DATA]
    turns = [number for number, _ in frames]
    assert turns[:4] in ([1, 2, 1, 2], [2, 1, 2, 1])
    for number, nbytes in ((1, 4 * MIB), (2, MIB // 2)):
        assert b"".join(body for asked, body in frames if asked == number) == data[:nbytes].tobytes()
