"""Caches, tables, payloads and comparisons that the conformance tests share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from backends.cpu import reference
from bridge.codecs import CODECS, NotCarried
from bridge.codecs.reference import unpack_bits
from bridge.devices import Device
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
    SlotCodec,
    TagKeys,
    token_digest,
    verify_tags,
)
from bridge.wire.tags import split_runs

DTYPES = {Element.BF16: torch.bfloat16, Element.FP16: torch.float16, Element.FP32: torch.float32}
ELEMENTS = tuple(DTYPES)
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
LAYOUTS = ("nhd", "hnd", "packed", "packed_hnd", "spread")
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
POISON = 0xCD
GUARD = 64
"""Poisoned bytes before and behind a buffer's used part."""


def carried(name: str, element: Element, head_dim: int) -> bool:
    try:
        CODECS[name].for_layer(head_dim, element)
    except NotCarried:
        return False
    return True


@dataclass(frozen=True)
class Case:
    """One payload: tokens [first, end), and the pages on both sides."""

    codec: str = "raw"
    element: Element = Element.BF16
    head_dim: int = 64
    heads: int = 3
    first: int = 5
    end: int = 150
    chunk_tokens: int = 64
    layers: tuple[int, ...] = (0, 3)
    layout: str = "nhd"
    block_size: int = 16
    target_layout: str = "hnd"
    target_block_size: int = 32
    key_scale: float = 1.0
    value_scale: float = 1.0
    seed: int = 1

    def __str__(self) -> str:
        pages = f"{self.layout}{self.block_size}-{self.target_layout}{self.target_block_size}"
        return f"{self.codec}-{self.element.name}-{self.head_dim}-{pages}-{self.first}-{self.end}"

    def manifest(self) -> Manifest:
        codec = CODECS[self.codec].for_layer(self.head_dim, self.element)
        scales = {
            side: scale if coding.scaled else 1.0
            for side, coding, scale in (("key_scale", codec.key, self.key_scale), ("value_scale", codec.value, self.value_scale))
        }
        manifest = Manifest(
            model_digest=bytes(32),
            content=((ContentKind.TOKENS, token_digest([1, 2, 3])),),
            request_id="conformance",
            lease=7,
            generation=2,
            chunk_tokens=self.chunk_tokens,
            groups=(Group(self.heads, self.head_dim, self.first, self.end),),
            codecs=(codec,),
            layers=tuple(Layer(index, 0, 0, **scales) for index in self.layers),
        )
        manifest.check()
        return manifest

    def keys(self, generation: int = 2) -> TagKeys:
        return TagKeys(bytes(range(32)), 7, generation)


@dataclass
class Memory:
    """A cache, its table, and the tensors that hold it with everything around the vectors."""

    cache: PagedCache
    table: BlockTable
    backing: list[torch.Tensor] = field(default_factory=list)

    def bytes(self) -> list[np.ndarray]:
        return [tensor.view(torch.uint8).cpu().numpy().copy() for tensor in self.backing]


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.full((count,), POISON, dtype=torch.uint8).view(dtype).view(shape)


def _pages(layout: str, pages: int, block_size: int, heads: int, dim: int, dtype: torch.dtype, place: str) -> tuple[LayerPages, list]:
    token_outside = (pages, block_size, heads, dim)
    head_outside = (pages, heads, block_size, dim)
    if layout in ("nhd", "hnd"):
        both = [poisoned(token_outside if layout == "nhd" else head_outside, dtype).to(place) for _ in range(2)]
        return (LayerPages.nhd if layout == "nhd" else LayerPages.hnd)(*both), both
    if layout == "spread":
        apart = [poisoned((*token_outside, 2), dtype).to(place) for _ in range(2)]
        return LayerPages.nhd(apart[0][..., 1], apart[1][..., 1]), apart
    shape = token_outside if layout == "packed" else head_outside
    one = poisoned((*shape[:3], 2 * dim), dtype).to(place)
    make = LayerPages.nhd if layout == "packed" else LayerPages.hnd
    return make(one[..., :dim], one[..., dim:]), [one]


