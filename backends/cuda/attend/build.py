"""Compiles attend.cu for one configuration with nvcc, once, and loads it. The library has a plain C interface: no PyTorch headers."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from bridge.cache_folder import cache_folder
from bridge.devices import DeviceError

SOURCE = Path(__file__).with_name("attend.cu")
FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-gencode", "arch=compute_90a,code=sm_90a")


COMPILE_SECONDS = 300
"""A hundred times what a configuration takes."""


class BuildError(DeviceError):
    """nvcc is missing, refused the source or did not end."""

    clause = "attend_build"
    remedy = "put the CUDA toolkit (12.4 or newer) on PATH, or set KVBRIDGE_ATTEND_CACHE to a built cache"


@dataclass(frozen=True)
class Config:
    """The macros of config.cuh, in its words."""

    head_dim: int
    key_bits: int
    value_bits: int
    slots: int = 0
    n_tiles: int = 1
    folded: int = 0
    softcap: int = 0
    warps: int = 16
    stages: int = 4
    unroll: int = 1
    hint: int = 0
    arrive_all: int = 0

    def macros(self) -> list[str]:
        return [f"-D{f.name.upper()}={v}" for f, v in zip(fields(self), astuple(self), strict=True)]


class Params(ctypes.Structure):
    """`struct Params` of config.cuh."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("q", "kv", "table", "lens", "part", "ml", "out", "lse", "sinks")),
        *((n, ctypes.c_longlong) for n in ("q_b", "q_h", "o_b", "o_h", "page", "head", "table_b")),
        *((n, ctypes.c_int) for n in ("batch", "kv_heads", "group", "page_shift", "window", "q_bf16", "groups", "blocks", "min_tiles")),
        ("scale_log2", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("centroids", ctypes.c_float * 16),
    ]


def cache_dir() -> Path:
    """KVBRIDGE_ATTEND_CACHE, or kvbridge/attend under the user's cache folder."""
    chosen = os.environ.get("KVBRIDGE_ATTEND_CACHE")
    return Path(chosen) if chosen else cache_folder() / "attend"


def compile_library(config: Config) -> Path:
    """Path of the shared library for `config`, compiled unless it is in the cache. Raises BuildError."""
    text = b"".join(part.read_bytes() for part in sorted(SOURCE.parent.glob("*.cu*"))) + repr((config, FLAGS)).encode()
    path = cache_dir() / f"attend_{hashlib.sha256(text).hexdigest()[:20]}.so"
    if path.exists():
        return path
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        raise BuildError("nvcc was not found")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as tmp:
        made = Path(tmp) / path.name
        command = [nvcc, *FLAGS, *config.macros(), str(SOURCE), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise BuildError(f"nvcc did not compile attend.cu for {config} within {COMPILE_SECONDS} s") from None
        if done.returncode:
            raise BuildError(f"nvcc refused attend.cu for {config}: {done.stderr.strip()[-2000:]}")
        made.replace(path)
    return path


@functools.cache
def load(config: Config) -> ctypes.CDLL:
    """The library for `config`, ready to call. Raises BuildError."""
    lib = ctypes.CDLL(str(compile_library(config)))
    lib.attend_launch.argtypes = [ctypes.POINTER(Params), ctypes.c_void_p, ctypes.c_int]
    lib.attend_blocks.argtypes = [ctypes.c_int]
    lib.attend_error.restype = ctypes.c_char_p
    return lib
