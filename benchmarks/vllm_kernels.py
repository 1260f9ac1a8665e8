"""vLLM 0.32's own TurboQuant store and dequant kernels, from a copy of its two kernel files, timed and compared with slots made here."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import torch
import triton
import triton.language as tl

from backends.kernels import plan
from bridge.codecs import tables

STORE, DECODE = "triton_turboquant_store", "triton_turboquant_decode"
CODE_BYTES = 64


def load(folder: str) -> tuple[types.ModuleType, types.ModuleType]:
    """(store, decode) modules from `folder`, with stand-ins for the few names that they import from the rest of vLLM.

    Raises FileNotFoundError where a file is missing.
    """
    for name in (STORE, DECODE):
        if not (Path(folder) / f"{name}.py").is_file():
            raise FileNotFoundError(f"{folder} holds no {name}.py; copy it from vllm/v1/attention/ops of a vLLM 0.32 wheel")

    class Platform:
        @staticmethod
        def is_cuda_alike() -> bool:
            return True

    for name, content in {
        "vllm": {}, "vllm.v1": {}, "vllm.v1.attention": {}, "vllm.v1.attention.ops": {},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.platforms": {"current_platform": Platform},
        "vllm.v1.attention.ops.triton_decode_attention": {"_fwd_kernel_stage2": None},
    }.items():  # fmt: skip
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        sys.modules.setdefault(name, module)
    found = []
    for name in (DECODE, STORE):
        full = f"vllm.v1.attention.ops.{name}"
        spec = importlib.util.spec_from_file_location(full, Path(folder) / f"{name}.py")
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"{folder}/{name}.py cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
        found.append(module)
    return found[1], found[0]


def compare(folder: str, pages: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor, table: torch.Tensor, tokens: int) -> dict:
    """Stores one layer of bf16 pages [pages, page, heads, 128] with vLLM's kernels at 4 bits and dequantises it; times and differences.

    slots: the same layer's slots as made here, uint8 [pages, page, heads, slot bytes].
    """
    store, decode = load(folder)
    _, page, heads, dim = pages[0].shape
    position = torch.arange(tokens, device="cuda")
    slot_mapping = (table[position // page].long() * page + position % page).to(torch.int32)
    key, value = (side.reshape(-1, heads, dim)[slot_mapping.long()].contiguous() for side in pages)
    rotation = torch.from_numpy(plan.sylvester(dim)).cuda() / dim**0.5
    midpoints, centroids = plan.midpoint_tensor(dim, 4, "cuda"), torch.from_numpy(tables.centroids(dim, 4).copy()).cuda()
    cache = torch.full_like(slots, 0xCD)

    def run_store() -> None:
        store.triton_turboquant_store(key, value, cache, slot_mapping, rotation, midpoints, 4, CODE_BYTES + 2, 4)

    out = [torch.empty((1, heads, tokens, dim), dtype=torch.float16, device="cuda") for _ in "kv"]
    half = rotation.half()

    def run_dequant() -> None:
        decode._tq_full_dequant_kv[(tokens, heads)](
            cache, table.reshape(1, -1), centroids, *out, *out[0].stride()[:3], *out[1].stride()[:3], *cache.stride()[:3],
            table.numel(), HEAD_DIM=dim, BLOCK_SIZE=page, NUM_KV_HEADS=heads, MSE_BYTES=CODE_BYTES, KPS=CODE_BYTES + 2, VQB=4,
            VAL_DATA_BYTES=CODE_BYTES, MSE_BITS=4, KEY_FP8=0, BLOCK_D=dim, NORM_CORRECTION=1, FP8_E4B15=0, num_warps=4,
        )  # fmt: skip

    def run_rotation() -> None:
        out[0].reshape(-1, dim) @ half

    run_store()
    torch.cuda.synchronize()
    used = table.long()
    different = cache[used] != slots[used]
    bench = lambda run: 1e3 * triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")  # noqa: E731
    return {
        "store_us": bench(run_store),
        "dequant_us": bench(run_dequant),
        "dequant_rotation_us": bench(run_rotation),
        "bytes": different.numel(),
        "key_code_bytes_differing": int(different[..., :CODE_BYTES].sum()),
        "norm_bytes_differing": int(different[..., CODE_BYTES : CODE_BYTES + 2].sum()),
        "value_code_bytes_differing": int(different[..., CODE_BYTES + 2 : 2 * CODE_BYTES + 2].sum()),
        "value_scalar_bytes_differing": int(different[..., 2 * CODE_BYTES + 2 :].sum()),
    }
