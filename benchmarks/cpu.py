"""Pack and land on one core of the CPU, beside the copy speed of the machine in the same run.

    python benchmarks/cpu.py [--device cpu] [--element bf16] [--head-dim 128] [--json]

A figure is bytes of the engine's KV (both sides, as they lie in the pages) a second, on one thread, in processor time of that thread, so
that other work on the machine hardly shows. Tags are made and verified. Best of several rounds, the codecs taking turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from backends.cpu.device import CpuDevice, CpuReferenceDevice
from bridge.codecs import CODECS, NotCarried
from bridge.devices import DeviceError
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.shares import ChunkShare, chunk_share
from bridge.wire import ContentKind, Element, Group, Layer, Manifest, PayloadMap, TagKeys, new_key, token_digest

DTYPES = {"bf16": (torch.bfloat16, Element.BF16), "fp16": (torch.float16, Element.FP16), "fp32": (torch.float32, Element.FP32)}


def seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def paged(args: argparse.Namespace, random: bool) -> PagedCache:
    generator = torch.Generator().manual_seed(1)
    dtype, _ = DTYPES[args.element]
    pages = -(-args.tokens // args.block_size)
    shape = (pages, args.block_size, args.heads, args.head_dim)
    make = (lambda: torch.randn(shape, generator=generator).to(dtype)) if random else (lambda: torch.zeros(shape, dtype=dtype))
    return PagedCache({index: LayerPages.nhd(make(), make()) for index in range(args.layers)})


def chunk(args: argparse.Namespace, name: str, cache: PagedCache) -> ChunkShare:
    manifest = Manifest(
        model_digest=bytes(32),
        content=((ContentKind.TOKENS, token_digest([0])),),
        request_id="benchmark",
        lease=1,
        generation=1,
        chunk_tokens=-(-args.tokens // 16) * 16,
        groups=(Group(args.heads, args.head_dim, 0, args.tokens),),
        codecs=(CODECS[name].for_layer(args.head_dim, DTYPES[args.element][1]),),
        layers=tuple(Layer(index, 0, 0) for index in range(args.layers)),
    )
    return chunk_share(manifest, PayloadMap(manifest).chunk(0), cache)


def measure(args: argparse.Namespace) -> dict:
    before = time.process_time()
    device = CpuDevice(threads=1) if args.device == "cpu" else CpuReferenceDevice()
    ready = time.process_time() - before
    source, target = paged(args, True), paged(args, False)
    pages = source.layers[0].key.shape[0]
    table = BlockTable(np.random.default_rng(2).permutation(pages).tolist(), args.block_size)
    keys = TagKeys(new_key(), 1, 1)
    kv_bytes = args.tokens * args.heads * args.head_dim * args.layers * 2 * source.layers[0].key.element_size()
    copied = np.ones(kv_bytes, np.uint8), np.ones(kv_bytes, np.uint8)
    runs: dict[str, tuple[ChunkShare, np.ndarray]] = {}
    for name in args.codec or CODECS:
        try:
            share = chunk(args, name, source)
        except NotCarried as error:
            print(error, file=sys.stderr)
            continue
        runs[name] = (share, np.ones(share.nbytes, np.uint8))
    best: dict[tuple[str, str], float] = {}

    def note(name: str, step: str, took: float) -> None:
        best[name, step] = min(took, best.get((name, step), took))

    for _ in range(args.rounds):
        note("", "copy", seconds(lambda: np.copyto(copied[1], copied[0])))
        for name, (share, out) in runs.items():
            note(name, "pack", seconds(lambda s=share, o=out: device.pack(source, table, s.shares, keys, o)))
            note(name, "land", seconds(lambda s=share, o=out: device.land(target, table, s.shares, keys, o, 0, args.tokens)))
    return {
        "machine": platform.processor() or platform.machine(),
        "device": device.name,
        "element": args.element,
        "head_dim": args.head_dim,
        "kv_mb": kv_bytes / 1e6,
        "ready_s": round(ready, 2),
        "copy_gb_s": round(kv_bytes / best["", "copy"] / 1e9, 3),
        "codecs": {
            name: {
                "payload_ratio": round(share.nbytes / kv_bytes, 4),
                "pack_gb_s": round(kv_bytes / best[name, "pack"] / 1e9, 3),
                "land_gb_s": round(kv_bytes / best[name, "land"] / 1e9, 3),
            }
            for name, (share, _) in runs.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="GB/s of KV on one core, pack and land, per codec")
    parser.add_argument("--device", choices=("cpu", "cpu-reference"), default="cpu")
    parser.add_argument("--element", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--codec", action="append", choices=tuple(CODECS), help="may be given several times; all without it")
    for name, value in (("head-dim", 128), ("heads", 8), ("layers", 4), ("tokens", 2048), ("block-size", 16), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        result = measure(args)
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"{result['device']} on {result['machine']}: {args.element}, head dim {args.head_dim}, {result['kv_mb']:.0f} MB of KV, one thread"
    )
    print(f"memory copy {result['copy_gb_s']:.2f} GB/s; kernels ready after {result['ready_s']:.1f} s of processor time\n")
    print(f"{'codec':<22}{'bytes':>8}{'pack GB/s':>12}{'land GB/s':>12}{'of copy':>16}")
    for name, row in result["codecs"].items():
        part = [row[step] / result["copy_gb_s"] for step in ("pack_gb_s", "land_gb_s")]
        print(f"{name:<22}{row['payload_ratio']:>8.1%}{row['pack_gb_s']:>12.2f}{row['land_gb_s']:>12.2f}{part[0]:>9.0%}{part[1]:>7.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
