"""Digests of weight files: of all their bytes, or of slices that cost the same for a file of any size."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bridge.model.config_fields import BadWeights

MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file; the limit of the format's own library."""

MAX_ADAPTER_TENSORS = 65_536
MAX_ADAPTER_HEADER_BYTES = MAX_ADAPTER_TENSORS * 256
"""An engine's scheduler waits while an adapter's header is read: a second at most."""

_TOO_LARGE = "serve this adapter without hand-off"

GGUF_HEADER_BYTES = 64 << 20
"""A GGUF file's names, shapes and offsets follow its vocabulary, some 16 MiB for the largest ones; this much is always hashed whole."""

SLICE_BYTES = 4096
SLICES = 64
_READ_BYTES = 1 << 20


def weight_files(weights: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that hold a model's weights: those given, or a folder's. Raises BadWeights."""
    if not isinstance(weights, str | Path):
        return [Path(path) for path in weights]
    folder = Path(weights)
    if not folder.is_dir():
        return [folder]
    tensors, gguf = sorted(folder.glob("*.safetensors")), sorted(folder.glob("*.gguf"))
    if tensors:
        # Mistral ships the same weights twice, as consolidated.safetensors too.
        others = [path for path in tensors if not path.name.startswith("consolidated")]
        return indexed(others or tensors, folder / f"{'model' if others else 'consolidated'}.safetensors.index.json")
    if len(gguf) == 1:
        return gguf
    found = f"{len(gguf)} .gguf files" if gguf else "neither .safetensors nor .gguf files"
    raise BadWeights(f"the folder {folder} holds {found}", remedy="name the weight files themselves")


def indexed(files: list[Path], index: Path) -> list[Path]:
    """Those of the files that an index names, as engines take them; all where there is no index. Raises BadWeights."""
    if not index.is_file():
        return files
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadWeights(f"{index} is no index of weights", remedy="copy the whole checkpoint anew") from None
    missing = sorted(str(name) for name in named - {path.name for path in files})
    if missing:
        raise BadWeights(f"{index} names {missing[0][:100]!r}, which is not beside it", remedy="copy the whole checkpoint anew")
    return [path for path in files if path.name in named]


class FileDigest(NamedTuple):
    """What a weight file is. names: of its tensors, where its header says them."""

    digest: bytes
    names: frozenset[str]


def file_digest(path: Path, whole: bool, *, adapter: bool = False) -> FileDigest:
    """SHA-256 over a file's tensors: their names, shapes, dtypes and places in the file (safetensors), the size, and the data.

    whole: all of the data, or the first, the last and 64 evenly spaced slices of 4 KiB. A .gguf file is data from its first byte on, and
    its first 64 MiB always count, since its header lies there. adapter: its tensors are bounded, and .bin and .pt files are taken, always
    whole, since PyTorch keeps its names anywhere in them. Every other file is safetensors. Raises BadWeights.
    """
    try:
        size = path.stat().st_size
        pytorch = adapter and path.suffix in (".bin", ".pt")
        with path.open("rb") as file:
            if pytorch or path.suffix == ".gguf":
                description, start, names = path.suffix[1:].encode(), 0, frozenset[str]()
            else:
                description, start, names = _safetensors_header(file, size, path, MAX_ADAPTER_TENSORS if adapter else None)
            digest = hashlib.sha256(struct.pack("<QQ", size - start, len(description)) + description)
            file.seek(start)
            if whole or pytorch:
                _update(digest, file, None)
                return FileDigest(digest.digest(), names)
            if path.suffix == ".gguf":
                _update(digest, file, GGUF_HEADER_BYTES)
            last = max(size - SLICE_BYTES, start)
            # Spaced over the data, so that padding or comments in a header change nothing.
            for i in range(SLICES + 2):
                file.seek(start + (last - start) * i // (SLICES + 1))
                digest.update(file.read(SLICE_BYTES))
            return FileDigest(digest.digest(), names)
    except OSError as error:
        raise BadWeights(f"the weight file {path} cannot be read: {error.strerror}") from None


def _update(digest: Any, file: Any, limit: int | None) -> None:
    """The file's next `limit` bytes, or all."""
    left = limit if limit is not None else 1 << 62
    while left and (part := file.read(min(left, _READ_BYTES))):
        digest.update(part)
        left -= len(part)


def _safetensors_header(file: Any, size: int, path: Path, most: int | None) -> tuple[bytes, int, frozenset[str]]:
    """(names, dtypes, shapes and offsets in the order of the data, where the data begins, names). most: how many tensors it may have."""
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise BadWeights(f"the file {path} is no safetensors file")
    if most is not None and length > MAX_ADAPTER_HEADER_BYTES:
        raise BadWeights(f"the header of {path} has {length} bytes, an adapter's at most {MAX_ADAPTER_HEADER_BYTES}", remedy=_TOO_LARGE)
    try:
        header = json.loads(file.read(length), object_pairs_hook=_without_repeats)
        entries = sorted(_entry(name, about, size - 8 - length) for name, about in header.items() if name != "__metadata__")
        description = json.dumps(entries, separators=(",", ":")).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadWeights(f"the header of {path} is no safetensors header") from None
    if most is not None and len(entries) > most:
        raise BadWeights(f"{path} has {len(entries)} tensors, an adapter at most {most}", remedy=_TOO_LARGE)
    return description, 8 + length, frozenset(header) - {"__metadata__"}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Raises ValueError where a name stands twice: readers differ in which of the two they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _entry(name: str, about: dict[str, Any], data_bytes: int) -> tuple[int, int, str, str, list[int]]:
    """A tensor as the header has it; what lies first in the file sorts first. Raises ValueError, KeyError and TypeError."""
    begin, end = about["data_offsets"]
    dtype, shape = about["dtype"], about["shape"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or any(type(number) is not int for number in (begin, end, *shape)):
        raise TypeError("no tensor")
    if not 0 <= begin <= end <= data_bytes:
        raise ValueError("a tensor outside the file")
    return begin, end, name, dtype, shape
