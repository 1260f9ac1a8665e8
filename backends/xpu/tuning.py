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

_ROTATED = Tuning(blocks=1, warps=16, matrix=False, fused=True, soft_roots=True, canonical_nan=False, integer_cast=True, lanes=16)
_SLOTS = replace(_ROTATED, warps=8)
_ROTATED_ON_DG2 = {64: 8, 256: 32}
"""Head dim -> sub-groups of packing, 16 otherwise. DG2's registers have half the bytes, but the rotation exchanges through them."""

TAG_OPTIONS = {"num_warps": 8, "threads_per_warp": 16}
"""Of the kernel of tags. With 4 sub-groups of 32 DG2's registers do not hold a program's products: 220 messages to scratch memory."""

MASK_OPTIONS = {"num_warps": 4, "threads_per_warp": 16}
"""Of the kernel of masks. With 2 sub-groups of 32 a lane's state and where it began fill DG2's registers: 79 messages to scratch memory."""


def tuning_for(architecture: str) -> Callable[[str, SlotCodec, int], Tuning]:
    """The launch parameters of one architecture, as backends.accelerator takes them; of any other name, Ponte Vecchio's.

    The function raises KeyError for an operation of another name.
    """

    dg2 = architecture == "dg2"

    def chosen(operation: str, codec: SlotCodec, head_dim: int) -> Tuning:
        if operation not in OPERATIONS:
            raise KeyError(operation)
        if operation.endswith("_slots"):
            return _SLOTS if head_dim <= 128 or not dg2 else _ROTATED
        if codec.key.kind is CodingKind.CODEBOOK:
            return replace(_ROTATED, warps=_ROTATED_ON_DG2.get(head_dim, 16)) if dg2 and operation == "pack" else _ROTATED
        # As few as keep a program's elements in registers.
        each = 16 if not dg2 else 8 if operation == "pack" else 4
        return replace(_ROTATED, warps=min(max(head_dim // each, 4), 32))

    return chosen
