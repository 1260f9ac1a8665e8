"""What this connector needs of vLLM, checked at start-up, and what it asks of an engine's configuration."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.model import GeometryError, ModelGeometry, model_digest
from bridge.model.config_fields import as_mapping
from bridge.sharding import Layout, ShardingError
from bridge.vllm.checkpoint import loaded_weights, mistral_config, on_this_host, read_json, reads_config_json
from bridge.vllm.engine_pages import BlockGroup
from bridge.vllm.errors import UnsupportedEngine

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
    "update_connector_output": ("connector_output",),
    "get_kv_connector_stats": (),
    "bind_kv_cache_manager": ("kv_cache_manager",),
    "on_new_request": ("request",),
    "has_pending_push_work": (),
}
"""vLLM's hooks that this connector relies on, with the parameters that it takes from them."""

SUPPORTED = "vLLM 0.32 is supported"


def check_api(base: type | None = None) -> None:
    """Raises UnsupportedEngine, naming the first difference, where this vLLM's connector interface is not the one relied on."""
    if base is None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        base = KVConnectorBase_V1
    for name, parameters in NEEDED_HOOKS.items():
        hook = getattr(base, name, None)
        if hook is None:
            raise UnsupportedEngine(f"this vLLM's KVConnectorBase_V1 has no {name}", remedy=SUPPORTED)
        found = inspect.signature(hook).parameters
        missing = [parameter for parameter in parameters if parameter not in found]
        if missing:
            raise UnsupportedEngine(f"this vLLM's {name} has no parameter {missing[0]}", remedy=SUPPORTED)


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
    if parallel.data_parallel_size_local > 1 and not parallel.data_parallel_external_lb:
        raise UnsupportedEngine(
            f"{parallel.data_parallel_size_local} data-parallel engines would share one name and one port",
            remedy="start each engine by itself, with a name, a certificate and ports of its own",
        )
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


def digest(vllm_config: VllmConfig, whole: bool) -> bytes:
    """The digest of the model's configuration and weights, which must be on this host by now. Raises UnsupportedEngine otherwise.

    whole: every byte of the weights counts.
    """
    checkpoint = _checkpoint(vllm_config)
    try:
        weights = loaded_weights(checkpoint, vllm_config.load_config.load_format)
        if not weights and vllm_config.load_config.load_format != "dummy":
            raise UnsupportedEngine(
                f"{checkpoint} has no .safetensors or .gguf files that vLLM loads, so the weights of two engines cannot be compared",
                remedy="convert the checkpoint to safetensors",
            )
        beside = {**_quantization_files(checkpoint), **mistral_config(vllm_config.model_config, checkpoint)}
        return model_digest({**as_mapping(_config(vllm_config, checkpoint)), **beside}, weights or None, whole=whole)
    except GeometryError as error:
        raise UnsupportedEngine(error.detail, remedy=error.advice) from None


def _config(vllm_config: VllmConfig, checkpoint: Path) -> Any:
    """The checkpoint's own config.json where it has one, so that both sides read the same fields; otherwise what the engine runs."""
    if not reads_config_json(vllm_config.model_config):
        return vllm_config.model_config.hf_config.to_dict()
    file = checkpoint / "config.json"
    return read_json(file) if file.is_file() else vllm_config.model_config.hf_config.to_dict()


QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Beside config.json, where vLLM's quantizations look for what it lacks."""


def _quantization_files(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """As fields of a config, compared exactly. Raises UnsupportedEngine."""
    files = (checkpoint / name for name in QUANTIZATION_FILES)
    return {file.name: {"quantization_config": read_json(file)} for file in files if file.is_file()}


def _checkpoint(vllm_config: VllmConfig) -> Path:
    """Where the weights are: the folder or file that vLLM was given, or what it downloaded for a hub's name."""
    model = vllm_config.model_config
    found = on_this_host(model.model, model.revision, getattr(vllm_config.load_config, "download_dir", None))
    if found is None:
        raise UnsupportedEngine(
            f"the weights of {model.model} were not found on this host, so two engines cannot be compared",
            remedy="give vLLM the checkpoint's folder",
        )
    return found


def hashes_images(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names a prompt's images, sounds and videos by their content: with both of its caches off it counts them instead.

    As in BaseRenderer._process_mm_uuids of vLLM 0.32.
    """
    multimodal = vllm_config.model_config.multimodal_config
    return multimodal is None or multimodal.mm_processor_cache_gb != 0 or bool(vllm_config.cache_config.enable_prefix_caching)


def layout(geometry: ModelGeometry, tp_size: int) -> Layout:
    """Which kv heads each TP rank of an engine holds. Raises UnsupportedEngine for a split that vLLM itself refuses."""
    try:
        return Layout.of(geometry.layers, geometry.kv_heads, tp_size)
    except ShardingError as error:
        raise UnsupportedEngine(error.detail, remedy=error.advice) from None
