"""Control messages of the ucx agent, and the tags under which bytes travel.

A message: magic "KVBU", u32 bytes (little-endian), msgpack of one of the types below; 16 KiB at most. The bytes of range i of a request
travel as one UCX message with the tag data_tag(request, i), sent by the owner from its registered memory after a Verdict that accepts.
"""

from __future__ import annotations

import hmac
import struct

import msgspec
import numpy as np

from bridge.transfer.errors import TransferError
from bridge.transfer.ranges import RANGE

CONTROL_BYTES = 16 << 10
CONTROL_TAG = 1
EAGER_BYTES = 512
"""Messages of so many bytes or more are not sent before their receiver has asked (UCX's rendezvous). Below, any transport sends one piece.

A message sent unasked in several pieces, of which some had come when its endpoint was closed, is never completed by UCX (1.21, over TCP up
to several megabytes): its target would stay in quarantine for ever. It costs a round trip for what a transport sends in one piece anyway.
But a rendezvous also waits for a sender that may have gone, and control messages of all readers come to the same receives. So these stay
below, Hello excepted where a host's address is long.
"""
RANGES_PER_REQUEST = 24
SESSION_BYTES = 16

_HEAD = struct.Struct("<4sI")
_MAGIC = b"KVBU"
_DATA = 1 << 63
REQUESTS = 1 << 47


class BadMessage(TransferError):
    """A control message of the ucx agent that is malformed or too large."""

    clause = "bad_message"
    remedy = "compare the versions of both sides"


class Hello(msgspec.Struct, frozen=True, tag="h"):
    """From a reader. session: random; address: its own worker's; proof: as `prove` makes it.

    UCX ends the process that is given a malformed address (measured), so an address is believed only with proof that its sender holds the
    owner's metadata, which travels over the authenticated control channel.
    """

    session: bytes
    proof: bytes
    address: bytes


class Welcome(msgspec.Struct, frozen=True, tag="w"):
    """The answer; sentence: why not, or empty."""

    session: bytes
    sentence: str


class Read(msgspec.Struct, frozen=True, tag="r"):
    """rows: RANGE [n], 1 to RANGES_PER_REQUEST."""

    session: bytes
    request: int
    region: int
    rows: bytes


class Verdict(msgspec.Struct, frozen=True, tag="v"):
    """The answer to a Read, before its bytes. sentence: why not, or empty. A refused request's ranges are answered by empty messages."""

    session: bytes
    request: int
    sentence: str


class Bye(msgspec.Struct, frozen=True, tag="b"):
    """From a reader: it closes its endpoint, and takes nothing more."""

    session: bytes


Message = Hello | Welcome | Read | Verdict | Bye
_DECODER = msgspec.msgpack.Decoder(Message)


def prove(instance: bytes, session: bytes, address: bytes) -> bytes:
    """HMAC-SHA256 of session and address under the owner's instance, which only its metadata tells."""
    return hmac.digest(instance, session + address, "sha256")


def data_tag(request: int, index: int) -> int:
    """request: below 2^47; index: below 2^16."""
    return _DATA | request << 16 | index


def encode(message: Message) -> np.ndarray:
    """uint8 [n]. Raises BadMessage beyond CONTROL_BYTES."""
    body = msgspec.msgpack.encode(message)
    if len(body) > CONTROL_BYTES - _HEAD.size:
        raise BadMessage(f"a control message of {len(body)} bytes")
    return np.frombuffer(bytearray(_HEAD.pack(_MAGIC, len(body)) + body), np.uint8)


def decode(buffer: np.ndarray) -> Message:
    """buffer: uint8 [CONTROL_BYTES] that begins with one message. Raises BadMessage."""
    data = buffer.tobytes()
    magic, size = _HEAD.unpack_from(data)
    if magic != _MAGIC or size > len(data) - _HEAD.size:
        raise BadMessage("this is no message of a ucx agent of kvbridge")
    try:
        message = _DECODER.decode(data[_HEAD.size : _HEAD.size + size])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"a control message is not understood: {error}") from error
    if len(message.session) != SESSION_BYTES:
        raise BadMessage("a control message names no session")
    if isinstance(message, (Read, Verdict)) and not 0 <= message.request < REQUESTS:
        raise BadMessage(f"request {message.request} cannot be")
    return message


def read_rows(message: Read) -> np.ndarray:
    """RANGE [n]. Raises BadMessage."""
    size = len(message.rows)
    if not size or size % RANGE.itemsize or size > RANGE.itemsize * RANGES_PER_REQUEST or message.region < 0:
        raise BadMessage(f"a read of {size} bytes of ranges")
    return np.frombuffer(message.rows, RANGE)
