"""What this connector needs of vLLM, checked at start-up; and an engine's KV tensors as page descriptions."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from bridge.geometry import GeometryError, ModelGeometry, model_digest
from bridge.pages import LayerPages, PagedCache
from bridge.sharding import Layout, ShardingError
from bridge.vllm.engine_pages import BlockGroup
from bridge.vllm.errors import UnsupportedEngine
from bridge.wire import Element

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NEEDED_HOOKS = {
    "register_kv_caches": ("kv_caches",),
    "start_load_kv": ("forward_context",),
    "wait_for_save": (),
    "get_transfer_results": ("finished_req_ids",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "request_finished": ("request", "block_ids"),
    "bind_kv_cache_manager": ("kv_cache_manager",),
    "on_new_request": ("request",),
    "has_pending_push_work": (),
}
"""vLLM's hooks that this connector relies on, with the parameters that it takes from them."""

_SUPPORTED = "vLLM 0.32 is supported"


def check_api(base: type = KVConnectorBase_V1) -> None:
    """Raises UnsupportedEngine, naming the first difference, where this vLLM's connector interface is not the one relied on."""
    for name, parameters in NEEDED_HOOKS.items():
        hook = getattr(base, name, None)
        if hook is None:
            raise UnsupportedEngine(f"this vLLM's KVConnectorBase_V1 has no {name}", remedy=_SUPPORTED)
        found = inspect.signature(hook).parameters
        missing = [parameter for parameter in parameters if parameter not in found]
        if missing:
            raise UnsupportedEngine(f"this vLLM's {name} has no parameter {missing[0]}", remedy=_SUPPORTED)


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises UnsupportedEngine for the first setting that this connector does not carry."""
    parallel = vllm_config.parallel_config
    for name, size in (
        ("pipeline parallelism", parallel.pipeline_parallel_size),
        ("decode context parallelism (DCP)", parallel.decode_context_parallel_size),
        ("prefill context parallelism (PCP)", getattr(parallel, "prefill_context_parallel_size", 1)),
    ):
        if size != 1:
            raise UnsupportedEngine(f"{name} of {size} is not supported", remedy="set it to 1")
    for group in kv_cache_config.kv_cache_groups:
        kind = type(group.kv_cache_spec).__name__
        if kind not in ("FullAttentionSpec", "SlidingWindowSpec", "UniformTypeKVCacheSpecs"):
            raise UnsupportedEngine(f"this model has a KV cache group of the kind {kind}", remedy="use vLLM's own connector for this model")
    if vllm_config.speculative_config is not None:
        raise UnsupportedEngine("speculative decoding keeps draft layers, which are not carried", remedy="switch it off")


def page_groups(kv_cache_config: KVCacheConfig) -> tuple[BlockGroup, ...]:
    """The engine's KV cache groups, in its order, which is that of a request's block ids."""
    from vllm.model_executor.models.utils import extract_layer_index

    return tuple(
        BlockGroup(tuple(extract_layer_index(name) for name in group.layer_names), group.kv_cache_spec.block_size)
        for group in kv_cache_config.kv_cache_groups
    )


def geometry(vllm_config: VllmConfig) -> ModelGeometry:
    """The model's geometry. Raises UnsupportedEngine for models that it refuses."""
    try:
        return ModelGeometry.from_config(_config(vllm_config, Path(vllm_config.model_config.model)))
    except GeometryError as error:
        raise UnsupportedEngine(error.detail, remedy=error.advice) from None


def digest(vllm_config: VllmConfig) -> bytes:
    """The digest of the model's configuration and weights, which must be on this host by now. Raises UnsupportedEngine otherwise."""
    checkpoint = _checkpoint(vllm_config)
    weights = [checkpoint] if checkpoint.is_file() else sorted([*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.gguf")])
    if not weights and vllm_config.load_config.load_format != "dummy":
        raise UnsupportedEngine(
            f"{checkpoint} has no .safetensors or .gguf files, so the weights of two engines cannot be compared",
            remedy="convert the checkpoint to safetensors",
        )
    try:
        return model_digest(_config(vllm_config, checkpoint), weights or None)
    except GeometryError as error:
        raise UnsupportedEngine(error.detail, remedy=error.advice) from None


def _config(vllm_config: VllmConfig, checkpoint: Path) -> Any:
    """The checkpoint's own config.json where it has one, so that both sides read the same fields."""
    file = checkpoint / "config.json"
    return json.loads(file.read_text()) if file.is_file() else vllm_config.model_config.hf_config.to_dict()


def _checkpoint(vllm_config: VllmConfig) -> Path:
    """Where the weights are: the folder or file that vLLM was given, or what it downloaded for a hub's name."""
    model = vllm_config.model_config
    if Path(model.model).exists():
        return Path(model.model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception as error:
        raise UnsupportedEngine(
            f"the weights of {model.model} were not found on this host ({type(error).__name__}), so two engines cannot be compared",
            remedy="give vLLM the checkpoint's folder",
        ) from None


def layout(geometry: ModelGeometry, tp_size: int) -> Layout:
    """Which kv heads each TP rank of an engine holds. Raises UnsupportedEngine for a split that vLLM itself refuses."""
    try:
        return Layout.of(geometry.layers, geometry.kv_heads, tp_size)
    except ShardingError as error:
        raise UnsupportedEngine(error.detail, remedy=error.advice) from None


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
        raise UnsupportedEngine("this CPU cache is not contiguous inside a head", remedy=_SUPPORTED)
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
        raise UnsupportedEngine(f"vLLM's CPU attention for {on_cpu} orders blocks in a way that is not known here", remedy=_SUPPORTED)
    return LayerPages(key, value, *scales)


def describe_all(kv_caches: dict[str, torch.Tensor], vllm_config: VllmConfig, first_head: int) -> PagedCache:
    """Every layer of an engine's cache. Raises UnsupportedEngine."""
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.platforms import current_platform

    cache_dtype = vllm_config.cache_config.cache_dtype
    contexts = vllm_config.compilation_config.static_forward_context
    layers = {}
    for name, tensor in kv_caches.items():
        if tensor.dim() != 4:
            raise UnsupportedEngine(f"layer {name} keeps KV of {tensor.dim()} dimensions", remedy=_SUPPORTED)
        on_cpu = None
        if current_platform.is_cpu():
            from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

            on_cpu = _get_attn_isa(vllm_config.model_config.dtype, tensor.shape[2], tensor.shape[3] // 2, cache_dtype)
        context = contexts.get(name)
        scales = (float(getattr(context, "_k_scale_float", 1.0)), float(getattr(context, "_v_scale_float", 1.0)))
        element = page_element(tensor, cache_dtype)
        index = extract_layer_index(name)
        layers[index] = describe(tensor, element, scales if element is Element.E4M3FN else (1.0, 1.0), on_cpu)
    return PagedCache(layers, first_head)
