"""The ucx agent's control messages: bounded, typed, and refused when they are not whole."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bridge.transfer.ranges import RANGE
from bridge.transfer.ucx import wire
from bridge.transfer.ucx.wire import BadMessage

SESSION = bytes(range(16))
ROWS = np.array([(0, 8), (8, 8)], RANGE).tobytes()
MESSAGES = [
    wire.Hello(SESSION, bytes(32), b"address" * 12),
    wire.Welcome(SESSION, ""),
    wire.Read(SESSION, 5, 1, ROWS),
    wire.Verdict(SESSION, 5, "no"),
    wire.Bye(SESSION),
]


def buffer(data: bytes) -> np.ndarray:
    padded = np.zeros(wire.CONTROL_BYTES, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return padded


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_survives_the_wire(message):
    assert wire.decode(buffer(wire.encode(message).tobytes())) == message


def test_messages_are_sent_unasked_so_that_none_waits_for_its_sender():
    """All but a Hello from a host whose address is long."""
    full = wire.Read(SESSION, wire.REQUESTS - 1, (1 << 63) - 1, bytes(wire.RANGE.itemsize * wire.RANGES_PER_REQUEST))
    said = "a range lies outside the registered memory, and more words than any sentence of the owner has, by far and by a margin"
    for message in (full, wire.Verdict(SESSION, wire.REQUESTS - 1, said), wire.Welcome(SESSION, said), wire.Bye(SESSION)):
        assert len(wire.encode(message)) < wire.EAGER_BYTES
    assert len(wire.encode(wire.Hello(SESSION, bytes(32), bytes(350)))) < wire.EAGER_BYTES
    with pytest.raises(BadMessage):
        wire.encode(wire.Hello(SESSION, bytes(32), bytes(wire.CONTROL_BYTES)))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_damage_of_length_or_head_is_refused(message):
    data = wire.encode(message).tobytes()
    for n in range(16):  # later cuts may leave another whole message, but UCX delivers whole ones
        with pytest.raises(BadMessage):
            wire.decode(buffer(data[:n]))
    for i in range(8 * 8):  # every bit of the head
        flipped = bytearray(data)
        flipped[i // 8] ^= 1 << i % 8
        with pytest.raises(BadMessage):
            wire.decode(buffer(bytes(flipped)))


def test_random_bytes_are_refused():
    source = random.Random(5)
    for _ in range(500):
        body = source.randbytes(source.randrange(200))
        with pytest.raises(BadMessage):
            wire.decode(buffer(body))
        with pytest.raises(BadMessage):
            wire.decode(buffer(b"KVBU" + len(body).to_bytes(4, "little") + body))


@pytest.mark.parametrize("size", [0, 8, 17, 16 * 1025])
def test_ranges_that_are_none(size):
    with pytest.raises(BadMessage):
        wire.read_rows(wire.Read(SESSION, 1, 1, bytes(size)))


def test_numbers_that_cannot_be():
    for message in (wire.Read(SESSION, wire.REQUESTS, 1, ROWS), wire.Read(SESSION, -1, 1, ROWS), wire.Bye(b"short")):
        with pytest.raises(BadMessage):
            wire.decode(buffer(wire.encode(message).tobytes()))
    with pytest.raises(BadMessage):
        wire.read_rows(wire.Read(SESSION, 1, -1, ROWS))


def test_tags_of_requests_differ():
    tags = {wire.data_tag(request, index) for request in (0, 1, wire.REQUESTS - 1) for index in (0, 1, 1023, 65535)}
    assert len(tags) == 12
    assert wire.CONTROL_TAG not in tags
    assert max(tags) < 1 << 64
