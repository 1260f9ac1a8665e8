"""Intel's OpenCL runtime for CPUs, as much of it as running a compiled kernel needs, by ctypes.

Kernel arguments are host addresses: the runtime offers fine-grained system shared virtual memory, so any memory of the process will do.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, byref, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

from bridge.devices import DeviceError

_CPU = 1 << 1
_PLATFORM_NAME, _DEVICE_NAME, _DRIVER_VERSION, _LOCAL_MEMORY, _SVM = 0x0902, 0x102B, 0x102D, 0x1023, 0x1053
_BUILD_LOG, _BINARY_SIZES, _BINARIES = 0x1183, 0x1165, 0x1166
_FINE_GRAINED_SYSTEM = 1 << 3
_BUILD_OPTIONS = b"-cl-opt-disable"
"""The module comes optimised from Triton's compiler. Another round here takes a minute a kernel instead of a second."""
_FIRST = ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so", "libtbb.so.12")
"""What the loader and the runtime want to have been loaded, since not all of them say where it lies."""


class OpenClError(DeviceError):
    """Intel's OpenCL runtime refused something."""

    clause = "opencl"
    remedy = "make the environment anew with make xpu-env"


def _loader() -> ctypes.CDLL:
    """The OpenCL loader of this environment, told where the CPU runtime lies: the wheel's own ICD file names a path that is not there."""
    folder = Path(sys.prefix) / "lib"
    os.environ["OCL_ICD_FILENAMES"] = str(folder / "libintelocl.so")
    try:
        for name in _FIRST:
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(folder / "libOpenCL.so.1"))
    except OSError as error:
        raise OpenClError(f"Intel's OpenCL runtime cannot be loaded: {error}") from None


_SIGNATURES = {
    "clGetPlatformIDs": (c_uint32, POINTER(c_void_p), POINTER(c_uint32)),
    "clGetPlatformInfo": (c_void_p, c_uint32, c_size_t, c_void_p, POINTER(c_size_t)),
    "clGetDeviceIDs": (c_void_p, c_uint64, c_uint32, POINTER(c_void_p), POINTER(c_uint32)),
    "clGetDeviceInfo": (c_void_p, c_uint32, c_size_t, c_void_p, POINTER(c_size_t)),
    "clBuildProgram": (c_void_p, c_uint32, POINTER(c_void_p), c_char_p, c_void_p, c_void_p),
    "clGetProgramBuildInfo": (c_void_p, c_void_p, c_uint32, c_size_t, c_void_p, POINTER(c_size_t)),
    "clGetProgramInfo": (c_void_p, c_uint32, c_size_t, c_void_p, POINTER(c_size_t)),
    "clSetKernelArg": (c_void_p, c_uint32, c_size_t, c_void_p),
    "clSetKernelArgSVMPointer": (c_void_p, c_uint32, c_void_p),
    "clEnqueueNDRangeKernel": (
        c_void_p, c_void_p, c_uint32, c_void_p, POINTER(c_size_t), POINTER(c_size_t), c_uint32, c_void_p, c_void_p,
    ),
    "clFinish": (c_void_p,),
}  # fmt: skip
_MAKERS = {
    "clCreateContext": (c_void_p, c_uint32, POINTER(c_void_p), c_void_p, c_void_p, POINTER(c_int32)),
    "clCreateCommandQueueWithProperties": (c_void_p, c_void_p, c_void_p, POINTER(c_int32)),
    "clCreateProgramWithIL": (c_void_p, c_char_p, c_size_t, POINTER(c_int32)),
    "clCreateProgramWithBinary": (
        c_void_p, c_uint32, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_char_p), POINTER(c_int32), POINTER(c_int32),
    ),
    "clCreateKernel": (c_void_p, c_char_p, POINTER(c_int32)),
}  # fmt: skip


