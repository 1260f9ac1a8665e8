"""Whether a device packs the bytes that others pack, and lands a file that another device packed.

python -m tests.xpu.identity digests DEVICE [--vectors N] [--write]    packs N vectors with every codec and compares with digests.json
python -m tests.xpu.identity pack DEVICE FILE.kvb                      packs a small cache with every codec, FILE.CODEC.kvb each
python -m tests.xpu.identity land DEVICE FILE.kvb                      lands such a file there and by the reference, and compares the pages

DEVICE: cpu-reference, cpu, cuda, xpu, xpu-emulated, or interpreted (the shared kernels under Triton's interpreter).
digests.json has the reference's SHA-256 of each codec's payload, and for each device that was asked how many codes differed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridge.codecs import CODECS
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.shares import ChunkShare, chunk_share
from bridge.wire import (
    ContentKind,
    Element,
    Group,
    Layer,
    Manifest,
    PayloadMap,
    TagKeys,
    new_key,
    read_container,
    token_digest,
    write_container,
)

DIGESTS = Path(__file__).with_name("digests.json")
HEADS, HEAD_DIM, BLOCK = 8, 128, 16
KEY = bytes(range(32))


def device_of(name: str) -> Any:
    """A registered device, or the interpreter's, which must be chosen before triton is imported."""
    if name == "interpreted":
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.conformance.interpreted import InterpretedDevice

        return InterpretedDevice()
    from bridge.devices import open_device

    return open_device(name)


