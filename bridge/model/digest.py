"""What identifies a model: equal where two processes would compute the same KV for the same tokens."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bridge.model.config_fields import BadConfig, BadWeights, as_mapping, show
from bridge.model.weight_files import file_digest, weight_files

MAX_CONFIG_ITEMS = 1 << 17
MAX_CONFIG_DEPTH = 16
MAX_ADAPTER_CONFIG_BYTES = 1 << 20
MAX_NAME = 200
MAX_TEXT = 1 << 16
HASHING_THREADS = 4
"""hashlib and the disk both work outside Python's lock."""

NO_MEANING = frozenset(
    {
        "_name_or_path", "name_or_path", "_commit_hash", "architectures", "auto_map", "transformers_version", "tokenizer_class",
        "processor_class", "gguf_file", "dtype", "torch_dtype", "use_cache", "use_bfloat16", "torchscript", "return_dict",
        "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_router_logits",
        "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset", "attn_implementation",
        "_experts_implementation", "attn_impl", "_flash_attn_2_enabled", "gradient_checkpointing", "pretraining_tp",
        "initializer_factor", "init_std", "init_device", "id2label", "label2id", "num_labels", "problem_type",
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


EXACT = ("quantization_config", "compression_config")
"""Config fields inside which every name and their order count: they may map patterns of layers' names, the first of which counts."""


def _counted(depth: int, count: list[int]) -> None:
    count[0] += 1
    if depth > MAX_CONFIG_DEPTH or count[0] > MAX_CONFIG_ITEMS:
        raise BadConfig(f"the config is deeper than {MAX_CONFIG_DEPTH} or has over {MAX_CONFIG_ITEMS} items")


def _scalar(value: Any) -> Any:
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
        if len(value) > MAX_TEXT:
            raise BadConfig(f"the config holds a text of {len(value)} characters")
        return value
    raise BadConfig(f"the config holds {show(value)}, which is no JSON")


def _named(value: Mapping[Any, Any]) -> dict[str, Any]:
    """With texts as names, none of them cut and no two alike. Raises BadConfig."""
    names = [str(key) for key in value]
    longest = max(names, key=len, default="")
    if len(longest) > MAX_NAME:
        raise BadConfig(f"the config has a name of {len(longest)} characters, {show(longest)}", remedy=f"at most {MAX_NAME} are compared")
    if len(set(names)) < len(names):
        raise BadConfig("two names of the config are alike as texts")
    return dict(zip(names, value.values(), strict=True))


def _canonical(value: Any, depth: int, count: list[int]) -> Any:
    """The same for two configs that mean the same: without NO_MEANING and nulls, names in any order."""
    _counted(depth, count)
    if isinstance(value, Mapping):
        kept = {name: item for name, item in _named(value).items() if name not in NO_MEANING and item is not None}
        return {name: (_exact if name in EXACT else _canonical)(item, depth + 1, count) for name, item in _with_rope(kept).items()}
    if isinstance(value, list | tuple):
        return [_canonical(item, depth + 1, count) for item in value]
    return _scalar(value)


def _exact(value: Any, depth: int, count: list[int]) -> Any:
    """With every name, in the order given, since the first that matches may be the one that counts."""
    _counted(depth, count)
    if isinstance(value, Mapping):
        return {"pairs": [[name, _exact(item, depth + 1, count)] for name, item in _named(value).items()]}
    if isinstance(value, list | tuple):
        return [_exact(item, depth + 1, count) for item in value]
    return _scalar(value)


def _with_rope(config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_scaling and partial_rotary_factor as transformers 5 writes them: one rope_parameters."""
    scaling, theta = config.get("rope_scaling"), config.get("rope_theta")
    if "rope_parameters" in config or "rope_type" in config or (theta is None and scaling is None):
        return config
    if scaling is not None and not isinstance(scaling, Mapping):
        return config
    rope = dict(scaling or {})
    moved = ("rope_theta", "partial_rotary_factor")
    if any(rope.get(key) is not None and config.get(key) not in (None, rope[key]) for key in moved) or {"type", "rope_type"} <= rope.keys():
        return config  # it says a thing twice, and readers differ in which of the two they take
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    rope.update({key: config[key] for key in moved if key in config})
    return {**{key: value for key, value in config.items() if key not in (*moved, "rope_scaling")}, "rope_parameters": rope}


def model_digest(config: Any, weights: str | Path | Sequence[str | Path] | None = None, *, whole: bool = False) -> bytes:
    """32 bytes (SHA-256) that are equal where two processes would compute the same KV for the same tokens.

    config: a mapping, or an object with `to_dict()`. All its fields count, at any depth, except those in NO_MEANING (a deny list: a new
    field that nobody has thought of makes two sides refuse each other, never read each other wrongly) and those that are null. Pass the
    same kind on both sides, best the parsed config.json: a transformers object adds its version's defaults.
    Inside those in EXACT every name and their order count too.
    weights: a folder (its .safetensors files, those that its index names where there is one; otherwise its one .gguf file), or the files.
    Their digest covers the tensors' names, shapes, dtypes and places in the file (safetensors) or the first 64 MiB, with the header, and
    the size (GGUF), and of every file the first, the last and 64 evenly spaced slices of 4 KiB; with `whole` every byte, at the speed of
    the disk and of SHA-256. Digests of the two kinds are never equal. The files' own names count only where two hold a tensor of one name.

    What it misses: without `whole`, weights that differ only outside those slices (a patch of a few tensors); adapters applied at run time
    (adapter_digest stands among the manifest's content digests); and an engine's own numerics. The same weights sharded into other files
    give another digest. Without weights two fine-tunings of one model are equal.
    Raises BadConfig and BadWeights.
    """
    kind = b"kvbridge model 2, whole\0" if whole else b"kvbridge model 2\0"
    digest = hashlib.sha256(kind + _text(_canonical(as_mapping(config), 0, [0])) + b"\0")
    if weights is not None:
        files = weight_files(weights)
        with ThreadPoolExecutor(HASHING_THREADS) as threads:
            parts = list(threads.map(lambda path: file_digest(path, whole), files))
        if len(frozenset[str]().union(*(part.names for part in parts))) < sum(len(part.names) for part in parts):
            # Of a tensor that several files hold, engines take the one in the file whose name comes last, or is their rank's.
            named = sorted((os.fsencode(path.name), part.digest) for path, part in zip(files, parts, strict=True))
            digest.update(b"named\0" + b"".join(struct.pack("<Q", len(name)) + name + found for name, found in named))
        else:
            digest.update(b"".join(sorted(part.digest for part in parts)))
    return digest.digest()


def adapter_files(folder: Path) -> tuple[Path, Path]:
    """A LoRA's adapter_config.json and the file of its weights, the one that vLLM takes. Raises BadWeights."""
    config = folder / "adapter_config.json"
    for name in ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"):
        if config.is_file() and (folder / name).is_file():
            return config, folder / name
    raise BadWeights(f"{folder} holds no adapter_config.json with its adapter_model.safetensors", remedy="give the adapter's own folder")


def adapter_digest(folder: Path, *, whole: bool = False) -> bytes:
    """32 bytes (SHA-256) that are equal where two processes would apply the same LoRA: as model_digest, of a PEFT adapter's folder.

    Inside alpha_pattern, rank_pattern and every other field every name counts, and their order, since vLLM takes the first pattern that
    matches. The name of the base model does not count: the model's own digest does. Weights in PyTorch's own form (.bin, .pt) are always
    read whole, and of safetensors at most 65,536 tensors. Raises BadConfig and BadWeights.
    """
    config, weights = adapter_files(folder)
    try:
        with config.open("rb") as file:
            text = file.read(MAX_ADAPTER_CONFIG_BYTES + 1)
    except OSError as error:
        raise BadWeights(f"{config} cannot be read: {error.strerror}") from None
    if len(text) > MAX_ADAPTER_CONFIG_BYTES:
        raise BadConfig(f"{config} is too large", remedy=f"at most {MAX_ADAPTER_CONFIG_BYTES >> 20} MiB are compared")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise BadConfig(f"{config} is no JSON") from None
    if not isinstance(fields, dict):
        raise BadConfig(f"{config} holds no object")
    fields.pop("base_model_name_or_path", None)
    count = [0]
    meant = {name: _exact(item, 1, count) for name, item in _named(fields).items() if item is not None}
    return hashlib.sha256(b"kvbridge adapter 2\0" + _text(meant) + b"\0" + file_digest(weights, whole, adapter=True).digest).digest()


def _text(canonical: Any) -> bytes:
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "surrogatepass")
