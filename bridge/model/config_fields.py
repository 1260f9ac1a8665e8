"""Reading a model's Hugging Face config: values that are bounded, agree with each other, and are refused in a sentence otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import KVBridgeError


class GeometryError(KVBridgeError):
    """A model's KV cannot be described."""

    clause = "geometry"


class BadConfig(GeometryError):
    """A config that is no config: numbers that are missing, impossible or contradict each other."""

    clause = "bad_config"
    remedy = "pass the config.json that belongs to the weights, unchanged"


class UnsupportedModel(GeometryError):
    """A model whose KV this version cannot carry without giving wrong tokens."""

    clause = "unsupported_model"
    remedy = "this model cannot be handed off yet; let the decoder prefill it itself"


class BadWeights(GeometryError):
    """Weight files that cannot be read, or of which it is unclear which are meant."""

    clause = "bad_weights"


def as_mapping(config: Any) -> Mapping[str, Any]:
    plain = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(plain, Mapping):
        raise BadConfig(f"a config is a mapping or has to_dict(), not a {type(config).__name__}")
    return plain


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(the outermost part, the part that describes the language model): multimodal models nest it, at most three deep."""
    inner = config
    for _ in range(3):
        for key in ("text_config", "llm_config", "language_config", "thinker_config"):
            if isinstance(inner.get(key), Mapping):
                inner = inner[key]
                break
        else:
            break
    return config, inner


def show(value: Any) -> str:
    """A value for a message, however large it is."""
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    return repr(value) if isinstance(value, float) else f"a {type(value).__name__}"


def text(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    return value if isinstance(value, str) and len(value) <= 100 else ""


def bounded(value: Any, what: str, key: str, limit: int) -> int:
    if isinstance(value, list | tuple | Mapping):
        raise UnsupportedModel(f"{key} differs between layers, which is not supported")
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadConfig(f"{key} is {show(value)}, which is no integer")
    if not 1 <= value <= limit:
        raise BadConfig(f"{key} is {show(value)}; {what} must lie within 1 to {limit}")
    return value


def number(config: Mapping[str, Any], what: str, limit: int, keys: Sequence[str]) -> int:
    """The one number that the given spellings agree on. Raises BadConfig where there is none, or more than one."""
    found = optional(config, what, limit, keys)
    if found is None:
        raise BadConfig(f"the config does not say {what} ({', '.join(keys)})")
    return found


def optional(config: Mapping[str, Any], what: str, limit: int, keys: Sequence[str]) -> int | None:
    found = {key: bounded(config[key], what, key, limit) for key in keys if config.get(key) is not None}
    if len(set(found.values())) > 1:
        raise BadConfig("the config contradicts itself: " + ", ".join(f"{key} is {value}" for key, value in found.items()))
    return next(iter(found.values()), None)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadConfig(f"{key} is {show(value)}, neither true nor false")
    return value


def refuse(feature: str, because: str) -> None:
    raise UnsupportedModel(f"the model has {feature} ({because}), which is not supported")
