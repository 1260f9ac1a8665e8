"""The container: a manifest and its payload in one file (.kvb). Its key is public, so it proves integrity, not origin."""

from __future__ import annotations

import io
import os
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


def open_container(path: Path) -> io.BufferedReader:
    """The file, open and known to be a regular one: what the path names may change meanwhile, and a pipe would be waited for.

    Raises OSError.
    """
    number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(number, "rb")


def read_container(path: Path) -> tuple[Manifest, bytes, bytes]:
    """(manifest, key, payload) of a .kvb file; the manifest is checked, the payload's tags are not yet.

    Sizes are compared with the file's before anything is allocated. Raises a WireError, or OSError where the file cannot be read.
    """
    with open_container(path) as file:
        try:
            return read_stream(file, os.fstat(file.fileno()).st_size)
        except MemoryError:
            raise errors.TooLarge(f"the payload of {path} does not fit in memory") from None


def verify_container(path: Path) -> Manifest:
    """The manifest of a .kvb file of which everything was checked: its code books, tags and zero bytes too.

    The payload is read piece by piece, and no further than its first fault.
    Raises a WireError, or OSError where the file cannot be read.
    """
    with open_container(path) as file:
        manifest, key = read_manifest(file, os.fstat(file.fileno()).st_size)
        verify_contents(manifest, key, file)
    return manifest


def verify_contents(manifest: Manifest, key: bytes, payload: bytes | io.BufferedIOBase) -> None:
    """What read_container and read_manifest leave open: code books, then tags and zero bytes.

    payload: its bytes, or an open file that stands at them, which is read piece by piece.
    Raises BadCodebook, BadTag or DirtyPadding; Truncated, TooLarge or OSError where the file or the memory ends.
    """
    # The codecs are built on the format, so their module cannot be imported before this one is complete.
    from bridge.codecs.declared import check_tables

    for layer in manifest.layers:
        check_tables(manifest.codecs[layer.codec], manifest.groups[layer.group].head_dim)
    verify_payload(manifest, key, payload)


def read_stream(file: BinaryIO, size: int) -> tuple[Manifest, bytes, bytes]:
    """As read_container, from an open file of `size` bytes that stands at its beginning."""
    manifest, key = read_manifest(file, size)
    return manifest, key, file.read(PayloadMap(manifest).payload_bytes)


def read_manifest(file: BinaryIO, size: int) -> tuple[Manifest, bytes]:
    """(manifest, key) of an open file of `size` bytes that stands at its beginning; afterwards it stands at the payload.

    Raises a WireError where the sizes do not agree either, or OSError.
    """
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
    return manifest, key
