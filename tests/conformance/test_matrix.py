"""Every kind of source pages with every codec into every kind of target pages, across page sizes and differently split engines.

One element of the matrix is (source pages, codec, target pages, page sizes, shard pair). The prefiller's ranks pack their own payloads, the
decoder's ranks land what `sharding.plan` gives them, and every byte of the target's memory is compared: the tokens with what the reference
codecs say, computed here from plain arrays without any page description, everything else with the poison that it held before.
The default run takes a seeded sample; KVBRIDGE_FULL=1 takes all. `matrix_size()` is the number in docs/ci.md.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch

from backends.cpu.device import CpuReferenceDevice
from bridge.codecs import CODECS, declared, reference
from bridge.codecs.conversion import convert, fold, unfold
from bridge.devices import Device
from bridge.pages import BlockTable, LayerPages, PagedCache, SlotPages, coded_as
from bridge.sharding import Layout, plan
from bridge.shares import chunk_share
from bridge.wire import CodingKind, ContentKind, Element, Group, Layer, Manifest, PayloadMap, SlotCodec, TagKeys, token_digest
from tests.conformance.cases import POISON, place_of, poisoned

FULL = os.environ.get("KVBRIDGE_FULL") == "1"
SAMPLE = 169
HEADS, DIM, LAYERS, FIRST, END, CHUNK = 4, 64, 2, 5, 53, 32
KEY = bytes(range(32))

_DTYPES = {
    Element.BF16: torch.bfloat16,
    Element.FP16: torch.float16,
    Element.FP32: torch.float32,
    Element.E4M3FN: torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Kind:
    """A kind of pages: floats of an element type in a layout, or a preset's slots as rows or regions."""

    name: str
    element: Element = Element.NONE
    layout: str = "nhd"
    preset: str = ""
    scales: tuple[float, float] = (1.0, 1.0)

    def codec(self) -> SlotCodec:
        """What the pages hold."""
        return declared(self.preset or "raw").for_layer(DIM, self.element if self.element is not Element.NONE else Element.BF16)

    @property
    def folded(self) -> bool:
        return self.layout == "regions" and self.codec().key.kind is CodingKind.CODEBOOK


KINDS = (
    Kind("bf16-nhd", Element.BF16),
    Kind("bf16-hnd", Element.BF16, "hnd"),
    Kind("fp16-packed", Element.FP16, "packed"),
    Kind("fp32-spread", Element.FP32, "spread"),
    Kind("fp8-nhd", Element.E4M3FN, scales=(0.5, 0.25)),
    Kind("fp8-hnd", Element.E4M3FN, "hnd"),
    Kind("bf16-tiles", Element.BF16, "tiles"),
    Kind("k8v4-rows", preset="turboquant_k8v4", layout="rows"),
    Kind("k8v4-regions", preset="turboquant_k8v4", layout="regions"),
    Kind("4bit-rows", preset="turboquant_4bit_nc", layout="rows"),
    Kind("4bit-regions", preset="turboquant_4bit_nc", layout="regions"),
    Kind("k3v4-rows", preset="turboquant_k3v4_nc", layout="rows"),
    Kind("3bit-regions", preset="turboquant_3bit_nc", layout="regions"),
)
BLOCK_SIZES = tuple(product((16, 64), repeat=2))
LAYOUTS = {
    "whole": Layout.of(LAYERS, HEADS),
    "TP 2": Layout.of(LAYERS, HEADS, 2),
    "TP 8": Layout.of(LAYERS, HEADS, 8),  # each head on two ranks
    "TP 3 uneven, PP 2": Layout.of(LAYERS, HEADS, 3, 2, heads=[(0, 2), (2, 3), (3, 4)]),
}
SHARD_PAIRS = tuple(product(LAYOUTS, repeat=2))
MATRIX = tuple(product(KINDS, CODECS, KINDS, BLOCK_SIZES, SHARD_PAIRS))


def matrix_size() -> int:
    return len(MATRIX)


