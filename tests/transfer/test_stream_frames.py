"""The stream agent's frames: bounded before anything is allocated, and refused out of turn."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bridge.transfer.ranges import RANGE, inside
from bridge.transfer.stream import wire
from bridge.transfer.stream.wire import BadFrame, Kind


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_sizes_outside_the_limits(kind):
    low, high = wire.LIMITS[kind]
    for nbytes in (low, high):
        assert wire.parse_header(wire.header(kind, nbytes, 1), {kind}) == (kind, nbytes, 1)
    for nbytes in {low - 1, high + 1, (1 << 32) - 1} - {-1}:
        with pytest.raises(BadFrame):
            wire.parse_header(wire.header(kind, nbytes, 1), {kind})


def test_the_largest_frame_is_small():
    assert max(high for _, high in wire.LIMITS.values()) <= 256 << 10


def test_unknown_types_and_turns():
    for number in (0, 8, 255):
        with pytest.raises(BadFrame):
            wire.parse_header(wire.HEADER.pack(number, 0, 0, 0, 1), set(Kind))
    with pytest.raises(BadFrame):
        wire.parse_header(wire.header(Kind.CANCEL, 0, 1), wire.FROM_OWNER)
    with pytest.raises(BadFrame):
        wire.parse_header(wire.HEADER.pack(Kind.CANCEL, 1, 0, 0, 1), set(Kind))
    with pytest.raises(BadFrame):
        wire.parse_header(wire.HEADER.pack(Kind.CANCEL, 0, 1, 0, 1), set(Kind))


def test_greetings():
    body = wire.greeting(Kind.HELLO, bytes(range(16)))[wire.HEADER.size :]
    assert wire.parse_greeting(body) == bytes(range(16))
    with pytest.raises(BadFrame, match="no stream agent"):
        wire.parse_greeting(b"HTTP" + body[4:])
    with pytest.raises(BadFrame, match="version"):
        wire.parse_greeting(body[:4] + b"\x02" + body[5:])


def rows(*pairs):
    return np.array(list(pairs), RANGE)


@pytest.mark.parametrize(
    "bad",
    [(0, 0), (4096, 1), (4095, 2), (0, 4097), ((1 << 64) - 1, 1), (1, (1 << 64) - 1), ((1 << 64) - 8, 16), (1 << 63, 1 << 63)],
    ids=str,
)
def test_ranges_outside_a_region(bad):
    assert inside(rows((0, 4096), (4095, 1)), 4096)
    assert not inside(rows((0, 4096), bad), 4096)


def test_reads_survive_the_wire():
    region, parsed = wire.parse_read(wire.read_body(7, np.array([0, 9]), np.array([1, 2])))
    assert region == 7
    assert parsed.tolist() == [(0, 1), (9, 2)]
    with pytest.raises(BadFrame):
        wire.parse_read(bytes(8 + 17))


def test_random_headers_are_refused_or_bounded():
    source, refused = random.Random(3), 0
    for _ in range(20_000):
        try:
            kind, nbytes, _ = wire.parse_header(source.randbytes(wire.HEADER.size), set(Kind))
            assert wire.LIMITS[kind][0] <= nbytes <= wire.LIMITS[kind][1]
        except BadFrame:
            refused += 1
    assert refused > 19_000
