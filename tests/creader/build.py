"""Compiles the C reader once a process, into a temporary folder, and wraps it with ctypes."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("kvb_reader.c")
FLAGS = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
SANITIZERS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@lru_cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kvb-reader-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compile(target: str, *extra: str) -> Path:
    path = _folder() / target
    result = subprocess.run(["cc", *FLAGS, *extra, "-o", path, SOURCE, "-lm"], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"the C reader does not compile:\n{result.stderr}")
    return path


@lru_cache
def program(sanitized: bool = False) -> Path:
    """The command `kvbread FILE...`; with the address and undefined-behaviour sanitizers if asked for."""
    return _compile("kvbread-sanitized" if sanitized else "kvbread", "-DKVB_MAIN", *(SANITIZERS if sanitized else []))


class CReader:
    """The C reader. data: the bytes of a container."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._verdict, self._manifest = library.kvb_verdict, library.kvb_manifest_verdict
        self._decode, self._dump = library.kvb_decode, library.kvb_dump
        self._verdict.restype = self._manifest.restype = ctypes.c_char_p
        self._verdict.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._manifest.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
        self._decode.restype = self._dump.restype = ctypes.c_long
        self._decode.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p]
        self._dump.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]

    def verdict(self, data: bytes) -> str:
        """ "ok", or the clause of the first broken rule of a whole container."""
        return self._verdict(data, len(data)).decode()

    def manifest_verdict(self, data: bytes, key: bytes) -> str:
        """ "ok", or the clause of the first broken rule of a sealed manifest under a key of 32 bytes."""
        if len(key) != 32:
            raise ValueError("a key has 32 bytes")
        return self._manifest(data, len(data), key).decode()

    def dump(self, data: bytes) -> str | None:
        """The manifest's canonical text; None where the manifest is refused."""
        length = self._dump(data, len(data), None, 0)
        if length < 0:
            return None
        text = ctypes.create_string_buffer(length + 1)
        self._dump(data, len(data), text, length + 1)
        return text.value.decode()

    def decode(self, data: bytes, layer: int, head: int, side: int, row_bytes: int) -> np.ndarray | None:
        """u8 [tokens, row_bytes]: the rows of one side; row_bytes is 4 * head_dim (fp32), or those of an opaque side. None: refused."""
        rows = self._decode(data, len(data), layer, head, side, None)
        if rows < 0:
            return None
        # Poison, and one row more than the reader may write.
        out = np.full((rows + 1, row_bytes), 0xCD, dtype=np.uint8)
        if self._decode(data, len(data), layer, head, side, out.ctypes.data) != rows or (out[-1] != 0xCD).any():
            raise RuntimeError("the C reader wrote other rows than it counted")
        return out[:-1]


@lru_cache
def load() -> CReader:
    """The C reader, compiled from kvb_reader.c at the first call. Raises RuntimeError where it does not compile without a warning."""
    return CReader(_compile("kvb_reader.so", "-shared", "-fPIC"))
