"""Small random models, one for each thing that attention may have, as Hugging Face folders that vLLM loads.

| model | attention |
|---|---|
| qwen3 | plain, or with a window in all layers |
| gemma2 | a soft cap in all layers, a window in every second one |
| gemma3 | a window in every second layer |
| gpt_oss | sinks in all layers, a window in every second one; both of its two experts always work: no near tie chooses one |

Twelve layers: with a TurboQuant cache the first and last two keep a bf16 one. Weights are spread so that a wrong key changes the next
token; the soft cap and the sinks lie where the random scores do, so that leaving them out shows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

MODELS = ("qwen3", "gemma2", "gemma3", "gpt_oss")
VOCABULARY, LAYERS, WINDOW, SOFTCAP = 512, 12, 128, 5.0
SMALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=16,
    num_key_value_heads=2, head_dim=128, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    initializer_range=0.1,
)  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def make_model(name: str, folder: str, window: int) -> None:
    """Writes bf16 weights, the same ones each time. window: 0 is none for qwen3 and WINDOW for the others."""
    import torch
    import transformers

    torch.manual_seed(0)
    some = window or WINDOW
    if name == "qwen3":
        extra = dict(use_sliding_window=True, sliding_window=window, max_window_layers=0) if window else {}
        config = transformers.Qwen3Config(**SMALL, rope_theta=10000.0, tie_word_embeddings=True, **extra)
        model = transformers.Qwen3ForCausalLM(config)
    elif name == "gemma2":
        config = transformers.Gemma2Config(
            **SMALL, query_pre_attn_scalar=128, sliding_window=some, layer_types=ALTERNATING, attn_logit_softcapping=SOFTCAP,
            tie_word_embeddings=True,
        )  # fmt: skip
        model = transformers.Gemma2ForCausalLM(config)
    elif name == "gemma3":
        config = transformers.Gemma3TextConfig(
            **SMALL, query_pre_attn_scalar=128, sliding_window=some, layer_types=ALTERNATING, tie_word_embeddings=True
        )
        model = transformers.Gemma3ForCausalLM(config)
    elif name == "gpt_oss":
        config = transformers.GptOssConfig(
            **SMALL, sliding_window=some, layer_types=ALTERNATING, num_local_experts=2, num_experts_per_tok=2, tie_word_embeddings=False
        )
        model = transformers.GptOssForCausalLM(config)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.normal_(5.0, 1.0)
                layer.self_attn.q_proj.weight *= 0.4  # without norms of queries and keys scores are so far apart that bf16 alone moves them
    else:
        raise ValueError(f"unknown model {name!r}: use one of {', '.join(MODELS)}")
    model.to(torch.bfloat16).save_pretrained(folder)


def digest(folder: str) -> str:
    """Of the weights: two machines' versions of torch and transformers may draw other ones."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(folder).glob("*.safetensors")))).hexdigest()[:16]
