"""Runs in vLLM's environment: tries the described order of CPU caches against vLLM's own kernel.

Prints a JSON line for each case: [case, what it said].
Arguments: "right"; "wrong", where the description is that of another instruction set; or "refused", what the kernel itself does not write.
"""

import itertools
import json
import os
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from bridge.vllm import kv_tensors
from bridge.vllm.errors import UnsupportedEngine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(which: str) -> None:
    current_platform.import_kernels()
    real = kv_tensors.describe
    fp8 = ["fp8_e4m3"] if torch.cpu._is_avx512_supported() or which == "refused" else []
    for (name, dtype), block, dim, cache in itertools.product(DTYPES.items(), (16, 32, 48, 128), (64, 80), ["auto", *fp8]):
        if cache != "auto" and (dim % 32 or dtype is torch.float16):
            continue
        unwritten = cache != "auto" and block % 32 != 0  # vLLM keeps no fp8 in such blocks
        if unwritten != (which == "refused"):
            continue
        isa = "vec16" if unwritten else _get_attn_isa(dtype, block, dim, cache)
        tensor = torch.empty((2, 3, block, 2 * dim), dtype=dtype if cache == "auto" else torch.uint8)
        if which == "wrong":
            other = "vec" if isa == "amx" else "amx"
            kv_tensors.describe = lambda pages, element, scales, on_cpu, other=other: real(pages, element, scales, other)
        try:
            kv_tensors.check_order(tensor, dtype, cache, isa)
        except UnsupportedEngine as error:
            said = str(error)
        else:
            said = ""
        print(json.dumps([f"{name} {block} {dim} {cache} {isa}", said]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
