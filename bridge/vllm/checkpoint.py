"""Which files of a checkpoint vLLM 0.32 loads a model from: its configuration, and the weights that load_format and an index choose."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bridge.model.weight_files import indexed
from bridge.vllm.errors import UnsupportedEngine

ELSEWHERE = ("pt", "npcache", "tensorizer", "ipc_cache", "modelexpress")
"""Values of load_format with which weights come from other files than .safetensors, or from another process."""

INDEXED = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral")
"""Those with which an index leaves files out, as in DefaultModelLoader._prepare_weights. The others take all .safetensors files."""

MISTRAL_CONFIG = "params.json"


def loaded_weights(checkpoint: Path, load_format: str) -> list[Path]:
    """The weight files that vLLM loads, those of a folder sorted by name; none where there are none, or where they would be random.

    Raises UnsupportedEngine for a load_format whose weights cannot be compared. Raises BadWeights for an index that is none.
    """
    if load_format in ELSEWHERE:
        raise UnsupportedEngine(
            f"load_format is {load_format}, whose weights cannot be compared with another engine's",
            remedy="load .safetensors files, with load_format auto",
        )
    if checkpoint.is_file():
        return [checkpoint]
    tensors = sorted(checkpoint.glob("*.safetensors"))
    if load_format in INDEXED:
        official = [file for file in tensors if file.name.startswith("consolidated")]
        if load_format == "mistral" or (load_format == "auto" and official):
            return indexed(official, checkpoint / "consolidated.safetensors.index.json")
        tensors = indexed(tensors, checkpoint / "model.safetensors.index.json")
    return [*tensors, *sorted(checkpoint.glob("*.gguf"))]


def reads_config_json(model: Any) -> bool:
    """Whether the engine runs what the checkpoint's own config.json says. model: vLLM's ModelConfig."""
    elsewhere = getattr(model, "hf_config_path", None)
    return not model.hf_overrides and (not elsewhere or elsewhere == model.model)


def mistral_config(model: Any, checkpoint: Path) -> dict[str, Any]:
    """params.json as a field of a config, compared exactly, where the engine reads it instead of config.json. Raises UnsupportedEngine."""
    kind, file = str(getattr(model, "config_format", "auto")), checkpoint / MISTRAL_CONFIG
    if not file.is_file() or kind not in ("auto", "mistral") or (kind == "auto" and not any(checkpoint.glob("consolidated*.safetensors"))):
        return {}
    return {MISTRAL_CONFIG: {"quantization_config": read_json(file)}}


def read_json(file: Path) -> Any:
    """What a small file of the checkpoint holds. Raises UnsupportedEngine."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise UnsupportedEngine(f"{file} cannot be read as JSON", remedy="copy the whole checkpoint anew") from None


def on_this_host(name: str, revision: str | None = None, downloads: str | None = None) -> Path | None:
    """The folder or file of this name, or what was downloaded for it as a hub's name; None where neither is here.

    downloads: the folder of downloads, the hub's own unless given.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        return None  # another hub, whose models of the same name may be others
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=downloads, local_files_only=True))
    except Exception:  # the hub's library has many reasons, none of which is ours to tell apart
        return None
