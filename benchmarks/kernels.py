"""Times the shared kernels on a CUDA card: pack, land and slots at the shape of Qwen3-30B-A3B, beside what a copy of as many bytes takes.

    python benchmarks/kernels.py [--json FILE] [--jobs 12] [--tokens 8192] [--layers 48] [--chunk 1024] [--only pack:raw] [--all-variants]

Every variant's output is checked first: against the reference on one layer, and its tags on that layer. Ties are counted, not hidden.
"""

from __future__ import annotations

import argparse
import json
import os
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
from backends.kernels import plan
from backends.kernels.land import land_pages
from backends.kernels.pack import pack_pages
from backends.kernels.plan import Span, Tuning
from backends.kernels.slots import land_slots, pack_slots
from bridge.codecs import declared
from bridge.devices import SpanShare
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.wire import CodingKind, Element, LayerSpan, TagKeys, verify_tags
from bridge.wire.payload import tag_plane_bytes

HEADS, HEAD_DIM, PAGE = 4, 128, 16
VARIANTS = [(1, 1, 128), (1, 2, 0), (2, 1, 0), (1, 1, 0), (4, 4, 128)]
"""(blocks, warps, registers) of a program."""
OPERATIONS = [
    ("pack", "raw"), ("pack", "fp8_e4m3"), ("pack", "turboquant_4bit_nc"), ("pack", "turboquant_k8v4"), ("pack", "turboquant_k3v4_nc"),
    ("pack", "turboquant_3bit_nc"), ("land", "raw"), ("land", "fp8_e4m3"), ("land", "turboquant_4bit_nc"), ("land", "turboquant_k8v4"),
    ("land", "turboquant_k3v4_nc"), ("land", "turboquant_3bit_nc"), ("land_slots", "turboquant_4bit_nc"),
    ("pack_slots", "turboquant_4bit_nc"),
]  # fmt: skip
MAIN = {("pack", "raw"), ("pack", "fp8_e4m3"), ("pack", "turboquant_4bit_nc"), ("land", "turboquant_4bit_nc"),
        ("land_slots", "turboquant_4bit_nc"), ("pack_slots", "turboquant_4bit_nc"), ("land", "raw")}  # fmt: skip
LIMITS = {("pack", "raw"): 75, ("pack", "fp8_e4m3"): 75, ("pack", "turboquant_4bit_nc"): 60, ("land", "turboquant_4bit_nc"): 60,
          ("land_slots", "turboquant_4bit_nc"): 60}  # fmt: skip
KEYS = TagKeys(bytes(range(32)), lease=1, generation=1)


