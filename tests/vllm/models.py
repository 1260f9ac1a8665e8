"""The models of these tests, as Hugging Face folders that vLLM loads: a small one whose output depends on every bit, and SmolLM2."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bridge.cache_folder import cache_folder
from bridge.demo.model import load_model

VOCABULARY = 512
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
"""What the random models have in common."""


def sensitive_model() -> Path:
    """Qwen3 of 6 layers, 2 kv heads of 64, random weights of a spread (0.3) at which a wrong key changes the next token. 2.5 MB."""
    return _made("qwen3-random-6-1", _make_sensitive)


def _make_sensitive(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _save(Qwen3ForCausalLM, Qwen3Config(**SMALL, rope_theta=10000.0, tie_word_embeddings=True), folder)


WINDOW = 80


def windowed_model() -> Path:
    """Gemma 3 of 6 layers, every second one with a window of 80 tokens: two KV cache groups. Random weights, as sensitive."""
    return _made("gemma3-random-6-2", _make_windowed)


def _make_windowed(folder: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **SMALL,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 3,
        tie_word_embeddings=False,
    )
    _save(Gemma3ForCausalLM, config, folder)


def _save(model: Any, config: Any, folder: Path) -> None:
    """A model of random weights, the same ones each time."""
    import torch

    torch.manual_seed(0)
    model(config).to(torch.bfloat16).save_pretrained(folder)


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, dequantised to fp32 by the demonstration's loader. 540 MB."""
    return _made("smollm2-hf-1", _make_smollm2)


def _make_smollm2(folder: Path) -> None:
    load_model()
    (copy,) = sorted(cache_folder().glob("smollm2-135m-instruct-*/"))[-1:]
    config = json.loads((copy / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    os.link(copy / "model.safetensors", folder / "model.safetensors")


def _made(name: str, make: object) -> Path:
    folder = cache_folder() / "tests" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(dir=folder.parent))
        make(making)  # type: ignore[operator]
        try:
            os.replace(making, folder)
        except OSError:  # another process was faster
            shutil.rmtree(making, ignore_errors=True)
    return folder


def prompt(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    """Token ids that repeat nothing and depend on the seed."""
    state, tokens = (seed * 7919 + 12345) & 0x7FFFFFFF, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        tokens.append(3 + (state >> 8) % (vocabulary - 3))
    return tokens


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA of rank 8 for the sensitive model, as PEFT writes it, whose tokens are others."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    heads = {"q_proj": SMALL["num_attention_heads"], "v_proj": SMALL["num_key_value_heads"]}
    tensors = {}
    for layer in range(SMALL["num_hidden_layers"]):
        for name, count in heads.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(8, SMALL["hidden_size"], generator=generator) * 0.3
            tensors[f"{at}.lora_B.weight"] = torch.randn(count * SMALL["head_dim"], 8, generator=generator) * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": sorted(heads),
        "bias": "none",
        "base_model_name_or_path": str(folder),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
