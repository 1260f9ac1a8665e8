"""Launch parameters of the shared `attend` on Intel GPUs, by what Intel's offline compiler made of them; see docs/attend.md, Intel.

No Intel GPU has run it. DPAS is not asked for: with it Intel's Triton 3.3 cannot compile the rotation.
"""

from __future__ import annotations

from backends.kernels.attend.arguments import AttendTuning


def attend_tuning(preset: str, head_dim: int) -> AttendTuning:
    """For any architecture and layout. programs: as many as have threads on one Xe core of Ponte Vecchio."""
    wide = head_dim > 128 or (preset == "turboquant_k8v4" and head_dim == 128)
    return AttendTuning(
        tokens=16, warps=32 if wide else 16, stages=1, programs=1 if wide else 2, merge_warps=4, narrow=False, integer_cast=True, lanes=16,
        large_registers=True,
    )  # fmt: skip
