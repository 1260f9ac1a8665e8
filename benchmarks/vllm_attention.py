"""The vLLM attention back end on one CUDA device, random weights: time per output token, tokens beside vLLM's own, and its store.

KVBRIDGE_ATTENTION=planes python benchmarks/vllm_attention.py speed turboquant_4bit_nc     this back end, in planes
KVBRIDGE_ATTENTION=slots  python benchmarks/vllm_attention.py speed turboquant_4bit_nc     in vLLM's slots
python benchmarks/vllm_attention.py speed {fp8,auto,turboquant_4bit_nc}                   vLLM's own back ends
python benchmarks/vllm_attention.py tokens OUT.json [--model M] [--dtype PRESET] [...]     a small, sensitive model
python benchmarks/vllm_attention.py compare A.json B.json ...                              how those differ from the first
python benchmarks/vllm_attention.py oracle A.json                                          how those differ from transformers
python benchmarks/vllm_attention.py store                                                  no vLLM needed
python benchmarks/vllm_attention.py ties                                                   what an error does, by the context; a CPU will do

`speed` is Qwen3-30B-A3B's shape, prompts of 8,192 tokens, decode in CUDA graphs, no inductor. Figures: the last 96 steps of a run of 129
output tokens, when the whole batch decodes; and the difference between runs of 129 and 33, over 96, which has the prompts' noise in it.
`tokens` generates greedily from many prompts; contexts are equal up to the first token that differs, and so are compared up to there.
Its models (benchmarks/vllm_models.py) have what attention may have: qwen3 nothing, gemma2 a soft cap, gemma3 windows, gpt_oss sinks.
vLLM's own TurboQuant back end runs only the first, so `oracle` (benchmarks/vllm_oracle.py) computes what all should say, and what they
would with one of these left out. A TurboQuant cache needs tokens made with `--chunk`; vLLM for CPUs makes them with `--dtype auto`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from benchmarks.vllm_models import MODELS, VOCABULARY, digest, make_model
from benchmarks.vllm_oracle import oracle

QWEN3_30B = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
    num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6,
    rope_theta=1000000.0, hidden_act="silu", tie_word_embeddings=False, attention_bias=False, torch_dtype="bfloat16", bos_token_id=1,
    eos_token_id=2, use_sliding_window=False, router_aux_loss_coef=0.001, output_router_logits=False, initializer_range=0.02,
)  # fmt: skip


def name_of(dtype: str) -> str:
    return f"{dtype} {os.environ.get('KVBRIDGE_ATTENTION', '') or 'vLLM'}"


def engine(path: str, keep: list[str] | None = None, **settings):
    """keep: parts of vLLM's own back end that stay in ours, to find what a difference comes from."""
    from backends.cuda.vllm_attention import plugin

    plugin.register()  # an installed package is asked by vLLM itself
    if keep:
        from backends.cuda.vllm_attention import backend

        if "prefill" in keep:
            backend.flash_attention_version = lambda chosen: chosen
        if "store" in keep:
            backend.AttendImpl.do_kv_cache_update = backend.stock.TurboQuantAttentionImpl.do_kv_cache_update
    from vllm import LLM

    began = time.time()
    llm = LLM(model=path, skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=False, **settings)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    kinds = [f"{type(layer.impl).__name__}/{layer.kv_cache_dtype}" for layer in layers if hasattr(layer, "impl")]
    print(f"boot {time.time() - began:.1f} s:", {kind: kinds.count(kind) for kind in sorted(set(kinds))}, flush=True)
    return llm


def speed(dtype: str, batch: int, tokens: int, repeats: int) -> None:
    from vllm import SamplingParams

    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(QWEN3_30B))
    llm = engine(
        folder, load_format="dummy", kv_cache_dtype=dtype, max_model_len=10240, max_num_seqs=batch, max_num_batched_tokens=16384,
        gpu_memory_utilization=0.9,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [batch]},
    )  # fmt: skip
    stamps: list[float] = []
    plain = llm.llm_engine.step

    def step():
        made = plain()
        stamps.append(time.perf_counter())
        return made

    llm.llm_engine.step = step

    def run(count: int) -> float:
        prompts = [{"prompt_token_ids": [random.randrange(10, 150000) for _ in range(tokens)]} for _ in range(batch)]
        stamps.clear()
        began = time.perf_counter()
        llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False), use_tqdm=False
        )
        return time.perf_counter() - began

    run(2)
    short = min(run(33) for _ in range(repeats))
    long = min(run(129) for _ in range(repeats))
    # The engine hands out a step's tokens while the next one runs, so that single steps look uneven; their sum does not.
    mean = (stamps[-1] - stamps[-97]) / 96 * 1e3
    median = statistics.median(b - a for a, b in itertools.pairwise(stamps[-97:])) * 1e3
    print(
        f"RESULT {name_of(dtype)} batch {batch} x {tokens}: last 96 steps, mean {mean:.2f} ms, median {median:.2f} ms;"
        f" difference {(long - short) / 96 * 1e3:.2f} ms, 33 tokens {short:.2f} s",
        flush=True,
    )