class Shape:
    """Pages on the card and the payload's geometry."""

    def __init__(self, layers: int, tokens: int, chunk: int) -> None:
        self.layers, self.tokens, self.span = layers, tokens, Span(0, tokens, chunk)
        needed = -(-tokens // PAGE)
        self.num_pages = needed + 64
        order = np.random.default_rng(5).permutation(self.num_pages)[:needed]
        self.table_list = order.tolist()
        self.table = torch.tensor(order, dtype=torch.int32, device="cuda")
        torch.manual_seed(3)
        shape = (self.num_pages, PAGE, HEADS, HEAD_DIM)
        self.pages = [tuple(torch.randn(shape, dtype=torch.float32, device="cuda").to(torch.bfloat16) for _ in "kv") for _ in range(layers)]

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
        self.codec = declared(name).for_layer(HEAD_DIM, Element.BF16)
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
        slot_bytes = self.codec.slot_bytes(HEAD_DIM)
        vectors = shape.layers * shape.tokens * HEADS
        self.moved = self.nbytes + vectors * (slot_bytes if "slots" in kind else 4 * HEAD_DIM)
        if kind == "land":
            self.target = [tuple(torch.full_like(side, -7.0) for side in layer) for layer in shape.pages]
            self.target_pages = plan.pages_of(self.target)
        if "slots" in kind:
            slot_shape = (shape.num_pages, PAGE, HEADS, slot_bytes)
            self.slot_tensors = [torch.full(slot_shape, 0xCD, dtype=torch.uint8, device="cuda") for _ in range(shape.layers)]
            self.slots = plan.slots_of(self.slot_tensors, self.codec, HEAD_DIM)

    def launch(self, tuning: Tuning) -> Callable[[], None]:
        if self.kind == "pack":
            return lambda: pack_pages(self.pages, *self.arguments, tuning)
        if self.kind == "land":
            return lambda: land_pages(self.target_pages, *self.arguments, self.result, tuning)
        if self.kind == "land_slots":
            return lambda: land_slots(self.slots, *self.arguments, self.result, tuning)
        return lambda: pack_slots(self.slots, *self.arguments, tuning)

    def shares(self, layer: int) -> list[SpanShare]:
        return [SpanShare(row[layer], self.codec, layer, HEAD_DIM, 0, HEADS, 0, row[layer].offset) for row in self.spans]

    def layer_bytes(self, payload: np.ndarray, layer: int) -> np.ndarray:
        return np.concatenate([payload[s.offset : s.offset + s.nbytes] for s in (row[layer] for row in self.spans)])

    def host_cache(self, layer: int, tensors: list) -> PagedCache:
        return PagedCache({layer: LayerPages(*(side.cpu() for side in tensors[layer]))})

    def fill_payload(self) -> None:
        pack_pages(self.pages, *self.arguments, Tuning())
        torch.cuda.synchronize()

    def check(self, tuning: Tuning) -> dict[str, float]:
        """Counts differences from the reference on the last layer. Raises ValueError where they are more than ties."""
        layer, table = self.shape.layers - 1, BlockTable(self.shape.table_list, PAGE)
        run = self.launch(tuning)
        if self.kind == "pack":
            self.payload.fill_(0xCD)
            run()
            got = self.payload.cpu().numpy()
            want = np.full(self.nbytes, 0xCD, np.uint8)
            cache = self.host_cache(layer, self.shape.pages)
            codes = scalars = 0
            planes = self.codec.planes(HEAD_DIM)
            for share in self.shares(layer):
                reference.pack_share(cache, table, share, KEYS, want)
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
        self.fill_payload()
        self.result.copy_(plan.new_result("cuda"))
        if self.kind == "land":
            for pair in self.target:
                for side in pair:
                    side.fill_(-7.0)
            run()
            if self.result.tolist() != [0, plan.NO_ORDINAL, 0]:
                raise ValueError(f"result {self.result.tolist()}")
            cache = PagedCache({layer: LayerPages(*(torch.full_like(side, -7.0, device="cpu") for side in self.target[layer]))})
            payload = self.payload.cpu().numpy()
            for share in self.shares(layer):
                reference.land_share(cache, table, share, KEYS, payload, 0, self.shape.tokens)
            counts = []
            for got, want in zip(self.target[layer], (cache.layers[layer].key, cache.layers[layer].value), strict=True):
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
        # Slots: landing and packing again must give the same payload; the layout itself is checked in tests/kernels/test_slots.py.
        for side in self.slot_tensors:
            side.fill_(0xCD)
        before = self.payload.clone()
        land_slots(self.slots, *self.arguments, self.result, tuning)
        self.payload.fill_(0xCD)
        pack_slots(self.slots, *self.arguments, tuning)
        if self.result.tolist() != [0, plan.NO_ORDINAL, 0] or not torch.equal(before, self.payload):
            raise ValueError("slots and payload do not hold the same bytes")
        return {"bytes_differing": 0}


def copy_bandwidth() -> float:
    """Bytes read plus written a second of a device-to-device copy of 2 GiB."""
    source = torch.randint(0, 255, (2**31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = triton.testing.do_bench(lambda: target.copy_(source), warmup=20, rep=100, return_mode="median")
    return 2 * source.numel() / ms * 1e3


def variants(kind: str, name: str, everything: bool) -> list[Tuning]:
    chosen = VARIANTS if everything or (kind, name) in MAIN else VARIANTS[:3]
    made = [replace(Tuning(), blocks=blocks, warps=warps, registers=registers) for blocks, warps, registers in chosen]
    if kind == "pack" and declared(name).value.kind is CodingKind.AFFINE:
        made += [replace(tuning, ties_up=True) for tuning in made[:1]]
    return made


def jobs(options: argparse.Namespace) -> list[tuple[str, str, Tuning]]:
    wanted = [pair for pair in OPERATIONS if not options.only or f"{pair[0]}:{pair[1]}" in options.only]
    return [(kind, name, tuning) for kind, name in wanted for tuning in variants(kind, name, options.all_variants)]


def warm(options: argparse.Namespace) -> None:
    """Compiles every variant in several processes; they meet in Triton's cache."""
    command = [sys.executable, __file__, *sys.argv[1:]]
    processes = [subprocess.Popen([*command, "--warm", str(i), str(options.jobs)]) for i in range(options.jobs)]
    if any(process.wait() for process in processes):
        print("a compiling process failed; its variants are compiled again below")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=str(Path(os.environ["OUT"]) / "kernels.json") if "OUT" in os.environ else "")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--all-variants", action="store_true")
    parser.add_argument("--warm", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warm:
        index, count = options.warm
        shape = Shape(1, options.tokens, options.chunk)
        for kind, name, tuning in jobs(options)[index::count]:
            try:
                Operation(shape, kind, name).launch(tuning)()
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
        row = {
            "kind": kind,
            "codec": name,
            "blocks": tuning.blocks,
            "warps": tuning.warps,
            "registers": tuning.registers,
            "ties_up": tuning.ties_up,
            "limit_percent": LIMITS.get((kind, name)),
        }
        try:
            row.update(operation.check(tuning))
            run = operation.launch(tuning)
            row["us"] = 1e3 * triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")
            row["floor_us"] = operation.moved / bandwidth * 1e6
            row["percent"] = 100 * row["floor_us"] / row["us"]
            ties = " ".join(f"{k}={row[k]}" for k in row if "differing" in k)
            mode = "ties up" if tuning.ties_up else "       "
            print(f"{kind:10} {name:19} blocks {tuning.blocks} warps {tuning.warps} regs {tuning.registers:3} {mode} "
                  f"{row['us']:7.1f} us  floor {row['floor_us']:6.1f}  {row['percent']:5.1f} %  "
                  f"limit {row['limit_percent'] or '-'}  {ties}", flush=True)  # fmt: skip
        except Exception as error:
            failed += 1
            row["error"] = str(error)[:500]
            print(
                f"{kind:10} {name:19} blocks {tuning.blocks} warps {tuning.warps} regs {tuning.registers}  FAILED: {str(error)[:300]}",
                flush=True,
            )
        record["rows"].append(row)
    print("\nbest of each:")
    for kind, name in dict.fromkeys((r["kind"], r["codec"]) for r in record["rows"]):
        good = [r for r in record["rows"] if (r["kind"], r["codec"]) == (kind, name) and "us" in r and not r["ties_up"]]
        if good:
            r = min(good, key=lambda r: r["us"])
            limit = r["limit_percent"]
            verdict = "" if limit is None else "met" if r["percent"] >= limit else "MISSED"
            print(f"{kind:10} {name:19} {r['us']:7.1f} us  floor {r['floor_us']:6.1f}  {r['percent']:5.1f} %  "
                  f"limit {limit or '-'} {verdict}  (blocks {r['blocks']}, warps {r['warps']}, registers {r['registers']})")  # fmt: skip
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
