"""A model's KV from its Hugging Face config: its groups of layers, kv heads, head dimension.

Whatever would be read wrongly is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.model.config_fields import (
    BadConfig,
    UnsupportedModel,
    as_mapping,
    bounded,
    flag,
    number,
    optional,
    refuse,
    show,
    text,
    text_part,
)
from bridge.model.layer_groups import LayerGroup, OpaqueBytes, latent_dim, layer_groups, layer_kinds
from bridge.wire import (
    Element,
    GroupKind,
)
from bridge.wire.manifest import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS

MAX_HIDDEN = 1 << 20


@dataclass(frozen=True)
class ModelGeometry:
    """What of a model decides the shape of its KV.

    layers: all of the model's. kv_heads, head_dim: of an attention layer (a latent: 1 and its length). query_heads: of a layer.
    element: what the weights are stored as, hence what an engine keeps its pages in unless told otherwise.
    groups: the layers that keep KV, by kind; one group of full attention unless told otherwise. states: the size of each state.
    shared: (layer, owner) of layers that read another's KV; they are carried by their owner, once.
    """

    layers: int
    kv_heads: int
    head_dim: int
    query_heads: int
    element: Element = Element.BF16
    groups: tuple[LayerGroup, ...] = ()
    states: tuple[tuple[int, OpaqueBytes], ...] = ()
    shared: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            whole = LayerGroup(GroupKind.FULL_ATTENTION, tuple(range(self.layers)), self.kv_heads, self.head_dim)
            object.__setattr__(self, "groups", (whole,))

    @property
    def token_elements(self) -> int:
        """Elements of K and V of one token, all layers that keep it (a window's only while it is within the window)."""
        sides = {GroupKind.LATENT: 1, GroupKind.STATE: 0}
        return sum(sides.get(group.kind, 2) * len(group.layers) * group.kv_heads * group.head_dim for group in self.groups)

    @classmethod
    def from_config(cls, config: Any, states: Mapping[int, OpaqueBytes] | None = None) -> ModelGeometry:
        """From a mapping, or an object with `to_dict()` (a transformers config).

        The model types that leave out `num_key_value_heads` or `head_dim` because their default says it are known by name; for every
        other type the config must say it. A type that this module does not know is taken for a plain decoder when nothing in its config
        speaks against it. Without a dtype the element is BF16.
        states: for hybrid models, the size of each recurrent layer's state, which no config says. Raises BadConfig and UnsupportedModel.
        """
        outer, inner = text_part(as_mapping(config))
        model_type = text(inner, "model_type") or text(outer, "model_type")
        for part in (outer, inner):
            _refuse_unsupported(part, model_type, hybrid=bool(states))
        layers = number(inner, "the number of layers", MAX_LAYERS, _LAYERS)
        query_heads = number(inner, "the number of attention heads", 4 * MAX_HEADS, _QUERY_HEADS)
        latent = latent_dim(inner)
        if latent is not None:
            kv_heads, head_dim = 1, latent
        else:
            kv_heads = _kv_heads(inner, model_type, query_heads)
            head_dim = _head_dim(inner, model_type, query_heads)
        if query_heads % kv_heads:
            raise BadConfig(f"{query_heads} attention heads cannot share {kv_heads} kv heads evenly")
        if states and layer_kinds(inner, layers) is None:
            refuse("recurrent or state-space layers that it does not list", "states were given, and there are no layer_types")
        groups, shared = layer_groups(inner, layers, kv_heads, head_dim, states or {})
        sizes = tuple(sorted((states or {}).items()))
        return cls(layers, kv_heads, head_dim, query_heads, _element(inner, outer), groups, sizes, shared)


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_HEAD_DIMS = ("head_dim", "kv_channels", "attention_head_dim")

_FALCON = ("falcon", "RefinedWeb", "RefinedWebModel")
_ONE_HEAD_EACH = (
    "llama", "phi", "phi3", "gpt2", "gptj", "gpt_neox", "codegen", "opt", "bloom", "mpt", "persimmon", "biogpt", "olmo", "baichuan",
)  # fmt: skip
"""Types whose silence about kv heads means as many as attention heads."""

_OWN_HEAD_DIM = (
    "gemma", "gemma2", "gemma3_text", "qwen3", "qwen3_moe", "qwen3_5_text", "glm4_moe", "gpt_oss", "ernie4_5", "seed_oss", "minimax_m2",
    "solar_open", "hy_v3", "paddleocr_vl_text", "step3p5", "laguna", "mellum",
)  # fmt: skip
"""Types whose silence about the head dimension does not mean hidden size / heads."""

_RECURRENT = "recurrent or state-space layers"
_FEATURES = {
    "sparse attention with index keys": ("index_head_dim", "index_topk"),
    "cross attention": ("cross_attention_layers", "cross_attention_layers_list", "cross_attn_every_n_layers"),
    "chunked attention": ("attention_chunk_size",),
    "local attention": ("attention_types", "attention_window_size", "interleaved_sliding_window", "sliding_window_pattern"),
    _RECURRENT: (
        "hybrid_override_pattern", "layers_block_type", "block_types", "attn_layer_period", "attn_layer_indices", "attn_type_list",
        "mamba_d_state", "mamba_d_conv", "mamba_num_heads", "mamba_expand", "ssm_cfg", "ssm_state_size", "state_size", "d_conv",
        "lru_width", "conv_L_cache", "full_attn_idxs", "full_attention_interval", "linear_attn_config", "linear_num_key_heads",
        "linear_conv_kernel_dim", "attention_hidden_size",
    ),
    "layers that differ from each other": (
        "per_layer_config", "block_configs", "num_key_value_heads_per_layer", "global_head_dim",
        "num_global_key_value_heads", "swa_head_dim", "swa_num_key_value_heads", "head_dim_per_layer",
    ),
    "layers that share one KV": ("use_cla", "cla_share_factor"),
}  # fmt: skip
"""Fields that, set to anything but null, false, zero or empty, say that the model has what is named."""

_STATE_TYPES = (
    "mamba", "mamba2", "falcon_mamba", "jamba", "zamba", "zamba2", "bamba", "nemotron_h", "rwkv", "rwkv5", "rwkv6", "rwkv7",
    "recurrent_gemma", "granitemoehybrid", "lfm2", "lfm2_moe", "falcon_h1", "plamo2", "minimax", "qwen3_next", "kimi_linear", "xlstm",
    "retnet", "bailing_hybrid",
)  # fmt: skip

_BOTH_IN_ONE_LAYER = ("falcon_h1", "zamba", "zamba2")
"""A layer of these has two caches, which one entry of a manifest cannot describe."""


def _kv_heads(config: Mapping[str, Any], model_type: str, query_heads: int) -> int:
    what = "the number of kv heads"
    if model_type in _FALCON or "new_decoder_architecture" in config:
        # Falcon's old architecture ignores num_kv_heads when multi_query is set (modeling_falcon.py, FalconAttention).
        if flag(config, "multi_query", True) and not flag(config, "new_decoder_architecture", False):
            return 1
        return optional(config, what, MAX_HEADS, _KV_HEADS) or _within(query_heads)
    if model_type == "gpt_bigcode" or "multi_query" in config:
        implied = 1 if flag(config, "multi_query", True) else _within(query_heads)
        if optional(config, what, MAX_HEADS, _KV_HEADS) not in (None, implied):
            raise BadConfig("multi_query and the number of kv heads contradict each other")
        return implied
    if "multi_query_attention" in config:  # ChatGLM
        shared = flag(config, "multi_query_attention", False)
        return number(config, what, MAX_HEADS, ("multi_query_group_num",)) if shared else _within(query_heads)
    attention = config.get("attn_config")
    if isinstance(attention, Mapping):  # MPT, DBRX
        if attention.get("attn_type") == "multiquery_attention":
            return 1
        found = optional(attention, what, MAX_HEADS, ("kv_n_heads",))
        if found is not None:
            return found
        if attention.get("attn_type") == "grouped_query_attention":
            raise BadConfig("attn_config asks for grouped queries and does not say kv_n_heads")
    found = optional(config, what, MAX_HEADS, _KV_HEADS)
    if found is not None:
        return found
    if model_type in _ONE_HEAD_EACH:
        return _within(query_heads)
    raise BadConfig(
        f"the config of type {show(model_type)} leaves out num_key_value_heads, which is not known to mean one for each attention head",
        remedy="add num_key_value_heads to it",
    )


def _within(query_heads: int) -> int:
    return bounded(query_heads, "the number of kv heads", "the number of attention heads", MAX_HEADS)


def _head_dim(config: Mapping[str, Any], model_type: str, query_heads: int) -> int:
    found = optional(config, "the head dimension", MAX_HEAD_DIM, _HEAD_DIMS)
    if found is None:
        if model_type in _OWN_HEAD_DIM:
            raise BadConfig(f"the config of type {show(model_type)} leaves out head_dim", remedy="add head_dim to it")
        hidden = number(config, "the hidden size", MAX_HIDDEN, _HIDDEN)
        if hidden % query_heads:
            raise BadConfig(f"the hidden size {hidden} is no multiple of {query_heads} attention heads, and there is no head_dim")
        found = bounded(hidden // query_heads, "the head dimension", "hidden size / attention heads", MAX_HEAD_DIM)
    value_dim = optional(config, "the value's head dimension", MAX_HEAD_DIM, ("v_head_dim",))
    if value_dim not in (None, found):
        raise UnsupportedModel(f"keys of {found} and values of {value_dim} elements: unequal head dimensions are not supported")
    if found % 16:
        raise UnsupportedModel(f"head dimension {found} is no multiple of 16, which every block needs")
    return found


def _element(*parts: Mapping[str, Any]) -> Element:
    names = {"bfloat16": Element.BF16, "float16": Element.FP16, "half": Element.FP16, "float32": Element.FP32, "float": Element.FP32}
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if value is None or value == "auto":
                continue
            name = str(value)[:40].removeprefix("torch.")
            if name not in names:
                raise BadConfig(f"{key} is {show(name)}, and pages are bfloat16, float16 or float32", remedy="pass the pages' own type")
            return names[name]
    return Element.BF16


def _refuse_unsupported(config: Mapping[str, Any], model_type: str, hybrid: bool) -> None:
    """hybrid: the recurrent layers' states are given, so that layers listed as such are carried."""
    if config.get("is_encoder_decoder") or isinstance(config.get("decoder"), Mapping):
        refuse("an encoder and a decoder, so cross attention", "is_encoder_decoder")
    if config.get("add_cross_attention"):
        refuse("cross attention", "add_cross_attention")
    for feature, keys in _FEATURES.items():
        for key in keys:
            if config.get(key) and not (hybrid and feature == _RECURRENT):
                refuse(feature, key)
    if model_type in _STATE_TYPES and not hybrid:
        refuse(_RECURRENT, f"model type {model_type}")
    if hybrid and config.get("hybrid_override_pattern"):
        refuse("recurrent layers listed in letters", "hybrid_override_pattern")
    if hybrid and model_type in _BOTH_IN_ONE_LAYER:
        refuse("layers with both attention and a state", f"model type {model_type}")
