"""A model's KV from its Hugging Face config: its groups of layers, kv heads, head dimension; what identifies it; a request's manifest.

Whatever would be read wrongly is refused by name, never guessed.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.codecs import declared
from bridge.codecs.errors import NotCarried
from bridge.config_fields import (
    BadConfig,
    BadWeights,
    GeometryError,
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
from bridge.layer_groups import LayerGroup, OpaqueBytes, latent_dim, layer_groups, layer_kinds
from bridge.sharding import DraftLayer
from bridge.wire import (
    BLOCK_TOKENS,
    Coding,
    CodingKind,
    ContentKind,
    Element,
    Group,
    GroupKind,
    Layer,
    Manifest,
    Shard,
    SlotCodec,
    token_digest,
)
from bridge.wire.coding import opaque as opaque_coding
from bridge.wire.manifest import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_TOKENS

MAX_HIDDEN = 1 << 20
MAX_CONFIG_ITEMS = 1 << 17
MAX_CONFIG_DEPTH = 16
MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file; the limit of the format's own library."""

SLICE_BYTES = 4096
SLICES = 64


class SharedLayer(GeometryError):
    """A layer that keeps no KV of its own among those to be carried."""

    clause = "shared_layer"
    remedy = "leave it out: its owner's KV is carried once, and serves both"


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


NO_MEANING = frozenset(
    {
        "_name_or_path", "name_or_path", "_commit_hash", "architectures", "auto_map", "transformers_version", "tokenizer_class",
        "processor_class", "gguf_file", "dtype", "torch_dtype", "use_cache", "use_bfloat16", "torchscript", "return_dict",
        "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_router_logits",
        "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset", "attn_implementation",
        "_experts_implementation", "attn_impl", "_flash_attn_2_enabled", "gradient_checkpointing", "pretraining_tp",
        "initializer_range", "initializer_factor", "init_std", "init_device", "id2label", "label2id", "num_labels", "problem_type",
        "finetuning_task", "task_specific_params", "chunk_size_feed_forward", "bos_token_id", "eos_token_id", "pad_token_id",
        "sep_token_id", "unk_token_id", "cls_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
        "prefix", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "max_length", "min_length", "max_new_tokens",
        "do_sample", "num_beams", "num_beam_groups", "num_return_sequences", "temperature", "top_k", "top_p", "typical_p",
        "repetition_penalty", "length_penalty", "diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
        "early_stopping", "remove_invalid_values", "exponential_decay_length_penalty", "attention_dropout", "hidden_dropout",
        "dropout", "activation_dropout", "layerdrop", "resid_pdrop", "embd_pdrop", "attn_pdrop", "emb_pdrop", "resid_dropout",
        "embd_dropout", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        "classifier_dropout", "classifier_dropout_prob", "router_aux_loss_coef", "aux_loss_alpha", "router_jitter_noise"
    }
)  # fmt: skip
"""Config fields, at any depth, that do not change what a token's K and V are."""


def _canonical(value: Any, depth: int = 0, count: list[int] | None = None) -> Any:
    count = count if count is not None else [0]
    count[0] += 1
    if depth > MAX_CONFIG_DEPTH or count[0] > MAX_CONFIG_ITEMS:
        raise BadConfig(f"the config is deeper than {MAX_CONFIG_DEPTH} or has over {MAX_CONFIG_ITEMS} items")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > 64:
            raise BadConfig(f"the config holds {show(value)}")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadConfig(f"the config holds the number {value}")
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, str):
        if len(value) > 1 << 16:
            raise BadConfig(f"the config holds a text of {len(value)} characters")
        return value
    if isinstance(value, Mapping):
        kept = {str(key)[:200]: item for key, item in value.items() if str(key) not in NO_MEANING and item is not None}
        return {key: _canonical(item, depth + 1, count) for key, item in _with_rope(kept).items()}
    if isinstance(value, list | tuple):
        return [_canonical(item, depth + 1, count) for item in value]
    raise BadConfig(f"the config holds {show(value)}, which is no JSON")


