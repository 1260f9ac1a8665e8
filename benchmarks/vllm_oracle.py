"""What an engine's log-probabilities should be: the same small model in transformers, fp32, along the tokens that the engine chose.

Attention is written out here, in fp32, with keys and values that were rounded to bf16 and, where the engine reads its cache, went through
the reference encoder and decoder. Which keys a position reads from the cache is vllm_attention/backend.py's rule, see `from_cache`.
Beside it the same with one thing left out (the soft cap, the sinks, the windows, the codec): if that is not clearly worse, the comparison
says nothing of that thing.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.vllm_models import LAYERS, digest, make_model

ROWS = 128
"""A later chunk of a prompt of up to so many tokens reads all from the cache, itself too (backend.ROWS)."""


def from_cache(prompt: int, tokens: int, chunk: int) -> list[int]:
    """For each of `tokens` positions the first one whose key it reads as it was computed; keys before it come from the cache.

    Prompts are taken in chunks of `chunk`. A first chunk reads nothing from the cache, a longer later one what lies before it; short ones,
    chunks of one token and decode tokens read everything from there.
    """
    first = []
    for start in range(0, prompt, chunk):
        count = min(chunk, prompt - start)
        short = count == 1 or (start > 0 and count <= ROWS)
        first += [tokens if short else start] * count
    return first + [tokens] * (tokens - prompt)


def make_attention(state: dict[str, Any]) -> Any:
    """transformers' interface. state: "left_out", "preset" (empty: no codec), "cached" bool [n, n]: row reads column from the cache."""
    import torch

    from bridge.codecs import declared, reference
    from bridge.wire.coding import Element

    def through(x: torch.Tensor, coding: Any) -> torch.Tensor:
        raw = x.cpu().numpy()
        return torch.from_numpy(reference.decode(*reference.encode(raw, coding), coding, raw.shape[-1])).to(x.device)

    def attention(module, q, k, v, mask, scaling, softcap=None, sliding_window=None, s_aux=None, **_):
        left_out, n, group = state["left_out"], k.shape[2], q.shape[1] // k.shape[1]
        k, v = k.bfloat16().float(), v.bfloat16().float()
        behind = torch.arange(n, device=q.device)[:, None] - torch.arange(n, device=q.device)[None, :]
        hidden = behind < 0
        if sliding_window and left_out != "windows":
            hidden = hidden | (behind >= sliding_window)

        def scores_of(keys: torch.Tensor) -> torch.Tensor:
            scores = (q @ keys.repeat_interleave(group, 1).mT) * scaling
            return softcap * torch.tanh(scores / softcap) if softcap and left_out != "soft cap" else scores

        scores, cached = scores_of(k), None
        if state["preset"] and left_out != "codec" and 2 <= module.layer_idx < LAYERS - 2:
            codec = declared(state["preset"]).for_layer(k.shape[3], Element.BF16)
            cached, decoded = state["cached"], through(v, codec.value)
            scores = torch.where(cached, scores_of(through(k, codec.key)), scores)
        scores = scores.masked_fill(hidden, -torch.inf)
        if s_aux is not None and left_out != "sinks":
            scores = torch.cat((scores, s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        weights = scores.softmax(-1)[..., :n]
        if cached is None:
            made = weights @ v.repeat_interleave(group, 1)
        else:
            made = (weights * ~cached) @ v.repeat_interleave(group, 1) + (weights * cached) @ decoded.repeat_interleave(group, 1)
        return made.transpose(1, 2).contiguous(), None

    return attention


def differences(run: dict[str, Any], left_outs: list[str]) -> dict[str, list[tuple[int, float, bool]]]:
    """What was left out -> for each token of the engine its context, its log-probability less the oracle's, and whether both chose it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    preset = run["dtype"] if run["dtype"].startswith("turboquant") else ""
    if preset and not run["chunk"]:
        raise SystemExit("how these prompts were cut into chunks is not known: make the tokens with --chunk")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state: dict[str, Any] = {"preset": preset}
    ALL_ATTENTION_FUNCTIONS.register("written_out", make_attention(state))
    with tempfile.TemporaryDirectory() as folder:
        make_model(run["model"], folder, run["window"])
        if digest(folder) != run["digest"]:
            raise SystemExit("the weights drawn here are not the engine's: run this with the same versions of torch and transformers")
        plain = {"experts_implementation": "eager"} if run["model"] == "gpt_oss" else {}  # grouped products are made for bf16
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="written_out", **plain)
    model = model.eval().to(device)
    found: dict[str, list[tuple[int, float, bool]]] = {left_out: [] for left_out in left_outs}
    for row in run["rows"]:
        prompt, tokens = row["prompt"], row["tokens"]
        ids = torch.tensor([row["ids"] + tokens[:-1]], device=device)
        n = ids.shape[1]
        first = torch.tensor(from_cache(prompt, n, run["chunk"] or n), device=device)
        state["cached"] = torch.arange(n, device=device)[None, :] < first[:, None]
        for left_out in left_outs:
            state["left_out"] = left_out
            with torch.no_grad():
                says = model(ids, logits_to_keep=len(tokens), use_cache=False).logits[0].float().log_softmax(-1).cpu()
            for step, (token, said) in enumerate(zip(tokens, row["said"], strict=True)):
                found[left_out].append((prompt + step, said - says[step, token].item(), says[step].argmax().item() == token))
    return found


def oracle(path: Path, prompts: int) -> None:
    """Prints the differences between an engine's log-probabilities and these, and those of each control. prompts: the first so many."""
    run = json.loads(path.read_text())
    run["rows"] = run["rows"][:prompts]
    features = {"gemma2": ["soft cap", "windows"], "gemma3": ["windows"], "gpt_oss": ["sinks", "windows"]}
    controls = features.get(run["model"], ["windows"] if run["window"] else [])
    found = differences(run, ["", *controls, *["codec"] * run["dtype"].startswith("turboquant")])
    for name, low, high in (("under 100", 0, 100), ("100 and more", 100, 1 << 30)):
        usual = 0.0
        for left_out, rows in found.items():
            gaps = sorted(abs(gap) for context, gap, _ in rows if low <= context < high)
            if not gaps:
                continue
            same = statistics.mean(chosen for context, _, chosen in rows if low <= context < high)
            mean = statistics.mean(gaps)
            usual = usual or mean
            how, times = (f"WITHOUT {left_out}", f" ({mean / usual:.1f} times)") if left_out else ("as it should be", "")
            print(
                f"RESULT {run['model']} {run['name']}, contexts of {name}, oracle {how}: {len(gaps)} tokens;"
                f" |difference of log-probabilities| mean {mean:.4f}{times}, median {statistics.median(gaps):.4f},"
                f" 99 % {gaps[len(gaps) * 99 // 100]:.3f}, most {gaps[-1]:.3f}; the oracle's first choice too: {same * 100:.1f} %",
                flush=True,
            )
