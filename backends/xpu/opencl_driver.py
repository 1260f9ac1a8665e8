"""A Triton driver whose kernels are compiled by Intel's back end and run by Intel's OpenCL runtime on the CPU.

With it `kernel[grid](...)`, and so every launch function of `backends/kernels`, works unchanged on torch's CPU tensors. Only for the
environment made by `environment.py`, whose Triton is Intel's.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from backends.xpu.opencl import OpenClError, Runtime
from backends.xpu.spirv import for_cpu_runtime

_SCALARS = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp16": ctypes.c_float, "bf16": ctypes.c_float, "fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


def architecture(name: str, dpas: bool) -> dict[str, Any]:
    """What torch.xpu would say of a card, as far as Intel's back end asks: with or without its matrix units."""
    return {
        "architecture": 0,
        "name": name,
        "sub_group_sizes": [16, 32] if name == "pvc" else [8, 16, 32],
        "has_fp64": name == "pvc",
        "max_work_group_size": 1024,
        "max_num_sub_groups": 64,
        "has_subgroup_matrix_multiply_accumulate": dpas,
        "has_subgroup_2d_block_io": False,
        "has_bfloat16_conversions": dpas and name == "pvc",
    }


def answer_for_the_loader(name: str) -> None:
    """Lets Intel's back end compile where there is no Level Zero loader: the architecture, for which it asks one, is given."""
    from triton.backends import backends

    # Triton loads its back ends under names of its own, so the module is reached through the class.
    module = backends["intel"].compiler.__init__.__globals__
    module["compile_module_from_src"] = lambda *args, **kwargs: SimpleNamespace(parse_device_arch=lambda arch: name)


class Utils:
    """What Triton asks of a driver's utils: to load binaries, and the device's limits."""

    def __init__(self, runtime: Runtime, cache: Path) -> None:
        self._runtime = runtime
        self._cache = cache
        cache.mkdir(parents=True, exist_ok=True)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._runtime.local_memory}

    def load_binary(self, name: str, module: bytes, shared: int, build_flags: str, device: int):
        """(program, kernel, registers, spills); the runtime's machine code is kept in the cache folder."""
        accepted = for_cpu_runtime(module)
        known = self._cache / f"{hashlib.sha256(accepted + self._runtime.version.encode()).hexdigest()}.bin"
        program = None
        if known.exists():
            try:
                program = self._runtime.program_of_binary(known.read_bytes())
            except OpenClError:
                known.unlink(missing_ok=True)
        if program is None:
            program = self._runtime.program_of_module(accepted)
            partial = known.with_suffix(f".{os.getpid()}")
            partial.write_bytes(self._runtime.binary(program))
            partial.replace(known)
        return program, self._runtime.kernel(program, name), 0, 0


class Launcher:
    """One compiled kernel's launch: arguments in the order of its signature, work-groups as Intel's own launcher makes them."""

    def __init__(self, source, runtime: Runtime) -> None:
        self._types = list(source.signature.values())
        self._runtime = runtime

    def __call__(self, x, y, z, stream, kernel, metadata, launch_metadata, enter, leave, *arguments):
        place, runtime = 0, self._runtime
        for kind, argument in zip(self._types, arguments, strict=True):
            if kind == "constexpr":
                continue
            if kind[0] == "*":
                runtime.set_address(kernel, place, argument.data_ptr())
            else:
                runtime.set_scalar(kernel, place, cast(Any, _SCALARS[kind])(argument))
            place += 1
        if metadata.shared:
            runtime.set_local_memory(kernel, place, metadata.shared)
        runtime.run(kernel, (x, y, z), metadata.num_warps * metadata.threads_per_warp)


class OpenClDriver:
    """Triton's view of Intel's CPU runtime as an XPU without matrix units. Launches return when they have ended."""

    def __init__(self, cache: Path) -> None:
        answer_for_the_loader("pvc")
        self.runtime = Runtime()
        self.utils = Utils(self.runtime, cache)

    def launcher_cls(self, source, metadata) -> Launcher:
        return Launcher(source, self.runtime)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("xpu", architecture("pvc", dpas=False), 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def activate(cache: Path) -> OpenClDriver:
    """Makes Triton of this process compile for Intel and run on the CPU runtime. cache: folder for machine code. Raises OpenClError."""
    from triton.runtime.driver import driver

    made = OpenClDriver(cache)
    driver.set_active(made)
    return made
