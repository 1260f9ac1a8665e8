"""Launch parameters of the shared kernels on NVIDIA cards, as benchmarks/kernels.py found them best on an H200."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from backends.kernels.attend.arguments import AttendTuning
from backends.kernels.plan import Tuning
from bridge.wire import CodingKind, SlotCodec

OPERATIONS = ("pack", "land", "pack_slots", "land_slots")
"""Kernels: pages to payload, payload to pages, vLLM slots to payload, payload to vLLM slots."""

_NARROW, _WIDE, _CAPPED = Tuning(blocks=2, warps=1), Tuning(blocks=1, warps=2), Tuning(blocks=1, warps=1, registers=128)
# Four kv heads one after another, the next one's elements on their way through shared memory; see docs/kernels.md.
_AHEAD = Tuning(blocks=1, warps=1, registers=128, steps=4, stages=2, part=32)
_AHEAD_3_BITS = Tuning(blocks=1, warps=1, registers=168, steps=4, stages=2, part=32)
# All kv heads of a block in one program; the rest is for pages of which only some heads land.
_TOGETHER = replace(_CAPPED, together=1)

# (kernel, K's kind and bits, V's kind and bits)
TUNINGS: MappingProxyType[tuple[str, CodingKind, int, CodingKind, int], Tuning] = MappingProxyType(
    {
        ("pack", CodingKind.RAW, 16, CodingKind.RAW, 16): _WIDE,
        ("pack", CodingKind.RAW, 32, CodingKind.RAW, 32): _WIDE,
        ("pack", CodingKind.FP8, 8, CodingKind.FP8, 8): _WIDE,
        ("pack", CodingKind.FP8, 8, CodingKind.AFFINE, 4): _AHEAD,
        ("pack", CodingKind.CODEBOOK, 4, CodingKind.AFFINE, 4): _AHEAD,
        ("pack", CodingKind.CODEBOOK, 3, CodingKind.AFFINE, 4): _AHEAD_3_BITS,
        ("pack", CodingKind.CODEBOOK, 3, CodingKind.AFFINE, 3): _AHEAD_3_BITS,
        ("land", CodingKind.RAW, 16, CodingKind.RAW, 16): _NARROW,
        ("land", CodingKind.RAW, 32, CodingKind.RAW, 32): _NARROW,
        ("pack_slots", CodingKind.CODEBOOK, 4, CodingKind.AFFINE, 4): _NARROW,
        ("land_slots", CodingKind.FP8, 8, CodingKind.AFFINE, 4): _TOGETHER,
        ("land_slots", CodingKind.CODEBOOK, 4, CodingKind.AFFINE, 4): replace(_WIDE, together=1),
        ("land_slots", CodingKind.CODEBOOK, 3, CodingKind.AFFINE, 4): _TOGETHER,
        ("land_slots", CodingKind.CODEBOOK, 3, CodingKind.AFFINE, 3): _TOGETHER,
    }
)


def tuning_for(operation: str, codec: SlotCodec) -> Tuning:
    """The launch parameters of one kernel (see OPERATIONS) for one codec; those that suit most codecs where none were measured.

    Raises KeyError for an operation of another name.
    """
    if operation not in OPERATIONS:
        raise KeyError(operation)
    return TUNINGS.get((operation, codec.key.kind, codec.key.bits, codec.value.kind, codec.value.bits), _CAPPED)


def attend_tuning(preset: str, layout: str, head_dim: int, group: int) -> AttendTuning:
    """Launch parameters of the shared `attend` for one cache and number of query heads a kv head, as benchmarks/attend.py found them.

    In slots each word is put together of two, and Triton holds both tiles' in registers: fewer tokens, and no tile ahead.
    """
    if layout == "slots":
        return AttendTuning(tokens=32, stages=1, registers=168, programs=12)
    return AttendTuning(tokens=32 if head_dim * (2 if group > 8 else 1) > 128 else 64, programs=8)
