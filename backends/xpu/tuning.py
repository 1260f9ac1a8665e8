"""Launch parameters of the shared kernels on Intel GPUs, chosen by what Intel's offline compiler makes of them; see docs/xpu.md.

All of them do the reference's arithmetic: the rotation by a butterfly of additions, which spills no register; casts by integer
arithmetic. A matrix product for the rotation (DPAS) is not used: nothing here could measure whether it pays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from backends.kernels.plan import Tuning
from bridge.wire import CodingKind, SlotCodec

OPERATIONS = ("pack", "land", "pack_slots", "land_slots")
"""Kernels: pages to payload, payload to pages, vLLM slots to payload, payload to vLLM slots."""
ARCHITECTURES = ("pvc", "dg2", "bmg")
"""Ponte Vecchio, DG2 (Arc A series) and Battlemage, as Intel's compilers name them."""

_PLAIN = Tuning(blocks=1, warps=4, matrix=False, fused=True, soft_roots=True, canonical_nan=False, integer_cast=True, lanes=16)
_ROTATED = replace(_PLAIN, warps=16)
_WIDER = replace(_PLAIN, warps=8)


def tuning_for(architecture: str) -> Callable[[str, SlotCodec], Tuning]:
    """The launch parameters of one architecture, as backends.accelerator takes them; so far all have the same, found for Ponte Vecchio.

    The function raises KeyError for an operation of another name.
    """

    def chosen(operation: str, codec: SlotCodec) -> Tuning:
        if operation not in OPERATIONS:
            raise KeyError(operation)
        if codec.key.kind is CodingKind.CODEBOOK and operation in ("pack", "land"):
            return _ROTATED
        # With 4 sub-groups, head dimension 256 costs 10 to 14 spilled registers.
        wider = operation.endswith("_slots") or (operation == "land" and codec.key.kind is CodingKind.FP8)
        return _WIDER if wider else _PLAIN

    return chosen
