"""Times decode attention over TurboQuant pages: microseconds of one layer, by graph replay, beside torch's SDPA on the expanded bf16 cache.

Both implementations: CUDA C++ (backends/cuda/attend) and the shared Triton kernel (backends/kernels/attend).

python benchmarks/attend.py                 the issue's table
python benchmarks/attend.py --shapes        all presets, groups, head dims and layouts at 32 x 8,704
python benchmarks/attend.py --tunings       the shared Triton kernel with other launch parameters
python benchmarks/attend.py --sweep [WHICH] warps and stages; who reports a stage of slots as read (arrive)
python benchmarks/attend.py --once planes   one launch of the largest case, for a profiler
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends.accelerator import attend as shared
from backends.cuda.attend import Workspace, attend, configure, launch
from backends.cuda.tuning import attend_tuning
from backends.kernels.attend import reference
from backends.kernels.attend.arguments import AttendTuning
from backends.kernels.attend.pages import PRESETS, Pages, slot_bytes

SWEEP = {  # warps, stages, unroll, hint, arrive_all
    "planes": ((16, 3, 1, 1, 0), (16, 2, 1, 0, 0), (12, 3, 1, 0, 0)),
    "slots": ((16, 4, 1, 1, 0), (12, 4, 1, 0, 0)),
    "arrive": ((16, 4, 1, 0, 0), (16, 4, 1, 0, 1)) * 2,  # slots; twice, to see the spread
}
TUNINGS = tuple(
    AttendTuning(tokens=tokens, warps=warps, stages=stages, registers=registers, programs=programs)
    for tokens, warps, stages, registers, programs in (
        (64, 1, 2, 0, 8), (64, 1, 3, 0, 8), (64, 1, 1, 0, 8), (64, 1, 2, 0, 16), (64, 1, 2, 168, 12), (32, 1, 2, 168, 12),
        (32, 1, 3, 168, 12), (32, 1, 1, 168, 12), (32, 1, 2, 128, 16), (32, 1, 2, 0, 8), (16, 1, 3, 168, 12), (64, 2, 2, 0, 6),
    )
)  # fmt: skip
COPY = 4.27e12  # bytes a second, read plus write, of a device-to-device copy on this chip


def cache(preset: str, layout: str, dim: int, heads: int, batch: int, tokens: int, page_tokens: int = 16, folded: bool = False):
    """Random codes, plausible scalars, pages in random order."""
    key, value = PRESETS[preset]
    slot, per = slot_bytes(preset, dim), -(-tokens // page_tokens)
    kr, vr, ks = dim * key // 8, dim * value // 8, 0 if key == 8 else 2
    total = batch * per
    if layout == "planes":
        data = torch.empty(total, heads, page_tokens * slot, dtype=torch.uint8, device="cuda")
    else:
        data = torch.empty(total, page_tokens, heads, slot, dtype=torch.uint8, device="cuda")
    flat = data.view(-1)[: data.numel() // 4 * 4].view(torch.int32)
    flat.random_(-(2**31), 2**31 - 1)
    if layout == "planes":
        blocks = data.view(total, heads, -1, 16 * slot)
        at = 16 * (kr + vr)
        norms, pairs = blocks[..., at : at + 16 * ks], blocks[..., at + 16 * ks :]
        keys = blocks[..., : 16 * kr]
    else:
        norms, pairs, keys = data[..., kr : kr + ks], data[..., -4:], data[..., :kr]
    if ks:
        norms.copy_((torch.rand(*norms.shape[:-1], norms.shape[-1] // 2, device="cuda") * 4 + dim**0.5).half().view(torch.uint8))
    else:
        keys.bitwise_and_(0xBF)  # below 2: no NaN among the keys
    s = (torch.rand(*pairs.shape[:-1], pairs.shape[-1] // 4, device="cuda") * 0.2 + 0.2).half()
    pairs.copy_(torch.stack((s, -s * 7), -1).view(*s.shape[:-1], -1).view(torch.uint8))
    table = torch.randperm(total, device="cuda").to(torch.int32).view(batch, per)
    return Pages(data, preset, layout, dim, page_tokens, folded), table


def time_graph(calls, repeats: int = 15) -> float:
    """Median microseconds of one call; `calls` run in order in one graph (different inputs, so that the L2 cannot hold them)."""
    for c in calls:
        c()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for c in calls:
            c()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(calls))
    return statistics.median(times)


def case(
    preset, layout, dim, heads, group, batch, tokens, folded=False, config=None, check=True, min_tiles=None, ragged=False, tuning=None
):
    """(microseconds, of which the first launch, relative error on sequence 0). tuning: of the shared kernel; else the CUDA one runs, whose
    first launch alone is timed too."""
    size = batch * heads * tokens * slot_bytes(preset, dim)
    sets = max(1, min(16, -(-300_000_000 // size)))
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    if ragged:  # half to once the length, and one of a few tokens
        lengths.random_(tokens // 2, tokens + 1)
        lengths[-1] = 5
    q = torch.randn(batch, heads * group, dim, device="cuda").half()
    out, lse = torch.empty_like(q), torch.empty(batch, heads * group, device="cuda")
    caches = [cache(preset, layout, dim, heads, batch, tokens, folded=folded) for _ in range(sets)]
    if tuning:
        space = shared.Workspace.of(heads, group, dim, batch, q.device, tuning)
        run = functools.partial(shared.attend, tuning=tuning)
    else:
        space = Workspace.of(config or configure(preset, layout, dim, heads, group, folded=folded), heads, batch, q.device)
        run = functools.partial(attend, config=config)
    old, launch.MIN_TILES = launch.MIN_TILES, min_tiles or launch.MIN_TILES

    def call(pages, table, **parts):
        return functools.partial(run, q, pages, table, lengths, out=out, lse=lse, workspace=space, **parts)

    again = 1 if sets > 3 else 3
    try:
        us = time_graph([call(*c) for c in caches] * again)
        first = float("nan") if tuning else time_graph([call(*c, parts=1) for c in caches] * again)
        err = float("nan")
        if check:
            call(*caches[0])()
            want, _ = reference.attend(q[:1], caches[0][0], caches[0][1][:1], lengths[:1])
            err = ((out[:1].double() - want).norm() / want.norm()).item()
    finally:
        launch.MIN_TILES = old
    return us, first, err


def sdpa(dim, heads, group, batch, tokens) -> float:
    """The faster of two ways to ask torch: grouped queries as they are, or the group as rows of one query."""
    size = 4 * batch * heads * tokens * dim
    sets = max(1, min(8, -(-300_000_000 // size)))
    kv = [torch.randn(2, batch, heads, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    rows, grouped = (torch.randn(batch, *s, dim, device="cuda", dtype=torch.bfloat16) for s in ((heads, group), (heads * group, 1)))
    best = []
    for q, extra in ((rows, {}), (grouped, {"enable_gqa": True})):
        try:
            best.append(time_graph([lambda x=x, q=q, extra=extra: F.scaled_dot_product_attention(q, x[0], x[1], **extra) for x in kv], 7))
        except RuntimeError as e:
            print("sdpa:", str(e)[:100])
    return min(best)


def shapes(which: str, with_sdpa: bool) -> None:
    """Planes and slots of each implementation, all presets, groups and head dims, 32 x 8,704, 4 kv heads; and SDPA."""
    for dim in (64, 128, 256):
        for group in (1, 4, 8, 16):
            theirs = sdpa(dim, 4, group, 32, 8704) if with_sdpa else float("nan")
            for preset in PRESETS:
                line = f"{preset[11:]:8} D{dim:<3} g{group:<2}"
                for name in ("cuda", "triton"):
                    if which in (name, "both"):
                        line += f"  {name}"
                        for layout in ("planes", "slots"):
                            tuning = attend_tuning(preset, layout, dim, group) if name == "triton" else None
                            us, _, err = case(preset, layout, dim, 4, group, 32, 8704, tuning=tuning)
                            line += f" {us:6.1f} ({err:.1e})"
                print(f"{line}  sdpa {theirs:6.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="?", const="both", choices=("cuda", "triton", "both"))
    parser.add_argument("--tunings", nargs="?", const="all", help="all, or the number of one, which is only built")
    parser.add_argument("--sweep", nargs="?", const="all", choices=("all", *SWEEP))
    parser.add_argument("--once", choices=("planes", "slots", "folded"))
    parser.add_argument("--no-sdpa", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU, and none was found")
    torch.manual_seed(0)
    if args.once:
        pages, table = cache(
            "turboquant_4bit_nc", "slots" if args.once == "slots" else "planes", 128, 4, 128, 8704, folded=args.once == "folded"
        )
        q = torch.randn(128, 32, 128, device="cuda").half()
        lengths = torch.full((128,), 8704, dtype=torch.int32, device="cuda")
        for _ in range(2):
            attend(q, pages, table, lengths)
        torch.cuda.synchronize()
        return
    name = "turboquant_4bit_nc"
    rows = []

    def row(*what, **kw):
        preset, layout, dim, heads, group, batch, tokens = what
        us, first, err = case(*what, **kw)
        floor = (0.75 if kw.get("ragged") else 1) * batch * heads * tokens * slot_bytes(preset, dim) / COPY * 1e6
        note = f"{layout}{' folded' if kw.get('folded') else ''}{' triton' if kw.get('tuning') else ''}"
        config = kw.get("config")
        if config:
            note += f" {config.warps}x{config.stages} u{config.unroll}{' hint' if config.hint else ''}{' all' if config.arrive_all else ''}"
        if kw.get("ragged"):
            note += " ragged"
        if kw.get("min_tiles"):
            note += f" min {kw['min_tiles']}"
        line = f"{preset[11:]:8} D{dim:<3} g{group:<2} h{heads} {batch:>3} x {tokens:<6} {note:22} {us:8.1f} us"
        line += f" (first {first:7.1f})  floor {floor:6.1f}  err {err:.1e}"
        print(line, flush=True)
        rows.append(line)

    if args.sweep:
        for kind in SWEEP if args.sweep == "all" else (args.sweep,):
            layout = "slots" if kind == "arrive" else kind
            base = configure(name, layout, 128, 4, 8)
            for warps, stages, unroll, hint, every in SWEEP[kind]:
                for batch in (128, 32, 4):
                    config = dataclasses.replace(base, warps=warps, stages=stages, unroll=unroll, hint=hint, arrive_all=every)
                    row(name, layout, 128, 4, 8, batch, 8704, config=config, check=False)
        if args.sweep != "all":
            return
        for m in (2, 4, 16):
            row(name, "planes", 128, 4, 8, 4, 8704, min_tiles=m, check=False)
        for tokens in (16, 512):
            row(name, "planes", 128, 4, 8, 1, tokens)
        return
    if args.tunings:
        chosen = TUNINGS if args.tunings == "all" else (TUNINGS[int(args.tunings)],)
        for layout in ("planes", "slots"):
            for tuning in chosen:
                for batch in (128, 32, 4) if args.tunings == "all" else (4,):
                    try:
                        us, _, err = case(name, layout, 128, 4, 8, batch, 8704, check=batch == 4, tuning=tuning)
                    except Exception as error:  # what the compiler or the card refuses is a result too
                        print(layout, tuning, type(error).__name__, str(error)[-200:])
                        break
                    what = f"tokens {tuning.tokens} warps {tuning.warps} stages {tuning.stages} registers {tuning.registers}"
                    print(f"{layout} {what} programs {tuning.programs}: {batch} x 8704 {us:8.1f} us err {err:.1e}", flush=True)
        return
    if args.shapes:
        shapes(args.shapes, not args.no_sdpa)
        return
    for batch, tokens in ((128, 8704), (32, 8704), (4, 8704), (1, 131072)):
        for layout, folded in (("planes", False), ("planes", True), ("slots", False)):
            row(name, layout, 128, 4, 8, batch, tokens, folded=folded)
            row(name, layout, 128, 4, 8, batch, tokens, folded=folded, tuning=attend_tuning(name, layout, 128, 8))
        if not args.no_sdpa:
            print(f"    torch SDPA bf16 {sdpa(128, 4, 8, batch, tokens):8.1f} us", flush=True)
    for tuning in (None, attend_tuning(name, "planes", 128, 8)):
        row(name, "planes", 128, 4, 8, 128, 8704, ragged=True, tuning=tuning)
        row(name, "planes", 128, 4, 8, 512, 1024, tuning=tuning)
        row(name, "planes", 128, 8, 4, 64, 8704, tuning=tuning)


if __name__ == "__main__":
    main()
