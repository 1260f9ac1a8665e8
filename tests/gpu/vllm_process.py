"""Runs in an environment with vLLM (see test_vllm_attention.test_inside_vllm): writes what the back end answers as JSON to argv[1].

vLLM's classes, metadata builder and cache view are the real ones. What needs a GPU is replaced: `attend` by its float64 reference,
FlashAttention and the expansion of the cache by plain attention; the store of one step runs under Triton's interpreter.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from backends.cuda.vllm_attention import backend, plugin
from backends.cuda.vllm_attention.refusals import UnsupportedAttention
from backends.kernels.attend import reference
from backends.kernels.attend.pages import Pages, slot_bytes
from bridge.codecs import declared
from bridge.codecs import reference as reference_encoder
from bridge.wire.coding import Element

PRESET, PAGE, HEADS, GROUP, DIM = "turboquant_4bit_nc", 16, 2, 3, 64
LAYOUT = os.environ[plugin.SWITCH]
CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_seqs=8),
    compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
    parallel_config=SimpleNamespace(use_ubatching=False, decode_context_parallel_size=1),
    model_config=SimpleNamespace(max_model_len=256),
    attention_config=SimpleNamespace(tq_max_kv_splits_for_cuda_graph=32),
    speculative_config=None,
)
GEN = torch.Generator().manual_seed(5)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention of the last q.shape[0] tokens of k, v [T, H, D], in float64."""
    q, k, v = q.double(), *(x.double().repeat_interleave(GROUP, 1) for x in (k, v))
    behind = (torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - torch.arange(k.shape[0])[None, :]).expand(q.shape[1], -1, -1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    scores = scores.masked_fill((behind < 0) | ((behind >= window) if window else torch.zeros_like(behind, dtype=torch.bool)), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def make_impl(backend_class: type, window: int) -> backend.AttendImpl:
    class Impl(backend_class.get_impl_cls()):  # type: ignore[misc]
        def make_scratch(self, rows: int, tokens: int) -> backend.Scratch:
            return backend.Scratch(None, torch.empty(rows, self.num_heads), torch.arange(tokens + 1, dtype=torch.int32))

        def _flash_attn_varlen(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
            ends = cu_seqlens_q.tolist()
            return torch.cat([plain(q[a:b], k[a:b], v[a:b], window) for a, b in itertools.pairwise(ends)]).to(q.dtype)

        def _continuation_prefill(self, layer, q, k, v, slots, table, cached, length, *_):
            keys, values = reference.decode(Pages(slots.contiguous(), PRESET, "slots", DIM, PAGE), table[0], cached)
            return plain(q, torch.cat((keys, k.double())), torch.cat((values, v.double())), window).to(q.dtype)

    return Impl(HEADS * GROUP, DIM, DIM**-0.5, HEADS, None, window or None, PRESET)


@dataclass
class Request:
    """cached: tokens of earlier steps. new: tokens of this step, 0 for a row of padding."""

    cached: int
    new: int


def step(backend_class: type, requests: list[Request], window: int = 0, upper_bound: bool = True) -> float:
    """One step of one layer: relative error of the whole output."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    impl = make_impl(backend_class, window)
    layer = torch.nn.Module()
    lengths = [r.cached + r.new for r in requests]
    pages = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(pages) + 1, generator=GEN).tolist()
    raw = torch.full((len(order), PAGE, HEADS, slot_bytes(PRESET, DIM)), 0xFF, dtype=torch.uint8)
    kv_cache = raw.transpose(1, 2)  # [pages, heads, tokens, slot], as vLLM gives it
    table = torch.full((len(requests), max(pages) + 1), 0x7FFFFFF0, dtype=torch.int32)
    for row, count in zip(table, pages, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    k, v = (torch.randn(sum(lengths), HEADS, DIM, generator=GEN).half() for _ in range(2))
    ends = [0]
    for n in lengths:
        ends.append(ends[-1] + n)
    places = torch.cat([table[i, torch.arange(n) // PAGE].long() * PAGE + torch.arange(n) % PAGE for i, n in enumerate(lengths)])
    old = torch.cat([torch.arange(a, a + r.cached) for a, r in zip(ends, requests, strict=False)])
    new = torch.cat([torch.arange(b - r.new, b) for b, r in zip(ends[1:], requests, strict=True)])
    rows = [max(r.new, 1) for r in requests]  # a row of padding is one token without a place
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    spread = torch.cat([torch.arange(a, a + r.new) for a, r in zip(starts.tolist(), requests, strict=False)])
    mapping = torch.full((int(starts[-1]),), -1, dtype=torch.int64)
    mapping[spread] = places[new]
    key, value = (torch.zeros(int(starts[-1]), HEADS, DIM, dtype=torch.float16) for _ in range(2))
    key[spread], value[spread] = k[new], v[new]
    query = torch.randn(int(starts[-1]), HEADS * GROUP, DIM, generator=GEN).half()

    store_rows(k[old], v[old], raw, places[old], PRESET, LAYOUT)
    impl.do_kv_cache_update(layer, key, value, kv_cache, mapping)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=seq_lens, num_reqs=len(requests), num_actual_tokens=len(query),
        max_query_len=max(rows), max_seq_len=max(lengths), block_table_tensor=table, slot_mapping=mapping,
        seq_lens_cpu_upper_bound=seq_lens if upper_bound else None,
    )  # fmt: skip
    builder = backend_class.get_builder_cls()(spec(DIM), ["layer"], CONFIG, torch.device("cpu"))
    output = torch.full_like(query, float("nan"))
    impl.forward(layer, query, key, value, kv_cache, builder.build(0, common), output)

    want = torch.zeros(query.shape, dtype=torch.float64)
    data = backend.planes_of(raw) if LAYOUT == "planes" else raw
    for i, (r, n) in enumerate(zip(requests, lengths, strict=True)):
        if not r.new:
            continue
        keys, values = reference.decode(Pages(data, PRESET, LAYOUT, DIM, PAGE), table[i], n)
        raw_from = r.cached if r.new > (backend.ROWS if r.cached else 1) else n  # what FlashAttention reads as it was computed
        keys[raw_from:], values[raw_from:] = k[ends[i] + raw_from : ends[i + 1]].double(), v[ends[i] + raw_from : ends[i + 1]].double()
        at = int(starts[i])
        want[at : at + r.new] = plain(query[at : at + r.new], keys, values, window)
    return ((output.double() - want).norm() / want.norm()).item()


def spec(dim: int):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    return FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS, head_size=dim, dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(PRESET))


def store_rows(key, value, cache, places, preset, layout):
    """As store.store, by the reference encoder: the interpreter takes a tenth of a second a row."""
    if not len(places):
        return
    codec = declared(preset).for_layer(key.shape[2], Element.FP16)
    sides = [reference_encoder.encode(x.float().numpy(), c) for x, c in ((key, codec.key), (value, codec.value))]
    (k, n), (v, pair) = [[torch.from_numpy(part) for part in side] for side in sides]
    for i, place in enumerate(places.tolist()):
        if place < 0:
            continue
        if layout == "slots":
            cache[place // PAGE, place % PAGE] = torch.cat((k[i], n[i], v[i], pair[i]), -1)
            continue
        blocks = backend.planes_of(cache)[place // PAGE].view(HEADS, PAGE // 16, -1)[:, place % PAGE // 16]
        at, r = 0, place % 16
        for part in (k[i], v[i], n[i], pair[i]):
            width = part.shape[-1]
            blocks[:, at + r * width : at + (r + 1) * width] = part
            at += 16 * width


def attend_on_cpu(q, pages, table, lengths, *, out, lse, workspace, config, **options):
    result, norms = reference.attend(q, pages, table, lengths, **options)
    out.copy_(result)
    lse.copy_(norms)
    return out, lse


def main() -> None:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    plugin.register()
    chosen = AttentionBackendEnum.TURBOQUANT.get_class()

    def reasons(head_size: int = 128, capability: tuple[int, int] = (9, 0), **settings: bool) -> list[str]:
        asked = AttentionSelectorConfig(head_size, torch.bfloat16, PRESET, 16, **settings)._asdict()
        return chosen.validate_configuration(device_capability=DeviceCapability(*capability), **asked)

    if reasons() or reasons(has_sink=True, has_sliding_window=True):
        raise SystemExit(f"refused: {reasons()}")
    backend.attend, backend.ROWS = attend_on_cpu, 8
    backend.stock.is_flydsl_available = lambda: False  # asking imports ROCm's platform, whose extension needs AVX-512 in a build for CPUs
    backend.get_current_vllm_config = backend.stock.get_current_vllm_config = lambda: CONFIG
    speculative = SimpleNamespace(**{**vars(CONFIG), "speculative_config": SimpleNamespace(num_speculative_tokens=3)})
    try:
        chosen.get_builder_cls()(spec(DIM), ["layer"], speculative, torch.device("cpu"))
        refused = ""
    except UnsupportedAttention as error:
        refused = str(error)
    decodes, prompts = [Request(4, 1), Request(16, 1), Request(39, 1)], [Request(0, 6), Request(0, 9)]
    mixed = [*decodes[1:], Request(0, 6), Request(12, 5), Request(19, 11)]
    decode = step(chosen, decodes)
    backend.store = store_rows
    found = {
        "class": chosen.__name__,
        "content_bytes": chosen.customize_spec(spec(128)).state_content_bytes,
        "refused": {"head_size": reasons(96), "capability": reasons(capability=(8, 0))},
        "connector": reasons(use_kv_connector=True),
        "speculative": refused,
        "errors": {
            "decode": decode,
            "first chunks": step(chosen, prompts),
            "mixed": step(chosen, mixed),
            "mixed, window": step(chosen, mixed, window=10, upper_bound=False),
            "padded decode": step(chosen, [*decodes, Request(0, 0)]),
        },
    }
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
