"""SPIR-V modules as streams of instructions: what Intel's OpenCL CPU runtime does not accept is taken out, the rest stays as compiled.

A module is five words of header, then instructions whose first word holds the length in words (high half) and the opcode (low half);
see the SPIR-V specification, section 2.3.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

MAGIC = 0x07230203
_HEADER_WORDS = 5
_OP_EXTENSION, _OP_EXECUTION_MODE, _OP_CAPABILITY = 10, 16, 17
# Launch hints, and a vector capability that the module declares and does not use.
_CAPABILITIES = {5892, 5606}  # KernelAttributesINTEL, VectorAnyINTEL
_EXTENSIONS = {b"SPV_INTEL_kernel_attributes", b"SPV_INTEL_vector_compute"}
_MODES = {5893}  # MaxWorkgroupSizeINTEL


class BadModule(ValueError):
    """Bytes that are no SPIR-V module."""


def instructions(words: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(opcode, the instruction's u32 words) of a module, u32 [n]. Raises BadModule."""
    if len(words) < _HEADER_WORDS or words[0] != MAGIC:
        raise BadModule("the bytes do not begin as a SPIR-V module does")
    at = _HEADER_WORDS
    while at < len(words):
        length = int(words[at]) >> 16
        if length == 0 or at + length > len(words):
            raise BadModule(f"the instruction at word {at} has a length of {length} words, {len(words) - at} are left")
        yield int(words[at]) & 0xFFFF, words[at : at + length]
        at += length


def _refused(opcode: int, words: np.ndarray) -> bool:
    if opcode == _OP_CAPABILITY:
        return int(words[1]) in _CAPABILITIES
    if opcode == _OP_EXTENSION:
        return words[1:].tobytes().split(b"\0")[0] in _EXTENSIONS
    return opcode == _OP_EXECUTION_MODE and int(words[2]) in _MODES


def for_cpu_runtime(module: bytes) -> bytes:
    """The module without the declarations that Intel's OpenCL CPU device refuses. No computing instruction is touched."""
    words = np.frombuffer(module, np.uint32)
    kept = [part for opcode, part in instructions(words) if not _refused(opcode, part)]
    return np.concatenate([words[:_HEADER_WORDS], *kept]).tobytes()