class Runtime:
    """The CPU as Intel's OpenCL device: one context, one queue in order. Raises OpenClError where it is not there."""

    def __init__(self) -> None:
        self._cl = _loader()
        for name, arguments in _SIGNATURES.items():
            getattr(self._cl, name).argtypes = arguments
            getattr(self._cl, name).restype = c_int32
        for name, taken in _MAKERS.items():
            getattr(self._cl, name).argtypes = taken
            getattr(self._cl, name).restype = c_void_p
        self._device = c_void_p(self._find())
        self.name = self._text("clGetDeviceInfo", self._device, _DEVICE_NAME)
        self.version = self._text("clGetDeviceInfo", self._device, _DRIVER_VERSION)
        self.local_memory = self._number(_LOCAL_MEMORY)
        if not self._number(_SVM) & _FINE_GRAINED_SYSTEM:
            raise OpenClError(f"{self.name} does not take addresses of the host's own memory")
        self._context = c_void_p(self._make("clCreateContext", None, 1, byref(self._device), None, None))
        self._queue = c_void_p(self._make("clCreateCommandQueueWithProperties", self._context, self._device, None))

    def _do(self, function: str, *arguments: object) -> None:
        code = getattr(self._cl, function)(*arguments)
        if code:
            raise OpenClError(f"{function} failed with code {code}")

    def _make(self, function: str, *arguments: object) -> int:
        code = c_int32()
        made = getattr(self._cl, function)(*arguments, byref(code))
        if code.value or not made:
            raise OpenClError(f"{function} failed with code {code.value}")
        return made

    def _find(self) -> int:
        platforms, found, count = (c_void_p * 16)(), c_uint32(), c_uint32()
        self._do("clGetPlatformIDs", 16, platforms, byref(count))
        for platform in platforms[: count.value]:
            device = c_void_p()
            if "Intel" in self._text("clGetPlatformInfo", c_void_p(platform), _PLATFORM_NAME) and not self._cl.clGetDeviceIDs(
                c_void_p(platform), _CPU, 1, byref(device), byref(found)
            ):
                return device.value or 0
        raise OpenClError("Intel's OpenCL runtime has no CPU device here")

    def _text(self, function: str, *place: object) -> str:
        size = c_size_t()
        self._do(function, *place, 0, None, byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._do(function, *place, size.value, text, None)
        return text.value.decode(errors="replace")

    def _number(self, what: int) -> int:
        value = c_uint64()
        self._do("clGetDeviceInfo", self._device, what, 8, byref(value), None)
        return value.value

    def _build(self, program: c_void_p) -> c_void_p:
        if self._cl.clBuildProgram(program, 1, byref(self._device), _BUILD_OPTIONS, None, None):
            raise OpenClError(f"a kernel does not build: {self._text('clGetProgramBuildInfo', program, self._device, _BUILD_LOG)[-2000:]}")
        return program

    def program_of_module(self, module: bytes) -> c_void_p:
        """A program from SPIR-V, built. Raises OpenClError with the build's log."""
        return self._build(c_void_p(self._make("clCreateProgramWithIL", self._context, module, len(module))))

    def program_of_binary(self, binary: bytes) -> c_void_p:
        """A program from what `binary` gave for it. Raises OpenClError, also where another version of the runtime made it."""
        size, text = c_size_t(len(binary)), c_char_p(binary)
        made = self._make("clCreateProgramWithBinary", self._context, 1, byref(self._device), byref(size), byref(text), None)
        return self._build(c_void_p(made))

    def binary(self, program: c_void_p) -> bytes:
        """A built program's machine code."""
        size = c_size_t()
        self._do("clGetProgramInfo", program, _BINARY_SIZES, 8, byref(size), None)
        code = ctypes.create_string_buffer(size.value)
        place = c_void_p(ctypes.addressof(code))
        self._do("clGetProgramInfo", program, _BINARIES, 8, byref(place), None)
        return code.raw

    def kernel(self, program: c_void_p, name: str) -> c_void_p:
        return c_void_p(self._make("clCreateKernel", program, name.encode()))

    def set_address(self, kernel: c_void_p, place: int, address: int) -> None:
        self._do("clSetKernelArgSVMPointer", kernel, place, address)

    def set_scalar(self, kernel: c_void_p, place: int, value: ctypes._SimpleCData) -> None:
        self._do("clSetKernelArg", kernel, place, ctypes.sizeof(value), byref(value))

    def set_local_memory(self, kernel: c_void_p, place: int, nbytes: int) -> None:
        self._do("clSetKernelArg", kernel, place, nbytes, None)

    def run(self, kernel: c_void_p, groups: tuple[int, int, int], group_size: int) -> None:
        """Runs work-groups of `group_size` work-items; returns when all have ended."""
        everything = (c_size_t * 3)(groups[0] * group_size, groups[1], groups[2])
        one = (c_size_t * 3)(group_size, 1, 1)
        self._do("clEnqueueNDRangeKernel", self._queue, kernel, 3, None, everything, one, 0, None, None)
        self._do("clFinish", self._queue)
