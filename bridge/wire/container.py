"""The container: a manifest and its payload in one file (.kvb). Its key is public, so it proves integrity, not origin."""

from __future__ import annotations

import stat
import struct
from pathlib import Path
from typing import BinaryIO

from bridge.wire import errors
from bridge.wire.manifest import MAX_MANIFEST_BYTES, Manifest
from bridge.wire.payload import PayloadMap
from bridge.wire.sealing import open_sealed, seal
from bridge.wire.verify import verify_payload

MAGIC = b"KVBFILE\n"
_PRELUDE = struct.Struct("<8sII32sQ8s")
ALIGNMENT = 64
"""The prelude has 64 bytes, and the payload begins at a multiple of 64."""


def _aligned(size: int) -> int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def write_container(file: BinaryIO, manifest: Manifest, key: bytes, payload: bytes | memoryview) -> None:
    """Writes prelude, sealed manifest and payload. Raises PayloadSize if the payload is not the one that the manifest describes."""
    sealed = seal(manifest, key)
    expected = PayloadMap(manifest).payload_bytes
    if len(payload) != expected:
        raise errors.PayloadSize(f"the payload has {len(payload)} bytes, the manifest describes {expected}")
    file.write(_PRELUDE.pack(MAGIC, len(sealed), 0, key, len(payload), bytes(8)))
    file.write(sealed)
    file.write(bytes(_aligned(len(sealed)) - len(sealed)))
    file.write(payload)


def read_container(path: Path) -> tuple[Manifest, bytes, bytes]:
    """(manifest, key, payload) of a .kvb file; the manifest is checked, the payload's tags are not yet.

    Sizes are compared with the file's before anything is allocated. Raises a WireError, or OSError where the file cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is no regular file")
    with path.open("rb") as file:
        try:
            return read_stream(file, status.st_size)
        except MemoryError:
            raise errors.TooLarge(f"the payload of {path} does not fit in memory") from None


def verify_container(path: Path) -> Manifest:
    """The manifest of a .kvb file of which everything was checked: its code books, tags and zero bytes too.

    Raises a WireError, or OSError where the file cannot be read.
    """
    manifest, key, payload = read_container(path)
    verify_contents(manifest, key, payload)
    return manifest


def verify_contents(manifest: Manifest, key: bytes, payload: bytes) -> None:
    """What read_container leaves open: code books, then tags and zero bytes. Raises BadCodebook, BadTag or DirtyPadding."""
    # The codecs are built on the format, so their module cannot be imported before this one is complete.
    from bridge.codecs.declared import check_tables

    for layer in manifest.layers:
        check_tables(manifest.codecs[layer.codec], manifest.groups[layer.group].head_dim)
    verify_payload(manifest, key, payload)


def read_stream(file: BinaryIO, size: int) -> tuple[Manifest, bytes, bytes]:
    """As read_container, from an open file of `size` bytes that stands at its beginning."""
    prelude = file.read(_PRELUDE.size)
    if len(prelude) < _PRELUDE.size:
        raise errors.Truncated(f"a container begins with {_PRELUDE.size} bytes, the file has {size}")
    magic, manifest_bytes, reserved, key, payload_bytes, reserved_end = _PRELUDE.unpack(prelude)
    if magic != MAGIC:
        raise errors.BadMagic(f"the magic is {magic!r}, not {MAGIC!r}")
    if reserved or any(reserved_end):
        raise errors.ReservedNotZero("reserved bytes of the container's prelude are not zero")
    if manifest_bytes > MAX_MANIFEST_BYTES:
        raise errors.TooLarge(f"a manifest of {manifest_bytes} bytes is over the limit of {MAX_MANIFEST_BYTES}")
    total = _PRELUDE.size + _aligned(manifest_bytes) + payload_bytes
    if size < total:
        raise errors.Truncated(f"the container says {total} bytes, the file has {size}")
    if size > total:
        raise errors.TrailingBytes(f"the container says {total} bytes, the file has {size}")
    sealed = file.read(manifest_bytes)
    if any(file.read(_aligned(manifest_bytes) - manifest_bytes)):
        raise errors.ReservedNotZero("padding bytes behind the manifest are not zero")
    manifest = open_sealed(sealed, key)
    expected = PayloadMap(manifest).payload_bytes
    if payload_bytes != expected:
        raise errors.PayloadSize(f"the container states {payload_bytes} payload bytes, the manifest describes {expected}")
    return manifest, key, file.read(payload_bytes)