def chosen() -> Iterator[tuple[Kind, str, Kind, tuple[int, int], tuple[str, str]]]:
    """All, or a sample that has every pair of page kinds, every codec, every pair of sizes and of shards."""
    if FULL:
        yield from MATRIX
        return
    random = np.random.default_rng(1130)
    pairs = list(product(KINDS, KINDS))
    for number in range(SAMPLE):
        source, target = pairs[number % len(pairs)]
        sizes, shards = BLOCK_SIZES[random.integers(len(BLOCK_SIZES))], SHARD_PAIRS[number % len(SHARD_PAIRS)]
        yield source, list(CODECS)[(number + number // 7) % len(CODECS)], target, sizes, shards


# What the reference says, from plain arrays.


@functools.cache
def source_rows(kind: Kind, layer: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For K and V: codes u8 [heads, tokens, bytes] and scalars, as the pages of this kind hold them before any folding."""
    x = np.random.default_rng(17 + layer).standard_normal((2, HEADS, END - FIRST, DIM)).astype(np.float32)
    codec = kind.codec()
    return [reference.encode(x[i], side, kind.scales[i]) for i, side in enumerate((codec.key, codec.value))]


def wire_codec(name: str, source: Kind) -> SlotCodec:
    """raw is what the source's pages hold; other codecs go by their declaration."""
    if name == "raw":
        return source.codec()
    return declared(name).for_layer(DIM, source.element if source.element is not Element.NONE else Element.BF16)


def wire_scales(codec: SlotCodec, source: Kind) -> tuple[float, float]:
    """Sides with a scale take the source's."""
    key, value = (scale if side.scaled else 1.0 for side, scale in zip((codec.key, codec.value), source.scales, strict=True))
    return key, value


@functools.cache
def wire_rows(source: Kind, codec: str, layer: int) -> list[tuple[np.ndarray, np.ndarray]]:
    wire, held = wire_codec(codec, source), source.codec()
    scales, result = wire_scales(wire, source), []
    for i, (coding, pages) in enumerate(((wire.key, held.key), (wire.value, held.value))):
        codes, scalars = source_rows(source, layer)[i]
        if i == 0 and source.folded:
            scalars = unfold(codes, fold(codes, scalars, pages, DIM), pages, DIM)
        result.append(convert(codes, scalars, pages, coding, DIM, source.scales[i], scales[i]))
    return result


@functools.cache
def target_rows(source: Kind, codec: str, target: Kind, layer: int) -> list[tuple[np.ndarray, np.ndarray]]:
    wire, held = wire_codec(codec, source), target.codec()
    scales, result = wire_scales(wire, source), []
    for i, (coding, pages) in enumerate(((wire.key, held.key), (wire.value, held.value))):
        codes, scalars = convert(*wire_rows(source, codec, layer)[i], coding, pages, DIM, scales[i], target.scales[i])
        if i == 0 and target.folded:
            scalars = fold(codes, scalars, pages, DIM)
        result.append((codes, scalars))
    return result


# Pages.


@dataclass
class Memory:
    """One rank's pages, the tensors that hold them, and where the tokens lie."""

    cache: PagedCache
    table: BlockTable
    backing: list[torch.Tensor]


def build(kind: Kind, block: int, holding, seed: int, place: str) -> Memory:
    """Poisoned pages of one rank."""
    needed, heads = -(-END // block), holding.end_head - holding.first_head
    pages = needed + 1
    layers, backing = {}, []
    for index in holding.layers:
        described, tensors = _layer(kind, pages, block, heads, place)
        layers[index] = described
        backing += tensors
    table = BlockTable(np.random.default_rng(seed).permutation(pages)[:needed].tolist(), block)
    return Memory(PagedCache(layers, holding.first_head), table, backing)


def _layer(kind: Kind, pages: int, block: int, heads: int, place: str):
    if kind.preset:
        codec = declared(kind.preset)
        slot = kind.codec().slot_bytes(DIM)
        if kind.layout == "rows":
            tensor = poisoned((pages, block, heads, slot), torch.uint8).to(place)
            return SlotPages.rows(tensor, codec, DIM), [tensor]
        tensor = poisoned((pages, block * heads * slot), torch.uint8).to(place)
        return SlotPages.regions(tensor, codec, DIM, block, heads), [tensor]
    dtype = _DTYPES[kind.element]
    if kind.layout == "tiles":
        # vLLM's CPU attention: K [tok/16][dim/2][tok%16][dim%2], V [dim/16][tok/2][dim%16][tok%2].
        tensor = poisoned((pages, heads, 2, block * DIM), dtype).to(place)
        key = tensor[:, :, 0].unflatten(2, (block // 16, DIM // 2, 16, 2)).permute(0, 2, 4, 1, 3, 5)
        value = tensor[:, :, 1].unflatten(2, (DIM // 16, block // 2, 16, 2)).permute(0, 3, 5, 1, 2, 4)
        return LayerPages(key, value, *kind.scales), [tensor]
    if kind.layout == "packed":
        tensor = poisoned((pages, block, heads, 2 * DIM), dtype).to(place)
        return LayerPages.nhd(tensor[..., :DIM], tensor[..., DIM:], *kind.scales), [tensor]
    if kind.layout == "spread":
        apart = [poisoned((pages, block, heads, DIM, 2), dtype).to(place) for _ in range(2)]
        return LayerPages.nhd(apart[0][..., 1], apart[1][..., 1], *kind.scales), apart
    shape = (pages, block, heads, DIM) if kind.layout == "nhd" else (pages, heads, block, DIM)
    both = [poisoned(shape, dtype).to(place) for _ in range(2)]
    return (LayerPages.nhd if kind.layout == "nhd" else LayerPages.hnd)(*both, *kind.scales), both


def views(memory: Memory) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """(layer, 0 for K or 1 for V, 0 for codes or 1 for scalars, the pages' bytes as [page, token, head, bytes])."""
    for index, pages in memory.cache.layers.items():
        for number, side in enumerate(pages.sides):
            for part, tensor in enumerate((side.codes, side.scalars)):
                if tensor is not None and tensor.numel():
                    yield index, number, part, tensor


def put(memory: Memory, tensor: torch.Tensor, rows: np.ndarray | None) -> None:
    """Writes rows [heads, tokens, bytes] into the pages' tokens, or poison."""
    page, position = (torch.from_numpy(x) for x in memory.table.locate(FIRST, END, tensor.shape[0]))
    element = tensor.element_size()
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[element]
    target = tensor.view(word)
    if rows is None:
        value = poisoned((1,), word).to(tensor.device)
    else:
        words = torch.from_numpy(np.ascontiguousarray(rows.swapaxes(0, 1))).view(word)  # [tokens, heads, elements]
        value = words.to(tensor.device).reshape(*words.shape[:2], *tensor.shape[4 if tensor.dim() == 6 else 3 :])
    if tensor.dim() == 6:
        target[page, position // tensor.shape[2], position % tensor.shape[2]] = value
    else:
        target[page, position] = value


def fill(memory: Memory, rows) -> None:
    first = memory.cache.first_head
    for index, side, part, tensor in views(memory):
        heads = tensor.shape[3 if tensor.dim() == 6 else 2]
        put(memory, tensor, rows(index)[side][part][first : first + heads])


def source_memory(kind: Kind, block: int, layout: Layout, place: str) -> list[Memory]:
    made = []
    for rank in range(layout.ranks):
        memory = build(kind, block, layout.holding(rank), 100 + rank, place)

        def stored(layer: int) -> list[tuple[np.ndarray, np.ndarray]]:
            (codes, scalars), value = source_rows(kind, layer)
            return [(codes, fold(codes, scalars, kind.codec().key, DIM) if kind.folded else scalars), value]

        fill(memory, stored)
        made.append(memory)
    return made


def manifest_of(source: Kind, codec: str, layout: Layout, rank: int) -> Manifest:
    wire, holding = wire_codec(codec, source), layout.holding(rank)
    manifest = Manifest(
        model_digest=bytes(32),
        content=((ContentKind.TOKENS, token_digest([1])),),
        request_id="matrix",
        lease=3,
        generation=rank,
        chunk_tokens=CHUNK,
        groups=(Group(HEADS, DIM, FIRST, END, *holding.heads),),
        codecs=(wire,),
        layers=tuple(Layer(index, 0, 0, *wire_scales(wire, source)) for index in holding.layers),
        shard=layout.shard(rank),
    )
    manifest.check()
    return manifest


@functools.lru_cache(maxsize=64)
def packed(device: Device, source: Kind, codec: str, block: int, split: str) -> list[tuple[Manifest, list[np.ndarray]]]:
    """Each prefiller rank's payload by chunks, packed by the device and compared with the reference's rows."""
    layout, result = LAYOUTS[split], []
    for rank, memory in enumerate(source_memory(source, block, layout, place_of(device))):
        manifest = manifest_of(source, codec, layout, rank)
        keys, payload, chunks = TagKeys(KEY, 3, rank), PayloadMap(manifest), []
        for index in range(payload.chunk_count):
            chunk = payload.chunk(index)
            share = chunk_share(manifest, chunk, memory.cache)
            out = np.full(chunk.nbytes, POISON, np.uint8)
            device.pack(memory.cache, memory.table, share.shares, keys, out)
            chunks.append(out)
        result.append((manifest, chunks))
    return result


def close(device: Device, got: np.ndarray, expected: np.ndarray, coding, scalars: tuple[np.ndarray, np.ndarray], scale: float) -> None:
    """Equal bytes from an exact device; within a code's width from another."""
    if getattr(device, "exact", False):
        np.testing.assert_array_equal(got, expected)
        return
    a, b = (reference.decode(codes, s, coding, DIM, scale) for codes, s in zip((got, expected), scalars, strict=True))
    assert float(np.square(a - b).sum()) <= 1e-3 * float(np.square(b).sum())


def check(device: Device, source: Kind, codec: str, target: Kind, blocks: tuple[int, int], shards: tuple[str, str]) -> None:
    payloads = packed(device, source, codec, blocks[0], shards[0])
    layout = LAYOUTS[shards[1]]
    reads = plan(LAYOUTS[shards[0]], layout).reads
    place = place_of(device)
    for rank in range(layout.ranks):
        memory = build(target, blocks[1], layout.holding(rank), 200 + rank, place)
        for read in reads[rank]:
            manifest, chunks = payloads[read.source]
            keys, payload = TagKeys(KEY, 3, read.source), PayloadMap(manifest)
            part = memory.cache.part(list(read.part.layers), *read.part.heads)
            for index, data in enumerate(chunks):
                share = chunk_share(manifest, payload.chunk(index), part)
                offset = payload.chunk(index).offset
                cut = np.concatenate([data[remote - offset : remote - offset + size] for remote, _, size in share.ranges])
                device.land(part, memory.table, share.shares, keys, cut, FIRST, END)
        found = [tensor.cpu().view(torch.uint8).numpy() for tensor in memory.backing]
        if not all(map(np.array_equal, found, expected_bytes(source, codec, target, blocks[1], shards[1], rank))):
            compare(device, memory, lambda layer: target_rows(source, codec, target, layer), target)
            assert not getattr(device, "exact", False), "bytes differ, and no row does"


@functools.lru_cache(maxsize=256)
def expected_bytes(source: Kind, codec: str, target: Kind, block: int, split: str, rank: int) -> list[np.ndarray]:
    """All memory of one decoder rank as the reference has it: its tokens' rows, and poison around them."""
    memory = build(target, block, LAYOUTS[split].holding(rank), 200 + rank, "cpu")
    fill(memory, lambda layer: target_rows(source, codec, target, layer))
    return [tensor.view(torch.uint8).numpy() for tensor in memory.backing]


def compare(device: Device, memory: Memory, rows, target: Kind) -> None:
    """Tokens by rows, so that a failure says where, then everything around them."""
    first, codec = memory.cache.first_head, target.codec()
    found: dict[tuple[int, int, int], np.ndarray] = {}
    for index, side, part, tensor in views(memory):
        page, position = (torch.from_numpy(x) for x in memory.table.locate(FIRST, END, tensor.shape[0]))
        tile = tensor.shape[2]
        got = tensor[page, position // tile, position % tile] if tensor.dim() == 6 else tensor[page, position]
        found[index, side, part] = got.flatten(2).contiguous().cpu().view(torch.uint8).numpy().swapaxes(0, 1)
    for (index, side, part), got in found.items():
        if part:
            continue
        expected = rows(index)[side]
        heads = slice(first, first + got.shape[0])
        none = np.zeros((*got.shape[:2], 0), np.uint8)
        scalars = found.get((index, side, 1), none)
        coding = (codec.key, codec.value)[side]
        close(device, got, expected[0][heads], coding, (scalars, expected[1][heads]), target.scales[side])
        if getattr(device, "exact", False):
            np.testing.assert_array_equal(scalars, expected[1][heads])
    for _, _, _, tensor in views(memory):
        put(memory, tensor, None)
    for tensor in memory.backing:
        assert bool((tensor.view(torch.uint8) == POISON).all())


def test_a_described_kind_is_what_its_pages_hold() -> None:
    """The judge's codecs are those of the page descriptions, and the sample covers what it says."""
    whole = LAYOUTS["whole"].holding(0)
    for kind in KINDS:
        pages = build(kind, 32, whole, 1, "cpu").cache.layers[0]
        assert coded_as(pages) == kind.codec()
        assert (pages.sides[0].block_size, pages.sides[0].heads, pages.head_dim) == (32, HEADS, DIM)
    sample = list(chosen())
    assert {(case[0], case[2]) for case in sample} == set(product(KINDS, KINDS))
    assert [len({case[axis] for case in sample}) for axis in (1, 3, 4)] == [len(CODECS), len(BLOCK_SIZES), len(SHARD_PAIRS)]


@pytest.mark.slow
@pytest.mark.timeout(0 if FULL else 300)
@pytest.mark.parametrize("source", KINDS, ids=lambda kind: kind.name)
def test_matrix(device: Device, source: Kind) -> None:
    done = 0
    for case in chosen():
        if case[0] is source:
            try:
                check(device, *case)
            except Exception as error:
                error.add_note(f"{source.name}, {case[1]}, {case[2].name}, page sizes {case[3]}, {case[4][0]} to {case[4][1]}")
                raise
            done += 1
    assert done == (len(MATRIX) if FULL else SAMPLE) // len(KINDS)


class _Faulty:
    """A device that lands well, and then changes one byte: of the last token's first row, or of a page that is none of the request's."""

    exact = True

    def __init__(self, device: Device, outside: bool) -> None:
        self._device, self._outside = device, outside

    def pack(self, *arguments) -> None:
        self._device.pack(*arguments)

    def land(self, cache: PagedCache, table: BlockTable, shares, keys, data: np.ndarray, first: int, end: int) -> None:
        self._device.land(cache, table, shares, keys, data, first, end)
        codes = cache.layers[shares[0].model_layer].sides[0].codes.view(torch.uint8)
        page, position = table.locate(end - 1, end, codes.shape[0])
        if self._outside:
            page = [number for number in range(codes.shape[0]) if number not in table.pages]
        codes[page[0], position[0], 0, 0] = 0 if self._outside else codes[page[0], position[0], 0, 0] ^ 1


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("target", [KINDS[0], KINDS[1], KINDS[4], KINDS[7], KINDS[8]], ids=lambda kind: kind.name)
def test_the_judge_sees_one_wrong_byte(outside: bool, target: Kind) -> None:
    device = _Faulty(CpuReferenceDevice(), outside)
    with pytest.raises(AssertionError):
        check(device, KINDS[0], "raw", target, (16, 64), ("TP 2", "whole"))
