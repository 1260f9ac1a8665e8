"""The KV groups of a model: which layers share a kind, a window and a head geometry, and which keep no KV of their own.

A model type is read by its own rule only where that rule is known; everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.model.config_fields import BadConfig, bounded, flag, number, optional, refuse, show, text
from bridge.wire import GroupKind
from bridge.wire.coding import BLOCK_TOKENS, MAX_OPAQUE_BYTES
from bridge.wire.manifest import MAX_HEAD_DIM, MAX_TOKENS


@dataclass(frozen=True)
class OpaqueBytes:
    """Bytes that the format does not interpret. meaning: a name that both sides know them by, such as "vllm-0.32/mamba2".

    nbytes: of one token and kv head, or of a layer's whole state (then a multiple of 16). With TP, a rank's own part of it.
    """

    meaning: str
    nbytes: int


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind, ascending. kv_heads, head_dim: of each (a latent: 1 and its length). window: of sliding-window layers."""

    kind: GroupKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int = 0


_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_FULL = ("full_attention", "attention")
_SLIDING = "sliding_attention"
_STATES = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")

_LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3")
"""Types whose latent is kv_lora_rank elements, then qk_rope_head_dim of the shared rotary key, one for all heads."""

_WINDOW_IN_EVERY_LAYER = ("mistral", "mixtral", "starcoder2", "phi3")
"""Types whose sliding_window holds for all layers where the config does not list them."""

_SHARED_KV_TYPES = ("gemma3n", "gemma3n_text")
"""Types whose last num_kv_shared_layers layers read the KV of the last earlier layer of their own kind (modeling_gemma3n.py)."""

_MIXED_TYPES = ("gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gpt_oss", "cohere2", "llama4_text")
"""Types that alternate between windows or chunks and full attention even where the config is silent."""


