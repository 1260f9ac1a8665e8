"""An engine's KV tensors as page descriptions. On CPUs the description is tried against vLLM's own kernel before it is believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bridge.pages import LayerPages, PagedCache
from bridge.vllm.engine import SUPPORTED
from bridge.vllm.errors import UnsupportedEngine
from bridge.wire import Element

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def page_element(tensor: torch.Tensor, cache_dtype: str) -> Element:
    """What the pages hold. Raises UnsupportedEngine."""
    known = {torch.bfloat16: Element.BF16, torch.float16: Element.FP16, torch.float32: Element.FP32}
    if tensor.dtype in known:
        return known[tensor.dtype]
    if tensor.dtype in (torch.uint8, torch.float8_e4m3fn) and cache_dtype in ("fp8", "fp8_e4m3"):
        return Element.E4M3FN
    raise UnsupportedEngine(f"a cache of type {cache_dtype} is not supported", remedy="use auto, bfloat16, float16, float32 or fp8_e4m3")


def describe(tensor: torch.Tensor, element: Element, scales: tuple[float, float], on_cpu: str | None) -> LayerPages:
    """One layer's KV tensor [blocks, heads, block_size, 2 * head_dim], as pages.

    on_cpu: the instruction set whose physical order vLLM's CPU attention uses inside a block, None on accelerators, where K and V of a
    token stand side by side. Source: vLLM 0.32, csrc/cpu/cpu_attn_*.hpp; both orders were read back from the kernels themselves.
    Raises UnsupportedEngine.
    """
    if element is Element.E4M3FN:
        tensor = tensor.view(torch.float8_e4m3fn)
    blocks, heads, block_size, twice = tensor.shape
    dim = twice // 2
    if on_cpu is None:
        return LayerPages.hnd(tensor[..., :dim], tensor[..., dim:], *scales)
    step_block, step_head = tensor.stride()[:2]
    if tensor.stride()[2:] != (twice, 1):
        raise UnsupportedEngine("this CPU cache is not contiguous inside a head", remedy=SUPPORTED)
    base, half = tensor.storage_offset(), block_size * dim
    if on_cpu in ("vec", "vec16"):
        shape = (blocks, block_size, heads, dim)
        key = tensor.as_strided(shape, (step_block, 1, step_head, block_size), base)
        value = tensor.as_strided(shape, (step_block, dim, step_head, 1), base + half)
    elif on_cpu == "amx":
        key = tensor.as_strided((blocks, block_size // 16, 16, heads, dim // 2, 2), (step_block, 16 * dim, 2, step_head, 32, 1), base)
        value = tensor.as_strided(
            (blocks, block_size // 2, 2, heads, dim // 16, 16), (step_block, 32, 1, step_head, 16 * block_size, 2), base + half
        )
    else:
        raise UnsupportedEngine(f"vLLM's CPU attention for {on_cpu} orders blocks in a way that is not known here", remedy=SUPPORTED)
    return LayerPages(key, value, *scales)


def check_order(tensor: torch.Tensor, dtype: torch.dtype, cache_dtype: str, on_cpu: str) -> None:
    """Has vLLM's CPU kernel write known vectors into pages of their own, and reads them back through `describe`.

    tensor: a layer's KV tensor, of which only shape and type matter. dtype: the model's. on_cpu: the instruction set that vLLM chose; each
    has its own order inside a block, and a wrong one would give wrong tokens without a word. Raises UnsupportedEngine.
    """
    from vllm._custom_ops import cpu_attn_reshape_and_cache

    _, heads, block_size, twice = tensor.shape
    blocks, dim, element = 3, twice // 2, page_element(tensor, cache_dtype)
    pages = torch.zeros((blocks, heads, block_size, twice), dtype=tensor.dtype)
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(blocks * block_size, generator=generator)
    # Whole numbers from -8 to 8 are exact in every type that a cache can have.
    key, value = (torch.randint(-8, 9, (len(slots), heads, dim), generator=generator).to(dtype) for _ in "kv")
    halves = pages.view(blocks, heads, 2 * block_size, dim).chunk(2, dim=2)
    try:
        cpu_attn_reshape_and_cache(key, value, *halves, slots, on_cpu, k_scale=1.0, v_scale=1.0, kv_cache_dtype=cache_dtype)
    except RuntimeError as error:
        raise UnsupportedEngine(
            f"vLLM's own kernel does not write a cache of type {cache_dtype} in blocks of {block_size} tokens ({on_cpu}): {error}",
            remedy="take another --kv-cache-dtype, or a --block-size that is a multiple of 32",
        ) from error
    described = describe(pages, element, (1.0, 1.0), on_cpu)
    page, position = slots // block_size, slots % block_size
    for side, written in zip(described.sides, (key, value), strict=True):
        codes = side.codes if side is not None else torch.empty(0)
        if codes.dim() == 6:
            size = codes.shape[2]
            found = codes[page, position // size, position % size].flatten(2)
        else:
            found = codes[page, position]
        if not torch.equal(found.float(), written.float()):
            raise UnsupportedEngine(
                f"vLLM's CPU attention for {on_cpu} keeps a cache of type {cache_dtype} in an order that is not the one known here",
                remedy=SUPPORTED,
            )


def describe_all(kv_caches: dict[str, torch.Tensor], vllm_config: VllmConfig, first_head: int) -> PagedCache:
    """Every layer of an engine's cache. Raises UnsupportedEngine."""
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.platforms import current_platform

    cache_dtype = vllm_config.cache_config.cache_dtype
    contexts = vllm_config.compilation_config.static_forward_context
    layers: dict[int, LayerPages] = {}
    checked: set[tuple] = set()
    for name, tensor in kv_caches.items():
        if tensor.dim() != 4:
            raise UnsupportedEngine(f"layer {name} keeps KV of {tensor.dim()} dimensions", remedy=SUPPORTED)
        on_cpu = None
        if current_platform.is_cpu():
            from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

            dtype = vllm_config.model_config.dtype
            on_cpu = _get_attn_isa(dtype, tensor.shape[2], tensor.shape[3] // 2, cache_dtype)
            kind = (tensor.shape[1:], tensor.dtype, on_cpu)
            if kind not in checked:
                check_order(tensor, dtype, cache_dtype, on_cpu)
            checked.add(kind)
        context = contexts.get(name)
        scales = (float(getattr(context, "_k_scale_float", 1.0)), float(getattr(context, "_v_scale_float", 1.0)))
        element = page_element(tensor, cache_dtype)
        index = extract_layer_index(name)
        layers[index] = describe(tensor, element, scales if element is Element.E4M3FN else (1.0, 1.0), on_cpu)
    return PagedCache(layers, first_head)