def allocate(
    case: Case,
    layout: str,
    block_size: int,
    seed: int,
    place: str = "cpu",
    element: Element | None = None,
    first_head: int = 0,
    heads: int | None = None,
) -> Memory:
    """Poisoned pages for the case's tokens, one page more than needed, scattered; table entries of no token name no page."""
    random = np.random.default_rng(seed)
    needed = -(-case.end // block_size)
    unused = case.first // block_size
    count = needed - unused + 1
    layers, backing = {}, []
    for index in case.layers:
        layers[index], tensors = _pages(
            layout, count, block_size, heads or case.heads, case.head_dim, DTYPES[element or case.element], place
        )
        backing += tensors
    ids = random.permutation(count)[: needed - unused]
    return Memory(PagedCache(layers, first_head), BlockTable([-9] * unused + [int(i) for i in ids] + [10**6], block_size), backing)


def random_vectors(case: Case) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By layer, K and V [tokens, heads, head_dim]: normal, with magnitudes from 1e-3 to 1e3 and some vectors of one value."""
    generator = torch.Generator().manual_seed(case.seed)
    result = {}
    for index in case.layers:
        sides = []
        for _ in range(2):
            shape = (case.end - case.first, case.heads, case.head_dim)
            x = torch.randn(shape, generator=generator)
            x = x * 10 ** (torch.rand(shape[:2], generator=generator)[..., None] * 6 - 3)
            x[torch.rand(shape[:2], generator=generator) < 0.05] = 0.25
            x[torch.rand(shape[:2], generator=generator) < 0.05] = 0
            sides.append(x.to(DTYPES[case.element]))
        result[index] = (sides[0], sides[1])
    return result


def fill(case: Case, memory: Memory, vectors: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for index, pages in memory.cache.layers.items():
        page, position = memory.table.locate(case.first, case.end, pages.key.shape[0])
        for side, x in zip((pages.key, pages.value), vectors[index], strict=True):
            side[torch.from_numpy(page), torch.from_numpy(position)] = x.to(side.device)


def place_of(device: Device) -> str:
    return getattr(device, "torch_device", "cpu")


def source(case: Case, place: str = "cpu", vectors: dict | None = None) -> Memory:
    memory = allocate(case, case.layout, case.block_size, case.seed + 1, place)
    fill(case, memory, vectors if vectors is not None else random_vectors(case))
    return memory


def target(case: Case, place: str = "cpu", **other) -> Memory:
    return allocate(case, case.target_layout, case.target_block_size, case.seed + 2, place, **other)


def chunks(manifest: Manifest, cache: PagedCache) -> list[ChunkShare]:
    payload = PayloadMap(manifest)
    return [chunk_share(manifest, payload.chunk(index), cache) for index in range(payload.chunk_count)]


def staged(device: Device, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """(all of a poisoned buffer, the part between its guards)."""
    whole = device.allocate_staging(nbytes + 2 * GUARD).bytes()
    whole[...] = POISON
    return whole, whole[GUARD : GUARD + nbytes]


def guards_hold(whole: np.ndarray, nbytes: int) -> bool:
    return bool((whole[:GUARD] == POISON).all() and (whole[GUARD + nbytes :] == POISON).all())


def reference_pack(memory: Memory, share: ChunkShare, keys: TagKeys) -> np.ndarray:
    out = np.full(share.nbytes, POISON, np.uint8)
    for one in share.shares:
        reference.pack_share(memory.cache, memory.table, one, keys, out)
    return out


def reference_land(memory: Memory, share: ChunkShare, keys: TagKeys, data: np.ndarray, first: int, end: int) -> None:
    for one in share.shares:
        reference.land_share(memory.cache, memory.table, one, keys, data, first, end)


def _rank(codes: np.ndarray, kind: CodingKind) -> np.ndarray:
    """Codes as integers that ascend with the values that they stand for."""
    if kind is CodingKind.FP8:
        return np.where(codes & 0x80, -(codes & 0x7F).astype(int), (codes & 0x7F).astype(int))
    return codes.view(np.int8).astype(int) if kind is CodingKind.INT8 else codes.astype(int)


def compare_payload(device: Device, share: ChunkShare, keys: TagKeys, got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bytes; for a device that is not exact: neighbouring codes, at most one of 2,000, scalars within a unit, valid tags."""
    if getattr(device, "exact", False):
        np.testing.assert_array_equal(got, expected)
        return
    differing = total = 0
    for one in share.shares:
        parts = [data[one.offset : one.offset + one.nbytes] for data in (got, expected)]
        verify_tags(parts[0], one.as_span(), keys)
        blocks = [split_runs(part, one.as_span())[0] for part in parts]
        planes = one.codec.planes(one.head_dim)
        for coding, codes, scalars in ((one.codec.key, planes[0], planes[2]), (one.codec.value, planes[1], planes[3])):
            rows = [
                np.ascontiguousarray(block[..., codes.offset : codes.offset + codes.nbytes]).reshape(-1, codes.row_bytes)
                for block in blocks
            ]
            if coding.kind is CodingKind.RAW:
                np.testing.assert_array_equal(*rows)
                continue
            values = [
                _rank(unpack_bits(r, coding.bits) if coding.kind in (CodingKind.CODEBOOK, CodingKind.AFFINE) else r, coding.kind)
                for r in rows
            ]
            steps = np.abs(values[0] - values[1])
            assert steps.max() <= 1
            differing += int(np.count_nonzero(steps))
            total += steps.size
            width = np.int32 if coding.kind is CodingKind.INT8 else np.int16
            words = [
                np.ascontiguousarray(block[..., scalars.offset : scalars.offset + scalars.nbytes]).view(width).astype(np.int64)
                for block in blocks
            ]
            assert words[0].size == 0 or np.abs(words[0] - words[1]).max() <= 1
    assert differing <= max(2, total // 2000), f"{differing} of {total} codes differ"


def same_elements(got: torch.Tensor, expected: torch.Tensor, exact: bool) -> None:
    """Equal bits, or NaN in both (a NaN's sign and payload are the processor's); within rounding where the device is not exact."""
    got, expected = got.cpu(), expected.cpu()
    words = torch.int32 if got.dtype is torch.float32 else torch.int16
    if torch.equal(got.view(words), expected.view(words)):
        return
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(got), nan)
    if exact:
        assert torch.equal(got.view(words)[~nan], expected.view(words)[~nan])
        return
    finite = torch.isfinite(expected)
    assert torch.equal(got[~nan & ~finite], expected[~nan & ~finite])
    a, b = got[finite].double(), expected[finite].double()
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 2**-18}[got.dtype]
    assert ((a - b).abs() <= tolerance * b.abs() + 1e-6 * (1 + b.abs().max())).all()


