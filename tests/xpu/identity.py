"""Whether a device packs the bytes that others pack, and lands a file that another device packed.

python -m tests.xpu.identity digests DEVICE [--vectors N] [--write]    packs N vectors with every codec and compares with digests.json
python -m tests.xpu.identity pack DEVICE FILE.kvb                      packs a small cache with every codec, FILE.CODEC.kvb each
python -m tests.xpu.identity land DEVICE FILE.kvb                      lands such a file there and by the reference, and compares the pages

DEVICE: cpu-reference, cpu, cuda, xpu, xpu-emulated, or interpreted (the shared kernels under Triton's interpreter).
digests.json has the reference's SHA-256 of each codec's payload, and for each device that was asked how many bytes differed, and where.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridge.codecs import CODECS, tables
from bridge.codecs.reference import to_float, unpack_bits
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.shares import ChunkShare, chunk_share
from bridge.wire import (
    CodingKind,
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
from bridge.wire.tags import split_runs

DIGESTS = Path(__file__).with_name("digests.json")
HEADS, HEAD_DIM, BLOCK = 8, 128, 16
KEY = bytes(range(32))


def device_of(name: str) -> Any:
    """A registered device, or the interpreter's, which must be chosen before triton is imported."""
    if name == "interpreted":
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.conformance.interpreted import EXACT, InterpretedDevice

        many = dataclasses.replace(EXACT, blocks=32)
        return InterpretedDevice(1 << 20, lambda operation, codec, head_dim: many)
    from bridge.devices import open_device

    return open_device(name)


@functools.lru_cache(1)
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


@dataclass(frozen=True)
class Apart:
    """Where a payload differs from the reference's, in bytes, and what these are: codes, scalars (norms, scales, zeros) and tags.

    steps: the most that a code is away from the reference's. furthest: of the vectors' elements whose rotated keys have another code, how
    far at most one is from the border of the two, in standard deviations of a rotated element, in float64.
    """

    bytes: int = 0
    codes: int = 0
    steps: int = 0
    scalars: int = 0
    tags: int = 0
    furthest: float = 0.0

    def __str__(self) -> str:
        if not self.bytes:
            return "identical"
        return (
            f"{self.bytes} bytes differ: {self.codes} codes by at most {self.steps} step, rotated keys at most {self.furthest:.1e} sigma "
            f"from the border; {self.scalars} scalars, {self.tags} tags"
        )


def compared(manifest: Manifest, got: np.ndarray, expected: np.ndarray) -> Apart:
    """Payloads of `vectors`, u8, against one another."""
    tokens, codec = manifest.end_token, manifest.codecs[0]
    codes = steps = scalars = tags = 0
    furthest = 0.0
    cache, _ = cache_of(tokens, "cpu", filled=False)
    for (offset, share), first in zip(shares(manifest, cache), range(0, tokens, manifest.chunk_tokens), strict=True):
        span = share.shares[0].as_span()
        both = [split_runs(payload[offset : offset + share.nbytes], span) for payload in (got, expected)]
        tags += int(np.count_nonzero((both[0][1] != both[1][1]).reshape(-1, 8).any(axis=-1)))
        planes = codec.planes(HEAD_DIM)
        for side, coding, plane, beside in ((0, codec.key, planes[0], planes[2]), (1, codec.value, planes[1], planes[3])):
            rows = [blocks[..., plane.offset :][..., : plane.nbytes].reshape(HEADS, -1, plane.row_bytes) for blocks, _ in both]
            odd = np.argwhere((rows[0] != rows[1]).any(axis=-1))
            held = [blocks[..., beside.offset :][..., : beside.nbytes].reshape(HEADS, -1, 2) for blocks, _ in both]
            scalars += int(np.count_nonzero((held[0] != held[1]).any(axis=-1)))
            for head, row in odd:
                pair = [np.ascontiguousarray(of[head, row]) for of in rows]
                if coding.kind in (CodingKind.CODEBOOK, CodingKind.AFFINE):
                    pair = [unpack_bits(one, coding.bits) for one in pair]
                values = [one.astype(int) for one in pair]
                places = np.flatnonzero(values[0] != values[1])
                codes, steps = codes + places.size, max(steps, int(np.abs(values[0] - values[1]).max()))
                if coding.kind is CodingKind.CODEBOOK:
                    x = to_float(vectors(tokens)[side][first + row, head].view(np.uint8), Element.BF16).astype(np.float64)
                    unit = x @ sign_matrix(HEAD_DIM) / np.sqrt(np.sum(x * x))
                    border = tables.midpoints(HEAD_DIM, coding.bits)[np.minimum(*values)[places]].astype(np.float64)
                    furthest = max(furthest, float(np.abs(unit[places] - border * np.sqrt(HEAD_DIM)).max()))
    return Apart(int(np.count_nonzero(got != expected)), codes, steps, scalars, tags, furthest)


def sign_matrix(size: int) -> np.ndarray:
    """Sylvester's matrix of +-1, float64 [size, size]."""
    made = np.ones((1, 1))
    while made.shape[0] < size:
        made = np.block([[made, made], [made, -made]])
    return made


def _pages(cache: PagedCache) -> list[np.ndarray]:
    return [side.cpu().view(torch.int16).numpy() for side in (cache.layers[0].key, cache.layers[0].value)]


def digests(name: str, count: int, write: bool) -> int:
    """Packs `count` vectors (K and V together) with every codec."""
    device, tokens = device_of(name), count // (2 * HEADS)
    known: dict[str, Any] = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    reference = functools.cache(lambda codec: packed(device_of("cpu-reference"), codec, tokens)[1])
    entry, found = known.setdefault(str(count), {"payloads": {}, "bytes that differ": {}}), {}
    for codec in CODECS:
        manifest, payload = packed(device, codec, tokens)
        digest = hashlib.sha256(payload.tobytes()).hexdigest()
        expected = entry["payloads"].get(codec)
        if expected is None:
            expected = entry["payloads"][codec] = hashlib.sha256(reference(codec).tobytes()).hexdigest()
        found[codec] = Apart() if digest == expected else compared(manifest, payload, reference(codec))
        print(f"{name} {codec}, {payload.size} bytes: {found[codec]}", flush=True)
        if write:
            entry["bytes that differ"][name] = {of: apart.bytes for of, apart in found.items()}
            entry.setdefault("where", {})[name] = {of: dataclasses.asdict(apart) for of, apart in found.items() if apart.bytes}
            DIGESTS.write_text(json.dumps(known, indent=1) + "\n")
    return 1 if any(apart.bytes for apart in found.values()) else 0


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