def tokens(
    out: Path, model: str, dtype: str, splits: int, prompts: int, count: int, window: int, chunk: int, one_group: bool, keep: list[str]
) -> None:  # fmt: skip
    """chunk: prompts are taken in chunks of so many tokens, each prompt's its own. 0: steps of 512 tokens, which prompts share.

    one_group: layers with a window keep whole sequences, so that vLLM pads no layer's pages to the size of another's.
    """
    import torch
    from vllm import SamplingParams

    folder = tempfile.mkdtemp()
    make_model(model, folder, window)
    shared = dict(kv_cache_dtype=dtype, max_model_len=2048, max_num_seqs=32, disable_hybrid_kv_cache_manager=one_group or None)
    if chunk:
        shared |= dict(max_num_batched_tokens=32 * max(chunk, 512), long_prefill_token_threshold=chunk)
    else:
        shared |= dict(max_num_batched_tokens=512)
    if torch.cuda.is_available():
        llm = engine(
            folder, keep, **shared, kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.1,
            attention_config={"tq_max_kv_splits_for_cuda_graph": splits},
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32]},
        )  # fmt: skip
    else:  # vLLM for CPUs: a plain cache, to check the oracle
        llm = engine(folder, **shared, kv_cache_memory_bytes=1 << 30, block_size=32, enforce_eager=True)
    rng = random.Random(3)  # lengths beyond the 512 tokens of a step: prompts in chunks, and batches of prompts and decodes
    asked = [[rng.randrange(3, VOCABULARY) for _ in range(rng.choice((1, 7, 100, 500, 900, 1300)))] for _ in range(prompts)]
    made = llm.generate(
        [{"prompt_token_ids": ids} for ids in asked],
        SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False, logprobs=2),
        use_tqdm=False,
    )
    rows = []
    for ids, request in zip(asked, made, strict=True):
        given = request.outputs[0]
        chosen = list(given.token_ids)
        best = [sorted(((p.logprob, t) for t, p in step.items()), reverse=True)[:2] for step in given.logprobs]
        said = [step[token].logprob for step, token in zip(given.logprobs, chosen, strict=True)]
        rows.append({"prompt": len(ids), "ids": ids, "tokens": chosen, "best": best, "said": said})
    about = {"model": model, "dtype": dtype, "window": window, "chunk": chunk, "digest": digest(folder)}
    out.write_text(json.dumps({"name": f"{name_of(dtype)} splits {splits} {keep}", **about, "rows": rows}))
    print("made", out, flush=True)


def compare(paths: list[Path]) -> None:
    """Against the first file, up to the first token that differs, by length of the context: a rounding weighs more in a short one."""
    first, *others = [json.loads(path.read_text()) for path in paths]
    print(f"{first['name']}: {len(first['rows'])} prompts of {len(first['rows'][0]['tokens'])} tokens")
    for other in others:
        for name, low, high in (("under 100", 0, 100), ("100 and more", 100, 1 << 30)):
            gaps, margins = [], []
            for a, b in zip(first["rows"], other["rows"], strict=True):
                for step, (s, t) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
                    inside = low <= a["prompt"] + step < high
                    if s != t:
                        margins += [a["best"][step][0][0] - a["best"][step][1][0]] * inside
                        break
                    gaps += [abs(a["best"][step][0][0] - b["best"][step][0][0])] * inside
            gaps.sort()
            print(
                f"RESULT {other['name']}, contexts of {name}: {len(gaps)} equal tokens, {len(margins)} prompts part;"
                f" |difference of log-probabilities| mean {statistics.mean(gaps):.4f}, median {statistics.median(gaps):.4f}, 99 %"
                f" {gaps[len(gaps) * 99 // 100]:.3f},"
                f" most {gaps[-1]:.3f}; margins where tokens part: median {statistics.median(margins or [0]):.3f}, most"
                f" {max(margins, default=0):.3f}",
                flush=True,
            )