def compare_memory(device: Device, got: Memory, expected: Memory) -> None:
    """Tensor by tensor: an exact device's equal the reference's in every byte but those of NaN."""
    for a, b in zip(got.backing, expected.backing, strict=True):
        same_elements(a, b, getattr(device, "exact", False))


def untouched_outside(memory: Memory, first: int, end: int) -> None:
    """Every byte that is not a vector of tokens [first, end) is still poison."""
    for number, pages in enumerate(memory.cache.layers.values()):
        page, position = (torch.from_numpy(x) for x in memory.table.locate(first, end, pages.key.shape[0]))
        per_layer = len(memory.backing) // len(memory.cache.layers)
        tensors = [tensor.cpu().clone() for tensor in memory.backing[number * per_layer : (number + 1) * per_layer]]
        word = poisoned((1,), pages.key.dtype)
        for view, tensor in ((pages.key, tensors[0]), (pages.value, tensors[-1])):
            torch.as_strided(tensor, view.shape, view.stride(), view.storage_offset())[page, position] = word
        for tensor in tensors:
            assert bool((tensor.view(torch.uint8) == POISON).all())


def plane_places(codec: SlotCodec, head_dim: int) -> list[tuple[str, int]]:
    """(name, a byte within it) of each plane that has bytes."""
    return [(p.name, p.offset + p.nbytes // 2) for p in codec.planes(head_dim) if p.nbytes]
