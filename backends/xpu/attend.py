"""Launch parameters of the shared `attend` on Intel GPUs, by what Intel's offline compiler made of them; see docs/attend.md, Intel.

No Intel GPU has run it. DPAS is not asked for: with it Intel's Triton 3.3 cannot compile the rotation. So every thread holds a row and
a column of each product, in fp32. Of what was tried these use scratch memory least: none but for rotated keys of head dim 256.
"""

from __future__ import annotations

from backends.kernels.attend.arguments import AttendTuning

_ROTATED = {64: (32, 16, 0), 128: (32, 32, 0), 256: (32, 32, 0)}
_ROTATED_DG2 = {64: (32, 32, 0), 128: (16, 32, 0), 256: (16, 32, 0)}
_FP8 = {64: (64, 16, 0), 128: (32, 16, 16), 256: (16, 32, 32)}
_FP8_DG2 = {64: (32, 16, 16), 128: (32, 32, 16), 256: (16, 32, 16)}
"""Head dim -> (tokens of a tile, sub-groups, key depth). Keys of 4 and 3 bits; fp8 keys."""
_THREADS = {"dg2": 64}
"""Of one Xe core, with large registers; 32 elsewhere."""


def attend_tuning(architecture: str, preset: str, head_dim: int) -> AttendTuning:
    """Of one of backends.xpu.tuning.ARCHITECTURES (of any other name, Ponte Vecchio's), for any layout, group and options.

    programs: as many as one Xe core has threads for. DG2's registers have half the bytes, so sub-groups of 8.
    """
    fp8, dg2 = preset == "turboquant_k8v4", architecture == "dg2"
    if fp8:
        tokens, warps, key_depth = (_FP8_DG2 if dg2 else _FP8)[head_dim]
    else:
        tokens, warps, key_depth = (_ROTATED_DG2 if dg2 else _ROTATED)[head_dim]
    return AttendTuning(
        tokens=tokens, warps=warps, stages=1, programs=_THREADS.get(architecture, 32) // warps, merge_warps=8, narrow=False,
        integer_cast=True, lanes=8 if dg2 else 16, large_registers=True, key_depth=key_depth,
    )  # fmt: skip
