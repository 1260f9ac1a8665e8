"""Bytes that nest deeper than Python may go: a few kilobytes in a field that nobody knows."""

import hashlib

import msgspec
import numpy as np
import pytest

from bridge.transfer import described
from bridge.transfer.errors import PeerUnreachable
from bridge.transfer.ucx import wire

DEEP = b"\x91" * 7_000 + b"\xc0"


def test_metadata_that_nests_deeply():
    whole = described.encode(described.Described("ucx", "owner", bytes(16), b"address", []))
    array = whole[6 + 32 :]
    body = bytes([array[0] + 1]) + array[1:] + DEEP  # one element more
    with pytest.raises(PeerUnreachable, match="not understood"):
        described.decode(whole[:6] + hashlib.sha256(body).digest() + body, "ucx")


@pytest.mark.parametrize("tag", ["h", "w", "r", "v", "b"])
def test_a_control_message_that_nests_deeply(tag):
    body = msgspec.msgpack.encode({"type": tag, "session": bytes(16), "unknown": msgspec.Raw(DEEP)})
    head = wire.encode(wire.Bye(bytes(16))).tobytes()[: wire._HEAD.size]
    magic, _ = wire._HEAD.unpack(head)
    data = wire._HEAD.pack(magic, len(body)) + body
    with pytest.raises(wire.BadMessage, match="not understood"):
        wire.decode(np.frombuffer(data.ljust(wire.CONTROL_BYTES, b"\0"), np.uint8))
