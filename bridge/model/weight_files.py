"""Digests of weight files: of all their bytes, or of slices that cost the same for a file of any size."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge.model.config_fields import BadWeights

MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file; the limit of the format's own library."""

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
    sharded = [path for path in tensors if path.name.startswith("model")]
    if tensors:
        # Mistral ships the same weights twice, as consolidated.safetensors too.
        return sharded or tensors
    if len(gguf) == 1:
        return gguf
    found = f"{len(gguf)} .gguf files" if gguf else "neither .safetensors nor .gguf files"
    raise BadWeights(f"the folder {folder} holds {found}", remedy="name the weight files themselves")


def file_digest(path: Path, whole: bool, opaque: tuple[str, ...] = (".gguf",)) -> bytes:
    """SHA-256 over a file's tensors: their names, shapes and dtypes (safetensors), the size, and the data.

    whole: all of the data, or the first, the last and 64 evenly spaced slices of 4 KiB. opaque: endings of files that are data from their
    first byte on; every other file is safetensors. Raises BadWeights.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            description, start = (path.suffix[1:].encode(), 0) if path.suffix in opaque else _safetensors_header(file, size, path)
            digest = hashlib.sha256(struct.pack("<QQ", size - start, len(description)) + description)
            if whole:
                file.seek(start)
                while part := file.read(_READ_BYTES):
                    digest.update(part)
                return digest.digest()
            last = max(size - SLICE_BYTES, start)
            # Spaced over the data, so that padding or comments in a header change nothing.
            for i in range(SLICES + 2):
                file.seek(start + (last - start) * i // (SLICES + 1))
                digest.update(file.read(SLICE_BYTES))
            return digest.digest()
    except OSError as error:
        raise BadWeights(f"the weight file {path} cannot be read: {error.strerror}") from None


def _safetensors_header(file: Any, size: int, path: Path) -> tuple[bytes, int]:
    """(names, dtypes and shapes in canonical form, where the data begins)."""
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise BadWeights(f"the file {path} is no safetensors file")
    try:
        header = json.loads(file.read(length))
        entries = sorted((name, entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        return json.dumps(entries, separators=(",", ":")).encode(), 8 + length
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadWeights(f"the header of {path} is no safetensors header") from None