def vectors(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V, bf16 as u16 [tokens, HEADS, HEAD_DIM]: normal, of magnitudes from 1e-2 to 1e2, a few of zeros."""
    random = np.random.Generator(np.random.PCG64(20261130))
    made = []
    for _ in range(2):
        x = random.standard_normal((tokens, HEADS, HEAD_DIM), dtype=np.float32)
        x *= np.exp2(random.integers(-7, 8, (tokens, HEADS, 1)).astype(np.float32))
        x[random.random((tokens, HEADS)) < 0.002] = 0
        bits = x.view(np.uint32)
        made.append(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))
    return made[0], made[1]


def cache_of(tokens: int, place: str, filled: bool) -> tuple[PagedCache, BlockTable]:
    """One layer of bf16 pages in NHD, scattered; NaN where nothing is."""
    pages = -(-tokens // BLOCK) + 1
    table = BlockTable(np.random.Generator(np.random.PCG64(7)).permutation(pages)[: pages - 1].tolist(), BLOCK)
    page, position = table.locate(0, tokens, pages)
    sides = []
    for x in vectors(tokens):
        held = np.full((pages, BLOCK, HEADS, HEAD_DIM), 0x7FC1, np.uint16)
        if filled:
            held[page, position] = x
        sides.append(torch.from_numpy(held.view(np.int16)).view(torch.bfloat16).to(place))
    return PagedCache({0: LayerPages.nhd(*sides)}), table


def manifest_of(codec: str, tokens: int) -> Manifest:
    made = Manifest(
        model_digest=bytes(32),
        content=((ContentKind.TOKENS, token_digest([1])),),
        request_id="identity",
        lease=1,
        generation=0,
        chunk_tokens=4096,
        groups=(Group(HEADS, HEAD_DIM, 0, tokens),),
        codecs=(CODECS[codec].for_layer(HEAD_DIM, Element.BF16),),
        layers=(Layer(0, 0, 0),),
    )
    made.check()
    return made


def shares(manifest: Manifest, cache: PagedCache) -> list[tuple[int, ChunkShare]]:
    """(offset in the payload, share) of each chunk."""
    layout = PayloadMap(manifest)
    return [(layout.chunk(i).offset, chunk_share(manifest, layout.chunk(i), cache)) for i in range(layout.chunk_count)]


def packed(device: Any, codec: str, tokens: int, key: bytes = KEY) -> tuple[Manifest, np.ndarray]:
    """The device's whole payload, u8."""
    manifest = manifest_of(codec, tokens)
    cache, table = cache_of(tokens, getattr(device, "torch_device", "cpu"), filled=True)
    payload = np.full(PayloadMap(manifest).payload_bytes, 0xCD, np.uint8)
    keys = TagKeys(key, manifest.lease, manifest.generation)
    for offset, share in shares(manifest, cache):
        device.pack(cache, table, share.shares, keys, payload[offset : offset + share.nbytes])
    return manifest, payload


def codes_apart(a: np.ndarray, b: np.ndarray) -> int:
    """Bytes that differ, of two payloads; a code's difference also changes its block's tag, eight bytes."""
    return int(np.count_nonzero(a != b))


def _pages(cache: PagedCache) -> list[np.ndarray]:
    return [side.cpu().view(torch.int16).numpy() for side in (cache.layers[0].key, cache.layers[0].value)]


def digests(name: str, count: int, write: bool) -> int:
    """Packs `count` vectors (K and V together) with every codec."""
    device, tokens = device_of(name), count // (2 * HEADS)
    known: dict[str, Any] = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    reference = functools.cache(lambda codec: packed(device_of("cpu-reference"), codec, tokens)[1])
    entry, found = known.setdefault(str(count), {"payloads": {}, "bytes that differ": {}}), {}
    for codec in CODECS:
        _, payload = packed(device, codec, tokens)
        digest = hashlib.sha256(payload.tobytes()).hexdigest()
        expected = entry["payloads"].get(codec)
        if expected is None:
            expected = entry["payloads"][codec] = hashlib.sha256(reference(codec).tobytes()).hexdigest()
        found[codec] = 0 if digest == expected else codes_apart(payload, reference(codec))
        print(f"{name} {codec}: {'identical' if digest == expected else f'{found[codec]} of {payload.size} bytes differ'}", flush=True)
        if write:
            entry["bytes that differ"][name] = found
            DIGESTS.write_text(json.dumps(known, indent=1) + "\n")
    return 1 if any(found.values()) else 0


def pack_files(name: str, path: Path, tokens: int = 200) -> int:
    device = device_of(name)
    for codec in CODECS:
        key = new_key()
        manifest, payload = packed(device, codec, tokens, key)
        target = path.with_suffix(f".{codec}.kvb")
        with target.open("wb") as file:
            write_container(file, manifest, key, payload.data)
        print(f"{target}: {payload.size} bytes packed by {device.name}")
    return 0


def land_file(name: str, path: Path) -> int:
    """Lands a file by the device and by the reference.

    Returns 0 where the pages are equal in every byte; for a device that is not exact, where at most one element of 500 differs.
    """
    manifest, key, payload = read_container(path)
    data, tokens = np.frombuffer(payload, np.uint8), manifest.end_token
    keys, landed, asked = TagKeys(key, manifest.lease, manifest.generation), [], device_of(name)
    for device in (asked, device_of("cpu-reference")):
        cache, table = cache_of(tokens, getattr(device, "torch_device", "cpu"), filled=False)
        for offset, share in shares(manifest, cache):
            device.land(cache, table, share.shares, keys, data[offset : offset + share.nbytes], 0, tokens)
        landed.append(_pages(cache))
    apart = sum(int(np.count_nonzero(a != b)) for a, b in zip(*landed, strict=True))
    print(f"{path.name} landed by {name}: {'pages equal the reference' if not apart else f'{apart} elements differ'}")
    return 1 if apart > (0 if getattr(asked, "exact", False) else 2 * landed[0][0].size // 500) else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("digests", "pack", "land"))
    parser.add_argument("device")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--write", action="store_true", help="keep the result in digests.json")
    options = parser.parse_args(arguments)
    if options.what == "digests":
        return digests(options.device, options.vectors, options.write)
    if options.file is None:
        parser.error("a file is wanted")
    return (pack_files if options.what == "pack" else land_file)(options.device, options.file)


if __name__ == "__main__":
    sys.exit(main())
