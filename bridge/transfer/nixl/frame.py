"""An agent's metadata on the control channel: NIXL's blob in a frame that tells damage, since NIXL accepts many damaged blobs."""

from __future__ import annotations

import hashlib
import re
import struct

from bridge.transfer.agent import MAX_METADATA_BYTES
from bridge.transfer.errors import PeerUnreachable, RegistrationFailed
from bridge.transfer.names import MAX_NAME_BYTES

# magic, version, length of the name, length of NIXL's blob, native name, SHA-256 of all the rest
_FRAME = struct.Struct("<4sHHI16s32s")
_MAGIC = b"KVBN"
_VERSION = 1


def _digest(head: bytes, name: bytes, blob: bytes) -> bytes:
    return hashlib.sha256(head + name + blob).digest()


def frame_metadata(name: str, native: str, blob: bytes) -> bytes:
    """NIXL's metadata with the agent's name and a SHA-256 of everything, because NIXL accepts many damaged blobs."""
    encoded = name.encode()
    head = struct.pack("<4sHHI16s", _MAGIC, _VERSION, len(encoded), len(blob), native.encode())
    frame = head + _digest(head, encoded, blob) + encoded + blob
    if len(frame) > MAX_METADATA_BYTES:
        raise RegistrationFailed(
            f"the agent's metadata takes {len(frame)} bytes and peers accept {MAX_METADATA_BYTES}", remedy="register fewer, larger memories"
        )
    return frame


def parse_metadata(frame: bytes) -> tuple[str, str, bytes]:
    """(name, native name, NIXL's blob) of a frame. Raises PeerUnreachable for anything that is not whole."""
    if not isinstance(frame, (bytes, bytearray, memoryview)):
        raise PeerUnreachable("the peer's metadata is not bytes")
    if len(frame) > MAX_METADATA_BYTES:
        raise PeerUnreachable(f"the peer's metadata has {len(frame)} bytes, more than {MAX_METADATA_BYTES}")
    frame = bytes(frame)
    if len(frame) < _FRAME.size:
        raise PeerUnreachable("the peer's metadata is empty" if not frame else "the peer's metadata is cut off")
    magic, version, name_bytes, blob_bytes, native, digest = _FRAME.unpack_from(frame)
    if magic != _MAGIC:
        raise PeerUnreachable("the peer's metadata is not that of a NIXL agent of kvbridge", remedy="use the same agent on both ends")
    if version != _VERSION:
        raise PeerUnreachable(f"the peer's metadata has version {version} and this side reads {_VERSION}", remedy="upgrade the older side")
    name, blob = frame[_FRAME.size : _FRAME.size + name_bytes], frame[_FRAME.size + name_bytes :]
    if len(name) != name_bytes or len(blob) != blob_bytes or not blob or not 0 < name_bytes <= MAX_NAME_BYTES:
        raise PeerUnreachable("the peer's metadata has other lengths than it states")
    if digest != _digest(frame[: _FRAME.size - 32], name, blob):
        raise PeerUnreachable("the peer's metadata is damaged (SHA-256 differs)")
    if not re.fullmatch(rb"kv[0-9a-f]{14}", native):
        raise PeerUnreachable("the peer's metadata holds no native name")
    try:
        return name.decode(), native.decode(), blob
    except UnicodeDecodeError as error:
        raise PeerUnreachable("the peer's name is not UTF-8") from error