def ties(prompts: int, contexts: list[str]) -> None:
    """What an error of attention does to the small model's log-probabilities, by the length of the context. Runs on a CPU.

    Values are decoded ones (code * scale + zero) in the layers that have a TurboQuant cache. From some position on attention is multiplied
    with 1 + size * noise before it is rounded to bf16: 1e-7 is another order of the sums, 2.4e-4 the error of either kernel of `attend`.
    An engine perturbs all positions behind the prompt: those of the prompt are computed without the cache.
    """
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    generator, noise, first, flipped = torch.Generator().manual_seed(1), [0.0], [0], []

    def attention(module, q, k, v, mask, scaling, **_):
        n = k.shape[2]
        q, k, v = q.float(), k.float(), v.float()
        inside = 2 <= module.layer_idx < 10
        if inside:
            zero = v.amin(-1, keepdim=True)
            scale = ((v.amax(-1, keepdim=True) - zero) / 15).clamp_min(1e-8)
            v = ((v - zero) / scale + 0.5).floor() * scale.half().float() + zero.half().float()
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT) * scaling + torch.full((n, n), -torch.inf).triu(1)
        exact = scores.softmax(-1) @ v
        made = exact.clone()
        if inside:
            behind = exact[:, :, first[0] :]
            made[:, :, first[0] :] = behind * (1 + noise[0] * torch.randn(behind.shape, generator=generator))
            flipped.append((made[:, :, -1].bfloat16() != exact[:, :, -1].bfloat16()).float().mean().item())
        return made.bfloat16().transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("decoded", attention)
    with tempfile.TemporaryDirectory() as folder:
        make_model("qwen3", folder, 0)
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="decoded").eval()
    for n, perturbed in (map(int, context.split(":")) for context in contexts):
        asked = torch.randint(3, 512, (max(8, min(prompts, 4000 // n)), n), generator=generator)
        with torch.no_grad():
            noise[0], first[0] = 0.0, n - perturbed
            base = model(asked, logits_to_keep=1).logits[:, -1].float().log_softmax(-1).max(-1)
            for size in (1e-7, 2.4e-4):
                noise[0] = size
                flipped.clear()
                got = model(asked, logits_to_keep=1).logits[:, -1].float().log_softmax(-1)
                gap = (got.gather(1, base.indices[:, None])[:, 0] - base.values).abs()
                changed = statistics.mean(flipped) * 100
                print(
                    f"RESULT context of {n}, its last {perturbed} positions perturbed by {size:.1e}: {changed:.2f} % of the last one's"
                    f" roundings to bf16 change; |difference of log-probabilities| median {gap.median().item():.4f}, most"
                    f" {gap.max().item():.3f}",
                    flush=True,
                )


def store_times() -> None:
    import torch

    from backends.cuda.vllm_attention.store import store
    from backends.kernels.attend.pages import slot_bytes
    from benchmarks.attend import time_graph

    for preset in ("turboquant_4bit_nc", "turboquant_k8v4", "turboquant_3bit_nc"):
        for count in (32, 256, 16384):
            cache = torch.zeros(2 * count // 16 + 1, 16, 4, slot_bytes(preset, 128), dtype=torch.uint8, device="cuda")
            places = torch.randperm(cache.shape[0] * 16, device="cuda")[:count]
            key, value = torch.randn(count, 40, 128, device="cuda", dtype=torch.bfloat16).split((36, 4), 1)
            for layout in ("slots", "planes"):
                call = functools.partial(store, key[:, 32:], value, cache, places, preset, layout)
                times = {per: time_graph([functools.partial(call, per)] * 20) for per in (1, 2, 4, 8)}
                print(f"store {preset} {layout} {count} tokens x 4 heads:", {n: round(t, 1) for n, t in times.items()}, "us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("speed")
    one.add_argument("dtype")
    one.add_argument("--batch", type=int, default=32)
    one.add_argument("--tokens", type=int, default=8192)
    one.add_argument("--repeats", type=int, default=1)
    two = commands.add_parser("tokens")
    two.add_argument("out", type=Path)
    two.add_argument("--model", default="qwen3", choices=MODELS)
    two.add_argument("--dtype", default="turboquant_4bit_nc")
    two.add_argument("--splits", type=int, default=32)
    two.add_argument("--prompts", type=int, default=64)
    two.add_argument("--count", type=int, default=64)
    two.add_argument("--window", type=int, default=0)
    two.add_argument("--chunk", type=int, default=0)
    two.add_argument("--one-group", action="store_true")
    two.add_argument("--keep", nargs="*", default=[], choices=("prefill", "store"))
    commands.add_parser("compare").add_argument("paths", type=Path, nargs="+")
    four = commands.add_parser("oracle")
    four.add_argument("path", type=Path)
    four.add_argument("--prompts", type=int, default=1 << 30)
    commands.add_parser("store")
    three = commands.add_parser("ties")
    three.add_argument("--prompts", type=int, default=64)
    three.add_argument(
        "--contexts", nargs="+", default=["1:1", "2:1", "8:1", "40:1", "40:33", "40:39", "140:40", "540:40"], help="tokens:perturbed"
    )
    args = parser.parse_args()
    if args.command == "speed":
        speed(args.dtype, args.batch, args.tokens, args.repeats)
    elif args.command == "tokens":
        tokens(args.out, args.model, args.dtype, args.splits, args.prompts, args.count, args.window, args.chunk, args.one_group, args.keep)
    elif args.command == "compare":
        compare(args.paths)
    elif args.command == "oracle":
        oracle(args.path, args.prompts)
    elif args.command == "ties":
        ties(args.prompts, args.contexts)
    else:
        store_times()


if __name__ == "__main__":
    main()
