"""Times the shared kernels on a CUDA card: pack, land and slots at the shape of Qwen3-30B-A3B, beside what a copy of as many bytes takes.

    python benchmarks/kernels.py [--json FILE] [--plot FILE] [--vllm DIR] [--jobs 12] [--only pack:raw] [--all-variants]

Every variant's output is checked first: against the reference on one layer, and its tags on that layer. Ties are counted, not hidden.
--vllm: a folder with vLLM's triton_turboquant_store.py and triton_turboquant_decode.py, whose kernels are then timed in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends.cpu import reference
from backends.cuda.tuning import tuning_for
from backends.kernels import plan
from backends.kernels.land import land_pages
from backends.kernels.pack import pack_pages
from backends.kernels.plan import Span, Tuning
from backends.kernels.recode import recode_slots
from backends.kernels.slots import land_slots, pack_slots
from benchmarks import vllm_kernels
from bridge.codecs import declared
from bridge.devices import SpanShare
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.wire import CodingKind, Element, LayerSpan, TagKeys, verify_tags
from bridge.wire.payload import tag_plane_bytes

HEADS, HEAD_DIM, PAGE = 4, 128, 16
CODECS = ("raw", "fp8_e4m3", "turboquant_4bit_nc", "turboquant_k8v4", "turboquant_k3v4_nc", "turboquant_3bit_nc")
OPERATIONS = [(kind, codec) for kind in ("pack", "land") for codec in CODECS]
OPERATIONS += [(kind, codec) for codec in CODECS[2:] for kind in ("land_slots", "pack_slots")]
OPERATIONS += [("recode", "turboquant_4bit_nc")]
LIMITS = {("pack", "raw"): (75, 75), ("pack", "fp8_e4m3"): (75, 75), ("pack", "turboquant_4bit_nc"): (60, 75),
          ("land", "turboquant_4bit_nc"): (60, 75), ("land_slots", "turboquant_4bit_nc"): (60, 75)}  # fmt: skip
"""Percent of the copy bandwidth that a kernel must reach, and the goal."""
OTHERS = {
    "pack": [
        Tuning(1, 1, 2, registers=128, steps=4, part=32),
        Tuning(1, 1, 2, registers=168, steps=4, part=32),
        Tuning(1, 1, 2, registers=128, steps=8, part=32),
        Tuning(1, 1, registers=128),
    ],
    "land": [Tuning(1, 1, registers=128), Tuning(1, 1, registers=96), Tuning(1, 2)],
    "land_slots": [
        Tuning(1, 2, together=1),
        Tuning(1, 2, together=1, registers=48),
        Tuning(1, 2, together=2),
        Tuning(1, 2),
        Tuning(1, 1, registers=128),
    ],
    "pack_slots": [Tuning(2, 1), Tuning(1, 1, registers=128)],
}
"""Launch parameters tried with --all-variants beside the chosen ones, for codecs with 3 or 4 bit values."""
SMALL, SMALL_CODEC = (64, 512), "turboquant_4bit_nc"
KEYS = TagKeys(bytes(range(32)), lease=1, generation=1)


class Shape:
    """Pages on the card and the payload's geometry. distinct: whether every layer has pages of its own; to compile, one pair does."""

    def __init__(self, layers: int, tokens: int, chunk: int, distinct: bool = True) -> None:
        self.layers, self.tokens, self.span = layers, tokens, Span(0, tokens, chunk)
        needed = -(-tokens // PAGE)
        self.num_pages = needed + 64
        order = np.random.default_rng(5).permutation(self.num_pages)[:needed]
        self.table_list = order.tolist()
        self.table = torch.tensor(order, dtype=torch.int32, device="cuda")
        torch.manual_seed(3)
        shape = (self.num_pages, PAGE, HEADS, HEAD_DIM)
        self.each = layers if distinct else 1
        self.pages = self.for_all(
            [tuple(torch.randn(shape, dtype=torch.float32, device="cuda").to(torch.bfloat16) for _ in "kv") for _ in range(self.each)]
        )

    def for_all(self, made: list) -> list:
        return made * (self.layers // self.each)

    def spans(self, block_bytes: int) -> list[list[LayerSpan]]:
        offset = ordinal = 0
        table = []
        for chunk in range(self.span.chunks):
            first = chunk * self.span.chunk_tokens
            end = min(first + self.span.chunk_tokens, self.tokens)
            row = []
            for layer in range(self.layers):
                blocks = self.span.blocks(chunk)
                row.append(LayerSpan(chunk, layer, offset, HEADS, blocks, block_bytes, first // 16, ordinal, first, end))
                offset += HEADS * (blocks * block_bytes + tag_plane_bytes(blocks))
                ordinal += HEADS * blocks
            table.append(row)
        return table


class Operation:
    """One kernel with one codec: its arguments, the bytes it moves and its check."""

    def __init__(self, shape: Shape, kind: str, name: str) -> None:
        self.shape, self.kind, self.name = shape, kind, name
        self.slot_codec = declared(name).for_layer(HEAD_DIM, Element.BF16)
        self.codec = declared("raw").for_layer(HEAD_DIM, Element.BF16) if kind == "recode" else self.slot_codec
        block_bytes = self.codec.block_bytes(HEAD_DIM)
        self.spans = shape.spans(block_bytes)
        last = self.spans[-1][-1]
        self.nbytes = last.offset + last.nbytes
        self.payload = torch.full((self.nbytes,), 0xCD, dtype=torch.uint8, device="cuda")
        runs = plan.run_table([[(s.offset, s.first_ordinal) for s in row] for row in self.spans], "cuda")
        keys = plan.device_keys(KEYS.hash_keys(block_bytes), "cuda")
        masks = plan.device_words(KEYS.masks(0, last.first_ordinal + HEADS * last.blocks), "cuda")
        self.arguments = (shape.table, shape.span, self.codec, HEADS, runs, self.payload, keys, masks)
        self.pages = plan.pages_of(shape.pages)
        self.result = plan.new_result("cuda")
        self.wanted: tuple | None = None
        slot_bytes = self.slot_codec.slot_bytes(HEAD_DIM)
        vectors = shape.layers * shape.tokens * HEADS
        self.moved = self.nbytes + vectors * (slot_bytes if "slots" in kind or kind == "recode" else 4 * HEAD_DIM)
        if kind == "land":
            self.target = shape.for_all([tuple(torch.full_like(side, -7.0) for side in layer) for layer in shape.pages[: shape.each]])
            self.target_pages = plan.pages_of(self.target)
        if "slots" in kind or kind == "recode":
            slot_shape = (shape.num_pages, PAGE, HEADS, slot_bytes)
            self.slot_tensors = shape.for_all([torch.full(slot_shape, 0xCD, dtype=torch.uint8, device="cuda") for _ in range(shape.each)])
            self.slots = plan.slots_of(self.slot_tensors, self.slot_codec, HEAD_DIM)

    def launch(self, tuning: Tuning) -> Callable[[], None]:
        if self.kind == "pack":
            return lambda: pack_pages(self.pages, *self.arguments, tuning)
        if self.kind == "land":
            return lambda: land_pages(self.target_pages, *self.arguments, self.result, tuning)
        if self.kind == "recode":
            table, span, _, heads, *rest = self.arguments
            return lambda: recode_slots(self.slots, table, span, self.slot_codec, Element.BF16, heads, *rest, self.result, tuning)
        if self.kind == "land_slots":
            return lambda: land_slots(self.slots, *self.arguments, self.result, tuning)
        return lambda: pack_slots(self.slots, *self.arguments, tuning)

    def shares(self, layer: int) -> list[SpanShare]:
        return [SpanShare(row[layer], self.codec, layer, HEAD_DIM, 0, HEADS, 0, row[layer].offset) for row in self.spans]

    def host_cache(self, layer: int, tensors: list) -> PagedCache:
        return PagedCache({layer: LayerPages(*(side.cpu() for side in tensors[layer]))})

    def fill_payload(self) -> None:
        pack_pages(self.pages, *self.arguments, Tuning())
        torch.cuda.synchronize()

    def packed_by_reference(self, layer: int, table: BlockTable) -> np.ndarray:
        """The payload with one layer's runs; the rest is poison."""
        if self.wanted is None:
            want = np.full(self.nbytes, 0xCD, np.uint8)
            for share in self.shares(layer):
                reference.pack_share(self.host_cache(layer, self.shape.pages), table, share, KEYS, want)
            self.wanted = (want,)
        return self.wanted[0]

    def landed_by_reference(self, layer: int, table: BlockTable) -> tuple:
        """One layer's K and V pages; the rest is poison."""
        if self.wanted is None:
            cache = PagedCache({layer: LayerPages(*(torch.full_like(side, -7.0, device="cpu") for side in self.target[layer]))})
            payload = self.payload.cpu().numpy()
            for share in self.shares(layer):
                reference.land_share(cache, table, share, KEYS, payload, 0, self.shape.tokens)
            self.wanted = (cache.layers[layer].key, cache.layers[layer].value)
        return self.wanted

    def check(self, tuning: Tuning) -> dict[str, float]:
        """Counts differences from the reference on the last layer. Raises ValueError where they are more than ties."""
        layer, table = self.shape.layers - 1, BlockTable(self.shape.table_list, PAGE)
        run = self.launch(tuning)
        if self.kind == "pack":
            self.payload.fill_(0xCD)
            run()
            got = self.payload.cpu().numpy()
            want = self.packed_by_reference(layer, table)
            codes = scalars = 0
            planes = self.codec.planes(HEAD_DIM)
            for share in self.shares(layer):
                s = share.span
                verify_tags(got[s.offset : s.offset + s.nbytes], s, KEYS)
                a, b = (x[s.offset : s.offset + s.nbytes].reshape(HEADS, -1)[:, : s.blocks * s.block_bytes] for x in (got, want))
                a, b = a.reshape(-1, s.block_bytes), b.reshape(-1, s.block_bytes)
                codes += int((a[:, : planes[2].offset] != b[:, : planes[2].offset]).sum())
                scalars += int((a[:, planes[2].offset :] != b[:, planes[2].offset :]).sum())
            vectors = self.shape.tokens * HEADS
            if codes > vectors * HEAD_DIM * (2e-4 if tuning.ties_up else 1e-5) or scalars > vectors * 0.01:
                raise ValueError(f"{codes} code bytes and {scalars} scalar bytes differ")
            return {"code_bytes_differing": codes, "scalar_bytes_differing": scalars, "vectors": vectors}
        if self.wanted is None:
            self.fill_payload()
        self.result.copy_(plan.new_result("cuda"))
        if self.kind == "land":
            for pair in self.target:
                for side in pair:
                    side.fill_(-7.0)
            run()
            if self.result.tolist() != [0, plan.NO_ORDINAL, 0]:
                raise ValueError(f"result {self.result.tolist()}")
            counts = []
            for got, want in zip(self.target[layer], self.landed_by_reference(layer, table), strict=True):
                a, b = got.cpu(), want
                counts.append(int((a.view(torch.int16) != b.view(torch.int16)).sum()))
                a, b = a.float(), b.float()
                if not ((a - b).abs() <= b.abs() * 2**-7 + 1e-6 * b.norm(dim=-1, keepdim=True)).all():
                    raise ValueError("elements differ by more than a unit in the last place")
            self.payload[self.nbytes // 2] ^= 1
            run()
            if self.result[0].item() != 1:
                raise ValueError("a flipped bit was not reported")
            self.payload[self.nbytes // 2] ^= 1
            return {"k_elements_differing": counts[0], "v_elements_differing": counts[1], "vectors": self.shape.tokens * HEADS}
        if self.kind == "recode":
            return self.check_recoded(run, tuning)
        # Slots: landing and packing again must give the same payload; the layout itself is checked in tests/kernels/test_slots.py.
        for side in self.slot_tensors:
            side.fill_(0xCD)
        before = self.payload.clone()
        land_slots(self.slots, *self.arguments, self.result, tuning)
        self.payload.fill_(0xCD)
        pack_slots(self.slots, *self.arguments, tuning)
        if self.result.tolist() != [0, plan.NO_ORDINAL, 0] or not torch.equal(before, self.payload):
            raise ValueError("slots and payload do not hold the same bytes")
        self.wanted = ()
        return {"bytes_differing": 0}

    def check_recoded(self, run: Callable[[], None], tuning: Tuning) -> dict[str, float]:
        """Against the slots that packing the same pages, then landing makes."""
        for side in self.slot_tensors:
            side.fill_(0xCD)
        run()
        found = [side.clone() for side in self.slot_tensors]
        if self.result.tolist() != [0, plan.NO_ORDINAL, 0]:
            raise ValueError(f"result {self.result.tolist()}")
        other = Operation(self.shape, "land_slots", self.name)
        pack_pages(other.pages, *other.arguments, tuning)
        for side in other.slot_tensors:
            side.fill_(0xCD)
        land_slots(other.slots, *other.arguments, other.result, tuning_for("land_slots", other.codec))
        differing = sum(int((a != b).sum()) for a, b in zip(found, other.slot_tensors, strict=True))
        if differing > 1e-5 * sum(side.numel() for side in found):
            raise ValueError(f"{differing} bytes differ")
        self.payload[self.nbytes // 2] ^= 1
        run()
        if self.result[0].item() != 1:
            raise ValueError("a flipped bit was not reported")
        self.payload[self.nbytes // 2] ^= 1
        self.wanted = ()
        return {"bytes_differing": differing}


def copy_bandwidth() -> float:
    """Bytes read plus written a second of a device-to-device copy of 2 GiB."""
    source = torch.randint(0, 255, (2**31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = triton.testing.do_bench(lambda: target.copy_(source), warmup=20, rep=100, return_mode="median")
    return 2 * source.numel() / ms * 1e3


def variants(kind: str, name: str, everything: bool) -> list[Tuning]:
    codec = declared(name).for_layer(HEAD_DIM, Element.BF16)
    made = [tuning_for("pack" if kind == "recode" else kind, codec)]
    if everything and codec.value.kind is CodingKind.AFFINE:
        made += [tuning for tuning in OTHERS.get(kind, []) if tuning != made[0]]
    if kind == "pack" and codec.value.kind is CodingKind.AFFINE:
        made.append(replace(made[0], ties_up=True))
    return made


def jobs(options: argparse.Namespace) -> list[tuple[str, str, Tuning]]:
    wanted = [pair for pair in OPERATIONS if not options.only or f"{pair[0]}:{pair[1]}" in options.only]
    return [(kind, name, tuning) for kind, name in wanted for tuning in variants(kind, name, options.all_variants)]


@triton.jit
def nothing(anchor):  # type: ignore[no-untyped-def]
    """An empty kernel: what a launch costs."""


def graph_us(run: Callable[[], None], launches: int = 20, repeats: int = 20) -> float:
    """Median microseconds of one launch in the replay of a CUDA graph of several."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def event_us(run: Callable[[], None], launches: int = 20, repeats: int = 20) -> float:
    """Median microseconds of one launch from Python, host work included, over several in a row."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(launches):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def small_requests(options: argparse.Namespace, bandwidth: float) -> list[dict]:
    """One launch each of pack, land and slots for 64 and 512 tokens, beside an empty kernel's."""
    anchor = torch.zeros(16, dtype=torch.int32, device="cuda")
    empty = lambda: nothing[(1,)](anchor)  # noqa: E731
    empty()
    rows = [{"kind": "empty kernel", "tokens": 0, "graph_us": graph_us(empty), "event_us": event_us(empty), "floor_us": 0.0}]
    for tokens in SMALL:
        shape = Shape(options.layers, tokens, options.chunk)
        for kind in ("pack", "land", "land_slots", "pack_slots"):
            operation = Operation(shape, kind, SMALL_CODEC)
            if kind != "pack":
                operation.fill_payload()
            run = operation.launch(tuning_for(kind, operation.codec))
            rows.append({"kind": kind, "tokens": tokens, "graph_us": graph_us(run), "event_us": event_us(run),
                         "floor_us": operation.moved / bandwidth * 1e6})  # fmt: skip
    print("\nsmall requests, turboquant_4bit_nc, one launch for all layers and kv heads (us; the data then lies in the second cache):")
    for row in rows:
        print(f"{row['kind']:12} {row['tokens'] or '':>4}  graph replay {row['graph_us']:6.1f}  from Python {row['event_us']:6.1f}  "
              f"copy's time {row['floor_us']:5.1f}")  # fmt: skip
    return rows


def draw(record: dict, path: str) -> None:
    """A bar for each kernel: percent of the copy bandwidth, what it must reach, the goal."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    best = best_rows(record)
    names = {"land_slots": "payload to vLLM slots", "pack_slots": "vLLM slots to payload", "recode": "raw payload to vLLM slots"}
    labels = [f"{names.get(row['kind'], row['kind'])} {row['codec'].replace('turboquant_', '')}" for row in best]
    figure, axis = plt.subplots(figsize=(8, 6.4))
    places = np.arange(len(best))[::-1]
    colours = ["#2a6f97" if row["kind"].startswith("pack") else "#6a994e" for row in best]
    axis.barh(places, [row["percent"] for row in best], color=colours, height=0.65)
    for place, row in zip(places, best, strict=True):
        axis.text(1, place, f"{row['percent']:.0f} %, {row['us']:.0f} µs", va="center", fontsize=8, color="white")
        for mark, colour in zip(row["limits"] or (), ("#bc4749", "#f2a541"), strict=False):
            axis.plot([mark, mark], [place - 0.42, place + 0.42], color=colour, linewidth=2.5)
    axis.plot([], [], color="#bc4749", linewidth=2.5, label="must reach")
    axis.plot([], [], color="#f2a541", linewidth=2.5, label="goal")
    axis.set_yticks(places, labels, fontsize=9)
    axis.set_xlim(0, 100)
    axis.set_xlabel(f"% of the copy bandwidth, {record['copy_bytes_per_s'] / 1e12:.2f} TB/s")
    axis.set_title(
        f"{record['card']}: {record['layers']} layers, {HEADS} kv heads, {record['tokens']:,} tokens, tags included", fontsize=10
    )
    axis.legend(loc="lower right", fontsize=8, framealpha=1)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def best_rows(record: dict) -> list[dict]:
    """The fastest row of each kernel and codec, `ties_up` left out."""
    found: dict[tuple[str, str], dict] = {}
    for row in record["rows"]:
        key = (row["kind"], row["codec"])
        if "us" in row and not row["ties_up"] and (key not in found or row["us"] < found[key]["us"]):
            found[key] = row
    return list(found.values())


SHOWN = ("blocks", "warps", "registers", "steps", "stages", "part", "together")


def line(row: dict) -> str:
    """A row of the table."""
    launch = " ".join(f"{name[:3]} {row[name]:<3}" for name in SHOWN)
    text = f"{row['kind']:10} {row['codec']:19} {launch} {'ties up' if row['ties_up'] else '       '}"
    if "us" in row:
        text += f" {row['us']:7.1f} us  floor {row['floor_us']:6.1f}  {row['percent']:5.1f} %"
    return text + "  " + " ".join(f"{name}={row[name]}" for name in row if "differing" in name)


def save(record: dict, options: argparse.Namespace) -> None:
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1))
    if options.plot:
        draw(record, options.plot)


def warm(options: argparse.Namespace) -> None:
    """Compiles every variant in several processes; they meet in Triton's cache."""
    command = [sys.executable, __file__, *sys.argv[1:]]
    processes = [subprocess.Popen([*command, "--warm", str(i), str(options.jobs)]) for i in range(options.jobs)]
    if any(process.wait() for process in processes):
        print("a compiling process failed; its variants are compiled again below")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=str(Path(os.environ["OUT"]) / "kernels.json") if "OUT" in os.environ else "")
    parser.add_argument("--plot", default=str(Path(os.environ["OUT"]) / "kernels.png") if "OUT" in os.environ else "")
    parser.add_argument("--vllm", default="")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--all-variants", action="store_true")
    parser.add_argument("--warm", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU, and none was found")
    if options.warm:
        index, count = options.warm
        shape = Shape(options.layers, options.tokens, options.chunk, distinct=False)
        small = [Shape(options.layers, tokens, options.chunk, distinct=False) for tokens in SMALL]
        work = [(shape, *job) for job in jobs(options)]
        for kind in ("pack", "land", "land_slots", "pack_slots"):
            codec = declared(SMALL_CODEC).for_layer(HEAD_DIM, Element.BF16)
            work += [(one, kind, SMALL_CODEC, tuning_for(kind, codec)) for one in small]
        for one, kind, name, tuning in work[index::count]:
            try:
                Operation(one, kind, name).launch(tuning)()
            except Exception as error:  # reported by the measuring process, which meets it again
                print(kind, name, tuning.blocks, tuning.warps, "does not compile:", str(error)[:200])
        torch.cuda.synchronize()
        return 0

    start = time.monotonic()
    if options.jobs:
        warm(options)
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    bandwidth = copy_bandwidth()
    shape = Shape(options.layers, options.tokens, options.chunk)
    record = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "copy_bytes_per_s": bandwidth,
        "layers": options.layers, "heads": HEADS, "head_dim": HEAD_DIM, "tokens": options.tokens, "chunk": options.chunk, "rows": [],
    }  # fmt: skip
    print(
        f"{record['card']}, copy {bandwidth / 1e12:.2f} TB/s, {options.layers} layers, {HEADS} kv heads, {options.tokens} tokens",
        flush=True,
    )
    previous: tuple[str, str] | None = None
    operation: Operation | None = None
    failed = 0
    for kind, name, tuning in jobs(options):
        if previous != (kind, name):
            operation = None
            operation, previous = Operation(shape, kind, name), (kind, name)
        row = {"kind": kind, "codec": name, "limits": LIMITS.get((kind, name)), "ties_up": tuning.ties_up}
        row |= {name: getattr(tuning, name) for name in SHOWN}
        try:
            row.update(operation.check(tuning))
            run = operation.launch(tuning)
            row["us"] = 1e3 * triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")
            row["floor_us"] = operation.moved / bandwidth * 1e6
            row["percent"] = 100 * row["floor_us"] / row["us"]
            print(line(row), flush=True)
        except Exception as error:
            failed += 1
            row["error"] = str(error)[:500]
            print(f"{line(row)}  FAILED: {str(error)[:300]}", flush=True)
        record["rows"].append(row)
    print("\nbest of each:")
    for row in best_rows(record):
        limits = row["limits"]
        verdict = "" if limits is None else f"must {limits[0]} {'met' if row['percent'] >= limits[0] else 'MISSED'}, goal {limits[1]}"
        print(f"{line(row)}  {verdict}")
    save(record, options)
    operation = None
    record["small"] = small_requests(options, bandwidth)
    if options.vllm:
        codec = declared("turboquant_4bit_nc").for_layer(HEAD_DIM, Element.BF16)
        operation = Operation(shape, "land_slots", "turboquant_4bit_nc")
        operation.fill_payload()
        operation.launch(tuning_for("land_slots", codec))()
        record["vllm"] = vllm_kernels.compare(options.vllm, shape.pages[0], operation.slot_tensors[0], shape.table, options.tokens)
        print("\nvLLM's own kernels, one layer, turboquant_4bit_nc:")
        print(json.dumps(record["vllm"], indent=1))
    else:
        print("\nvLLM's own kernels were not timed: --vllm DIR names the folder that holds its two kernel files")
    save(record, options)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