def layer_kinds(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """The kind of each layer as the config lists it, or None. Raises BadConfig."""
    listed = [config[key] for key in ("layer_types", "layers_block_type") if config.get(key) is not None]
    if not listed:
        return None
    for kinds in listed:
        if not isinstance(kinds, list | tuple) or len(kinds) != layers:
            raise BadConfig(f"layer_types does not list {layers} layers")
        if not all(isinstance(kind, str) for kind in kinds):
            raise BadConfig("layer_types holds something that is no text")
    if len(listed) == 2 and list(listed[0]) != list(listed[1]):
        raise BadConfig("layer_types and layers_block_type contradict each other")
    return list(listed[0])


def latent_dim(config: Mapping[str, Any]) -> int | None:
    """Elements of one token's latent (MLA), None for models without. Raises BadConfig and UnsupportedModel."""
    if not config.get("kv_lora_rank"):
        return None
    model_type = text(config, "model_type")
    if model_type not in _LATENT_TYPES:
        refuse("multi-head latent attention (MLA) in a type whose latents are not known", f"model type {show(model_type)}, kv_lora_rank")
    rank = number(config, "the latent's length", MAX_HEAD_DIM, ("kv_lora_rank",))
    rope = number(config, "the rotary key's length", MAX_HEAD_DIM, ("qk_rope_head_dim",))
    if (rank + rope) % 16:
        raise BadConfig(f"a latent of {rank} + {rope} elements is no multiple of 16")
    return bounded(rank + rope, "the latent's length", "kv_lora_rank + qk_rope_head_dim", MAX_HEAD_DIM)


def layer_groups(
    config: Mapping[str, Any], layers: int, kv_heads: int, head_dim: int, states: Mapping[int, OpaqueBytes]
) -> tuple[tuple[LayerGroup, ...], tuple[tuple[int, int], ...]]:
    """(groups in the order of their first layers, (layer, owner) of layers that share another's KV).

    states: by layer, the size of its state. Raises BadConfig and UnsupportedModel.
    """
    kinds = _resolved_kinds(config, layers)
    if latent_dim(config) is not None and set(kinds) != {(GroupKind.FULL_ATTENTION, 0)}:
        refuse("latents beside layers of other kinds", "kv_lora_rank")
    shared = _shared(config, layers, kinds)
    found: dict[tuple[GroupKind, int], list[int]] = {}
    for index in range(layers - len(shared)):
        found.setdefault(kinds[index], []).append(index)
    _check_states(found.get((GroupKind.STATE, 0), []), states, layer_kinds(config, layers) or [])
    groups = []
    for (kind, window), members in found.items():
        if latent_dim(config) is not None:
            groups.append(LayerGroup(GroupKind.LATENT, tuple(members), 1, head_dim))
        elif kind is GroupKind.STATE:
            groups.append(LayerGroup(kind, tuple(members), 1, BLOCK_TOKENS))
        else:
            groups.append(LayerGroup(kind, tuple(members), kv_heads, head_dim, window))
    return tuple(groups), shared


def _resolved_kinds(config: Mapping[str, Any], layers: int) -> list[tuple[GroupKind, int]]:
    """(kind, window) of each layer. A window that never cuts, one no shorter than the longest context, is full attention."""
    model_type = text(config, "model_type")
    attention = config.get("attn_config") if isinstance(config.get("attn_config"), Mapping) else {}
    longest = optional(config, "the longest context", 1 << 40, _CONTEXTS)
    windows = {"sliding_window": config.get("sliding_window"), "sliding_window_size": (attention or {}).get("sliding_window_size")}
    sizes = {
        key: bounded(window, "a window", key, 1 << 40) for key, window in windows.items() if window is not None and window not in (0, -1)
    }
    cuts = any(longest is None or size < longest for size in sizes.values())
    full = (GroupKind.FULL_ATTENTION, 0)
    sliding = (GroupKind.SLIDING_WINDOW, min(sizes.get("sliding_window", 0), MAX_TOKENS)) if cuts else full
    kinds = layer_kinds(config, layers)
    if kinds is not None:
        resolved = []
        for kind in kinds:
            if kind in _FULL:
                resolved.append(full)
            elif kind == _SLIDING and "sliding_window" in sizes:
                resolved.append(sliding)
            elif kind in _STATES:
                resolved.append((GroupKind.STATE, 0))
            else:
                refuse("layers of the type " + show(kind), "layer_types")
        return resolved
    used = flag(config, "use_sliding_window", True)
    untouched = config.get("max_window_layers")
    if "use_sliding_window" in config and isinstance(untouched, int):
        used = used and untouched < layers  # Qwen: only layers from this one on have windows
    if used and cuts:
        if model_type not in _WINDOW_IN_EVERY_LAYER or "sliding_window" not in sizes:
            refuse("sliding windows in layers that it does not list", "sliding_window without layer_types")
        return [sliding] * layers
    if model_type in _MIXED_TYPES:
        refuse("sliding windows or chunked attention in some layers that it does not list", f"model type {model_type} without layer_types")
    return [full] * layers


def _shared(config: Mapping[str, Any], layers: int, kinds: list[tuple[GroupKind, int]]) -> tuple[tuple[int, int], ...]:
    count = (
        optional(config, "the number of layers that share KV", layers - 1, ("num_kv_shared_layers",))
        if config.get("num_kv_shared_layers")
        else 0
    )
    if not count:
        return ()
    listed = layer_kinds(config, layers)
    if text(config, "model_type") not in _SHARED_KV_TYPES or listed is None:
        refuse("layers that share one KV by a rule that is not known", "num_kv_shared_layers")
    first, shared = layers - count, []
    for index in range(first, layers):
        owners = [owner for owner in range(first) if listed is not None and listed[owner] == listed[index]]
        if not owners or kinds[index][0] is GroupKind.STATE:
            raise BadConfig(f"layer {index} shares the KV of an earlier layer of its kind, and there is none")
        shared.append((index, owners[-1]))
    return tuple(shared)


def _check_states(members: list[int], states: Mapping[int, OpaqueBytes], kinds: list[str]) -> None:
    if set(members) != set(states):
        missing, extra = sorted(set(members) - set(states)), sorted(set(states) - set(members))
        if missing and not extra:
            refuse(f"layers of the type {show(kinds[missing[0]])} whose state's size was not given", f"layers {missing[:8]}")
        raise BadConfig(f"states are given for layers {extra[:8]}, which have none", remedy="give the states of the layers that have one")
    for index, state in states.items():
        if state.nbytes % BLOCK_TOKENS or not 0 < state.nbytes <= BLOCK_TOKENS * MAX_OPAQUE_BYTES:
            raise BadConfig(
                f"the state of layer {index} has {state.nbytes} bytes, which is no multiple of 16 up to {BLOCK_TOKENS * MAX_OPAQUE_BYTES}",
                remedy="pad it to a multiple of 16",
            )