def _with_rope(config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_scaling and partial_rotary_factor as transformers 5 writes them: one rope_parameters."""
    scaling, theta = config.get("rope_scaling"), config.get("rope_theta")
    if "rope_parameters" in config or "rope_type" in config or (theta is None and not isinstance(scaling, Mapping)):
        return config
    rope = dict(scaling) if isinstance(scaling, Mapping) else {}
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    moved = ("rope_theta", "partial_rotary_factor")
    rope.update({key: config[key] for key in moved if key in config})
    return {**{key: value for key, value in config.items() if key not in (*moved, "rope_scaling")}, "rope_parameters": rope}


def model_digest(config: Any, weights: str | Path | Sequence[str | Path] | None = None) -> bytes:
    """32 bytes (SHA-256) that are equal where two processes would compute the same KV for the same tokens.

    config: a mapping, or an object with `to_dict()`. All its fields count, at any depth, except those in NO_MEANING (a deny list: a new
    field that nobody has thought of makes two sides refuse each other, never read each other wrongly) and those that are null. Pass the
    same kind on both sides, best the parsed config.json: a transformers object adds its version's defaults.
    weights: a folder (its .safetensors files, otherwise its one .gguf file), or the files. Their digest covers the tensors' names, shapes
    and dtypes (safetensors) or the file's size (GGUF), and of every file the first, the last and 64 evenly spaced slices of 4 KiB.

    What it misses: weights that differ only outside those slices (a patch of a few tensors), adapters applied at run time (they stand
    among the manifest's content digests), and an engine's own numerics. The same weights sharded into other files give another digest.
    Without weights two fine-tunings of one model are equal.
    Raises BadConfig and BadWeights.
    """
    text = json.dumps(_canonical(as_mapping(config)), sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(b"kvbridge model 1\0" + text.encode("utf-8", "surrogatepass") + b"\0")
    if weights is not None:
        for part in sorted(_file_digest(path) for path in _weight_files(weights)):
            digest.update(part)
    return digest.digest()


def _weight_files(weights: str | Path | Sequence[str | Path]) -> list[Path]:
    if not isinstance(weights, str | Path):
        return [Path(path) for path in weights]
    folder = Path(weights)
    if not folder.is_dir():
        return [folder]
    tensors, gguf = sorted(folder.glob("*.safetensors")), sorted(folder.glob("*.gguf"))
    sharded = [path for path in tensors if path.name.startswith("model")]
    if tensors:
        # Mistral ships the same weights twice, as consolidated.safetensors too.
        return sharded or tensors
    if len(gguf) == 1:
        return gguf
    found = f"{len(gguf)} .gguf files" if gguf else "neither .safetensors nor .gguf files"
    raise BadWeights(f"the folder {folder} holds {found}", remedy="name the weight files themselves")


def _file_digest(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            description, start = (b"gguf", 0) if path.suffix == ".gguf" else _safetensors_header(file, size, path)
            digest = hashlib.sha256(struct.pack("<QQ", size - start, len(description)) + description)
            last = max(size - SLICE_BYTES, start)
            # Spaced over the data, so that padding or comments in a header change nothing.
            for i in range(SLICES + 2):
                file.seek(start + (last - start) * i // (SLICES + 1))
                digest.update(file.read(SLICE_BYTES))
            return digest.digest()
    except OSError as error:
        raise BadWeights(f"the weight file {path} cannot be read: {error.strerror}") from None


def _safetensors_header(file: Any, size: int, path: Path) -> tuple[bytes, int]:
    """(names, dtypes and shapes in canonical form, where the data begins)."""
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise BadWeights(f"the file {path} is no safetensors file")
    try:
        header = json.loads(file.read(length))
        entries = sorted((name, entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        return json.dumps(entries, separators=(",", ":")).encode(), 8 + length
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadWeights(f"the header of {path} is no safetensors header") from None


def manifest_for(
    geometry: ModelGeometry,
    codec: str,
    tokens: Sequence[int],
    request_id: str,
    *,
    model: bytes,
    lease: int,
    generation: int = 0,
    chunk_tokens: int = 1024,
    first_token: int = 0,
    per_layer: Mapping[int, str] | None = None,
    scales: Mapping[int, tuple[float, float]] | None = None,
    element: Element | None = None,
    layers: Sequence[int] | None = None,
    heads: tuple[int, int] | None = None,
    shard: Shard | None = None,
    content: Sequence[tuple[ContentKind, bytes]] = (),
    window_first: Mapping[int, int] | None = None,
    opaque: Mapping[int, OpaqueBytes] | None = None,
) -> Manifest:
    """The manifest of one request's KV, or of one rank's part of it: a group for each of the geometry's, and a codec for each layer.

    codec: the codec's name for all layers that `per_layer` (layer index -> name) does not list; latents take only raw. tokens: all token
    ids from position 0 on; the payload carries [first_token, len(tokens)). model: from `model_digest`. element: the pages' type, the
    geometry's if left out.
    layers: the layers carried, ascending, all that keep KV if left out. heads: (first, count) of the kv heads carried, all if left out;
    latents are whole on every TP rank, and a state is its rank's own. shard: the rank that packs.
    scales: layer index -> (key scale, value scale) of its fp8 sides. content: digests beside the tokens' (LoRA and so on).
    window_first: number of a sliding-window group -> the first token that the engine still has; otherwise the window's own first.
    opaque: layer index -> what its rows of full attention or latents are, where no codec knows them; they travel as they are.
    Raises BadConfig, SharedLayer, DraftLayer, UnknownCodec, NotCarried, and the WireError of a clause that the manifest would break.
    """
    per_layer, scales, opaque = per_layer or {}, scales or {}, opaque or {}
    if len(tokens) > MAX_TOKENS:
        raise BadConfig(f"{len(tokens)} tokens are over the limit of {MAX_TOKENS}", remedy="send less context")
    for index in (*per_layer, *scales, *opaque):
        if not 0 <= index < geometry.layers:
            raise BadConfig(f"there is no layer {index} among {geometry.layers}", remedy="count layers from 0")
    element, shard = element or geometry.element, shard or Shard()
    group_of = {index: number for number, group in enumerate(geometry.groups) for index in group.layers}
    groups: list[Group] = []
    codecs: list[SlotCodec] = []
    described: list[Layer] = []
    for index in sorted(group_of) if layers is None else layers:
        _check_carried(geometry, index)
        source = geometry.groups[group_of[index]]
        first = _first_token(source, first_token, len(tokens), (window_first or {}).get(group_of[index]))
        group = _group(source, first, len(tokens), heads, shard, is_opaque=index in opaque)
        slots = _slots(geometry, source, index, per_layer.get(index, codec), element, opaque.get(index))
        for entry, table in ((group, groups), (slots, codecs)):
            if entry not in table:
                table.append(entry)  # type: ignore[arg-type]
        described.append(Layer(index, groups.index(group), codecs.index(slots), *scales.get(index, (1.0, 1.0))))
    manifest = Manifest(
        model_digest=model,
        content=((ContentKind.TOKENS, token_digest(list(tokens))), *sorted(content)),
        request_id=request_id,
        lease=lease,
        generation=generation,
        chunk_tokens=chunk_tokens,
        groups=tuple(groups),
        codecs=tuple(codecs),
        layers=tuple(described),
        shard=shard,
    )
    manifest.check()
    return manifest


def _check_carried(geometry: ModelGeometry, index: int) -> None:
    if index >= geometry.layers:
        raise DraftLayer(f"layer {index} is none of the model's {geometry.layers}, so a draft model's")
    if index < 0:
        raise BadConfig(f"there is no layer {index}", remedy="count layers from 0")
    owner = dict(geometry.shared).get(index)
    if owner is not None:
        raise SharedLayer(f"layer {index} keeps no KV of its own, it reads that of layer {owner}")


def _first_token(group: LayerGroup, first_token: int, end_token: int, held: int | None) -> int:
    """Where the group's range begins: at first_token, for windows at what of the window the engine has."""
    if group.kind is not GroupKind.SLIDING_WINDOW:
        if held is not None:
            raise BadConfig("window_first names a group that has no window", remedy="see ModelGeometry.groups")
        return first_token
    first = max(0, end_token - group.window) if held is None else held
    if not 0 <= first < end_token:
        raise BadConfig(f"a window that begins at token {first} has none of the {end_token} tokens", remedy="say what the engine holds")
    return max(first, first_token)


def _group(source: LayerGroup, first: int, end: int, heads: tuple[int, int] | None, shard: Shard, is_opaque: bool) -> Group:
    if source.kind is GroupKind.STATE:
        block = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return Group(shard.tp_size, source.head_dim, block, block + BLOCK_TOKENS, shard.tp_rank, 1, source.kind)
    if source.kind is GroupKind.LATENT:
        return Group(1, source.head_dim, first, end, 0, 1, source.kind)
    # Rows that nobody interprets have one side only, as latents have.
    kind = GroupKind.LATENT if is_opaque else source.kind
    return Group(source.kv_heads, source.head_dim, first, end, *(heads or (0, source.kv_heads)), kind, 0 if is_opaque else source.window)


def _slots(geometry: ModelGeometry, group: LayerGroup, index: int, codec: str, element: Element, opaque: OpaqueBytes | None) -> SlotCodec:
    none = Coding(CodingKind.NONE)
    if group.kind is GroupKind.STATE:
        if opaque is not None:
            raise BadConfig(f"layer {index} is a state, whose size the geometry has", remedy="give it to ModelGeometry.from_config")
        state = dict(geometry.states)[index]
        return SlotCodec(opaque_coding(state.meaning, state.nbytes // BLOCK_TOKENS), none)
    if opaque is not None:
        if group.kind is GroupKind.SLIDING_WINDOW:
            raise NotCarried(f"layer {index} has a sliding window, whose rows cannot be opaque", remedy="choose raw or a declared codec")
        return SlotCodec(opaque_coding(opaque.meaning, opaque.nbytes), none)
    named = declared(codec)
    if group.kind is not GroupKind.LATENT:
        return named.for_layer(group.head_dim, element)
    if not named.lossless:
        raise NotCarried(f"layer {index} keeps latents, and codec {codec} is for keys and values", remedy="choose raw for this model")
    return SlotCodec(named.for_layer(group.head_dim, element).key, none)
