"""Frames of the stream agent, inside TLS. Little-endian; every size is bounded before anything is allocated for it.

frame    u8 type, u8 zero, u16 zero, u32 body bytes, u64 request; then the body
HELLO    reader: magic "KVBS", u16 version, u16 zero, 16 bytes: the instance of the agent that it means to read
WELCOME  owner: the same body, with its own instance
READ     reader: u64 region, then 1 to 4096 pairs u64 offset, u64 nbytes
CANCEL   reader: no body; the owner stops within one DATA frame and answers CANCELLED unless all had been sent already
DATA     owner: 1 to 262,144 bytes of the request, in the order of its ranges
FAILED   owner: a UTF-8 sentence of at most 1000 bytes; the request is over (request 0: the connection is)
CANCELLED owner: no body; no byte of this request follows
"""

from __future__ import annotations

import enum
import struct

import numpy as np

from bridge.transfer.errors import TransferError
from bridge.transfer.ranges import RANGE

MAGIC = b"KVBS"
VERSION = 1
HEADER = struct.Struct("<BBHIQ")
GREETING = struct.Struct("<4sHH16s")
RANGES_PER_REQUEST = 4096
DATA_BYTES = 256 << 10
MAX_SENTENCE = 1000

_REGION_BYTES = 8


class Kind(enum.IntEnum):
    """Types of frames."""

    HELLO = 1
    WELCOME = 2
    READ = 3
    CANCEL = 4
    DATA = 5
    FAILED = 6
    CANCELLED = 7


LIMITS = {
    Kind.HELLO: (GREETING.size, GREETING.size),
    Kind.WELCOME: (GREETING.size, GREETING.size),
    Kind.READ: (_REGION_BYTES + RANGE.itemsize, _REGION_BYTES + RANGE.itemsize * RANGES_PER_REQUEST),
    Kind.CANCEL: (0, 0),
    Kind.DATA: (1, DATA_BYTES),
    Kind.FAILED: (0, MAX_SENTENCE),
    Kind.CANCELLED: (0, 0),
}
FROM_READER = {Kind.HELLO, Kind.READ, Kind.CANCEL}
FROM_OWNER = {Kind.WELCOME, Kind.DATA, Kind.FAILED, Kind.CANCELLED}


class BadFrame(TransferError):
    """A frame of the stream agent's data port that is malformed, too large, or out of turn."""

    clause = "bad_frame"
    remedy = "compare the versions of both sides"


def header(kind: Kind, nbytes: int, request: int) -> bytes:
    """The 16 bytes before a body of `nbytes` bytes."""
    return HEADER.pack(kind, 0, 0, nbytes, request)


def frame(kind: Kind, request: int, body: bytes = b"") -> bytes:
    """A whole frame."""
    return header(kind, len(body), request) + body


def parse_header(head: bytes, allowed: set[Kind]) -> tuple[Kind, int, int]:
    """(type, body bytes, request). Raises BadFrame."""
    number, zero, zeros, nbytes, request = HEADER.unpack(head)
    if zero or zeros or number not in Kind.__members__.values() or Kind(number) not in allowed:
        raise BadFrame(f"a frame of type {number} was not expected here")
    kind = Kind(number)
    low, high = LIMITS[kind]
    if not low <= nbytes <= high:
        raise BadFrame(f"a {kind.name} frame of {nbytes} bytes, outside {low} to {high}")
    return kind, nbytes, request


def greeting(kind: Kind, instance: bytes) -> bytes:
    """A HELLO or WELCOME frame."""
    return frame(kind, 0, GREETING.pack(MAGIC, VERSION, 0, instance))


def parse_greeting(body: bytes) -> bytes:
    """The instance in a greeting. Raises BadFrame."""
    magic, version, _, instance = GREETING.unpack(body)
    if magic != MAGIC:
        raise BadFrame("the other side is no stream agent of kvbridge")
    if version != VERSION:
        raise BadFrame(f"the other side speaks version {version} of the stream agent, this one {VERSION}", remedy="upgrade the older side")
    return bytes(instance)


def read_body(region: int, offsets: np.ndarray, nbytes: np.ndarray) -> bytes:
    """The body of a READ frame; offsets and nbytes: int64 [n]."""
    rows = np.empty(len(offsets), RANGE)
    rows["offset"], rows["nbytes"] = offsets, nbytes
    return region.to_bytes(_REGION_BYTES, "little") + rows.tobytes()


def parse_read(body: bytes) -> tuple[int, np.ndarray]:
    """(region, RANGE [n]) of a READ body, not yet compared with the region. Raises BadFrame."""
    if (len(body) - _REGION_BYTES) % RANGE.itemsize:
        raise BadFrame(f"a READ frame of {len(body)} bytes holds no whole ranges")
    return int.from_bytes(body[:_REGION_BYTES], "little"), np.frombuffer(body, RANGE, offset=_REGION_BYTES)
