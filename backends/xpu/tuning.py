"""Launch parameters of the shared kernels on Intel GPUs, chosen by what Intel's offline compiler makes of them; see docs/xpu.md.

All of them do the reference's arithmetic: the rotation by a butterfly of additions, which spills no register; casts by integer
arithmetic. A matrix product for the rotation (DPAS) is not used: nothing here could measure whether it pays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from backends.kernels.plan import Tuning
from bridge.wire import CodingKind, SlotCodec

OPERATIONS = ("pack", "land", "pack_slots", "land_slots")
"""Kernels: pages to payload, payload to pages, vLLM slots to payload, payload to vLLM slots."""
ARCHITECTURES = ("pvc", "dg2", "bmg")
"""Ponte Vecchio, DG2 (Arc A series) and Battlemage, as Intel's compilers name them."""

_PLAIN = Tuning(blocks=1, warps=4, matrix=False, fused=True, canonical_nan=False, integer_cast=True, lanes=16)
_ROTATED = Tuning(blocks=1, warps=16, matrix=False, fused=True, canonical_nan=False, integer_cast=True, lanes=16)

# (architecture, kernel) where something else than the two above spills nothing and is smaller.
TUNINGS: Mapping[tuple[str, str], Tuning] = MappingProxyType({})


def tuning_for(architecture: str) -> Callable[[str, SlotCodec], Tuning]:
    """The launch parameters of one architecture, as backends.accelerator takes them. Unknown ones get Ponte Vecchio's.

    The function raises KeyError for an operation of another name.
    """

    def chosen(operation: str, codec: SlotCodec) -> Tuning:
        if operation not in OPERATIONS:
            raise KeyError(operation)
        rotated = codec.key.kind is CodingKind.CODEBOOK and operation in ("pack", "land")
        return TUNINGS.get((architecture, operation)) or (_ROTATED if rotated else _PLAIN)

    return chosen
