"""Square roots and reciprocals of backends/kernels/rotation.py, compiled by Intel's Triton, run by its CPU runtime, against IEEE ones.

.venv-xpu/bin/python -P tests/xpu/roots.py FOLDER [STEP]: every STEP-th of the 2**24 numbers from 1 to 4, and as many others of all sizes
that the kernels meet. FOLDER: for builds. The device's own root, which is exact here, is pushed 3 units off either way, as a card's may be.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import triton
import triton.language as tl

from backends.kernels.rotation import corrected_reciprocal, corrected_root
from backends.xpu.opencl_driver import activate

BLOCK = 1024


@triton.jit
def push(x, units):
    return (x.to(tl.int32, bitcast=True) + units).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["units"])
def kernel(x, roots, reciprocals, units, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(roots + at, corrected_root(value, push(tl.sqrt(value), units)))
    tl.store(reciprocals + at, corrected_reciprocal(value, push(1.0 / value, units)))


def main() -> None:
    activate(Path(sys.argv[1]))
    step = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    dense = (np.arange(0, 1 << 24, step, dtype=np.uint32) + np.uint32(127 << 23)).view(np.float32)
    random = np.random.default_rng(0)
    spread = np.exp2(random.uniform(-59, 66, dense.size)).astype(np.float32)
    x = np.concatenate([dense, spread])
    x = x[: x.size // BLOCK * BLOCK]
    for units in range(-3, 4):
        made = [torch.full((x.size,), float("nan")) for _ in range(2)]
        kernel[(x.size // BLOCK,)](torch.from_numpy(x), *made, units, BLOCK, threads_per_warp=16)
        wrong = [int(np.count_nonzero(one.numpy() != right)) for one, right in zip(made, (np.sqrt(x), np.float32(1) / x), strict=True)]
        print(f"{x.size} numbers, {units:+} units: {wrong[0]} roots and {wrong[1]} reciprocals wrong", flush=True)
        if any(wrong):
            sys.exit(1)


if __name__ == "__main__":
    main()
