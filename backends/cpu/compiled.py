"""Pack and land in compiled code: the fast twin of `reference.py`, byte for byte. The loops stand in `kernels.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from backends.cpu import kernels, reference
from backends.cpu.pages import check_host, check_share, check_table
from bridge.codecs import tables
from bridge.devices import DeviceError, SpanShare
from bridge.pages import BlockTable, LayerDescription, LayerPages, PagedCache, PagesDoNotFit
from bridge.wire import BLOCK_TOKENS, CodingKind, Element, SlotCodec, TagKeys
from bridge.wire.errors import DirtyPadding
from bridge.wire.tags import report_bad_tags, valid_ranges

if sys.byteorder != "little":
    raise DeviceError("the compiled CPU device needs a little-endian host", remedy="use the device cpu-reference")

_FLOATS = (Element.BF16, Element.FP16, Element.FP32)
_CARRIED = (CodingKind.RAW, CodingKind.FP8, CodingKind.CODEBOOK, CodingKind.AFFINE, CodingKind.INT8)


def _plain(layer: LayerDescription, share: SpanShare) -> bool:
    """Whether the kernels know these pages and this codec; the reference does the others, which no engine has in its inner loop."""
    sides = layer.sides
    return isinstance(layer, LayerPages) and all(
        side is not None and not side.tiled and side.coding.element in _FLOATS and coding.kind in _CARRIED
        for side, coding in zip(sides, (share.codec.key, share.codec.value), strict=True)
    )


class _Coded(NamedTuple):
    """The part of a kernels.SIDE that follows from coding and head dimension. table: what the address in `fields` points to."""

    fields: tuple[float, ...]
    table: np.ndarray


@lru_cache
def _coded(codec: SlotCodec, head_dim: int, landing: bool) -> tuple[_Coded, _Coded]:
    """K's and V's. Raises PagesDoNotFit for kinds that this device does not carry."""
    planes, sides = codec.planes(head_dim), []
    for coding, codes, scalars in ((codec.key, planes[0], planes[2]), (codec.value, planes[1], planes[3])):
        if coding.kind not in _CARRIED:
            raise PagesDoNotFit(f"this device does not pack or land sides of kind {coding.kind.name}")
        table = np.zeros(16, np.float32)
        if coding.kind is CodingKind.CODEBOOK:
            held = (tables.centroids if landing else tables.midpoints)(head_dim, coding.bits)
            table[: held.size] = held
        places = (codes.offset, scalars.offset, codes.row_bytes, scalars.row_bytes)
        fields = (int(coding.kind), coding.bits, int(coding.element), table.ctypes.data, *places, float(np.float32(1 / np.sqrt(head_dim))))
        sides.append(_Coded(fields, table))
    return sides[0], sides[1]


def _sides(layer: LayerDescription, share: SpanShare, landing: bool) -> np.ndarray:
    """kernels.SIDE [2]: K and V of pages that are plain."""
    coded, sides = _coded(share.codec, share.head_dim, landing), []
    for side, fields, scale in zip(layer.sides, coded, (share.key_scale, share.value_scale), strict=True):
        if side is None:
            raise PagesDoNotFit(f"layer {share.model_layer} has no V side here")
        pages = side.codes
        check_host(pages)
        width = pages.element_size()
        steps = (step * width for step in pages.stride())
        sides.append((pages.data_ptr(), width, *steps, int(side.coding.element), *fields.fields, scale))
    return np.array(sides, kernels.SIDE)


def _wire(data: np.ndarray, share: SpanShare, room: np.ndarray) -> np.ndarray:
    """data: the share's bytes. room: u8 [_room_bytes(head_dim)]. Both must live as long as the result is used."""
    span, dim = share.span, share.head_dim
    x = room.ctypes.data
    codes = x + 4 * BLOCK_TOKENS * dim
    s = codes + BLOCK_TOKENS * dim
    fields = (data.ctypes.data, share.head_count, span.blocks, span.block_bytes, span.run_bytes, dim, x, codes, s, s + 4 * dim)
    return np.array([fields], kernels.WIRE)


def _room(head_dim: int) -> np.ndarray:
    return np.empty((5 * BLOCK_TOKENS + 8) * head_dim, np.uint8)


class Call:
    """One pack or land: what its shares have in common is worked out once, since a small share's own loop takes less time.

    Several threads use it; what two of them work out at the same time is the same. Arrays are copies that can be written: for others Numba
    would compile the kernels once more.
    """

    def __init__(self, cache: PagedCache, table: BlockTable, keys: TagKeys, shares: Sequence[SpanShare]) -> None:
        self.cache, self.table, self.keys = cache, table, keys
        self._hash_keys: dict[int, np.ndarray] = {}
        self._ranges: dict[tuple[int, int, int, int], np.ndarray] = {}
        self._places: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}
        stretches: list[list[int]] = []
        for start, count in (_ordinals(share) for share in shares):
            if stretches and stretches[-1][1] == start:
                stretches[-1][1] += count
            else:
                stretches.append([start, start + count])
        self._masks = [(start, end, np.array(keys.masks(start, end - start))) for start, end in stretches]

    def tags(self, share: SpanShare) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hash keys, valid ranges and masks, as the kernels take them."""
        span = share.span
        hash_keys = self._hash_keys.get(span.block_bytes)
        if hash_keys is None:
            hash_keys = self._hash_keys[span.block_bytes] = np.array(self.keys.hash_keys(span.block_bytes))
        kind = (span.blocks, span.first_block, span.first_token, span.end_token)
        ranges = self._ranges.get(kind)
        if ranges is None:
            ranges = self._ranges[kind] = valid_ranges(span)
        first, count = _ordinals(share)
        start, masks = next((start, masks) for start, end, masks in self._masks if start <= first and first + count <= end)
        return hash_keys, ranges, masks[first - start : first - start + count].reshape(share.head_count, span.blocks)

    def place(self, share: SpanShare, first: int, end: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Page ids and positions of tokens [first, end), and the pages' head that is the share's first. Raises PagesDoNotFit."""
        layer = self.cache.layers[share.model_layer]
        local = check_share(layer, share, self.cache.first_head)
        check_table(layer, self.table)
        kind = (first, end, layer.sides[0].num_pages)
        found = self._places.get(kind)
        if found is None:
            found = self._places[kind] = self.table.locate(*kind)
        return *found, local


def _ordinals(share: SpanShare) -> tuple[int, int]:
    """(number of the share's first mask, how many masks it has)."""
    span = share.span
    return span.first_ordinal + share.head_first * span.blocks, share.head_count * span.blocks


def _cut(data: np.ndarray, share: SpanShare) -> np.ndarray:
    """The share's part of a buffer. Raises PagesDoNotFit where it reaches past the end, since the kernels check no bound."""
    if share.codec.block_bytes(share.head_dim) != share.span.block_bytes:
        raise PagesDoNotFit(f"blocks of {share.span.block_bytes} bytes are not those of the share's codec and head dimension")
    if data.dtype != np.uint8 or data.ndim != 1 or not 0 <= share.offset <= data.size - share.nbytes:
        raise PagesDoNotFit(f"a share of {share.nbytes} bytes at offset {share.offset} does not lie in a buffer of {data.nbytes} bytes")
    return data[share.offset : share.offset + share.nbytes]


def _is_aligned(data: np.ndarray) -> bool:
    """Whether the kernels can use this memory as words."""
    return bool(data.flags.c_contiguous) and data.ctypes.data % 8 == 0


def _aligned(data: np.ndarray) -> np.ndarray:
    return data if _is_aligned(data) else data.copy()


class Held(NamedTuple):
    """A share's bytes as the kernels take them. part, room: what `wire` points to."""

    part: np.ndarray
    room: np.ndarray
    wire: np.ndarray


def held(data: np.ndarray, share: SpanShare) -> Held:
    """The share's bytes of data[share.offset :] (u8). Raises PagesDoNotFit where they reach past its end."""
    part, room = _aligned(_cut(data, share)), _room(share.head_dim)
    return Held(part, room, _wire(part, share, room))


def prepare() -> None:
    """Compiles all kernels (some twenty seconds, once a machine), or reads them from numba's cache."""
    none, words = np.zeros(0, np.int64), np.zeros(1, np.uint64)
    sides, wires = np.zeros(2, kernels.SIDE), np.zeros(1, kernels.WIRE)
    masks = words.reshape(1, 1)
    kernels.pack(sides, wires, words, words, masks, none, none, 0, 0)
    kernels.verify(wires, words, words, masks, np.zeros((1, 1), np.bool_))
    kernels.land(sides, wires, none, none, 0, 0)


def written_range(share: SpanShare, write_first: int, write_end: int) -> tuple[int, int]:
    """The tokens of the share within [write_first, write_end); none where the second is not greater than the first."""
    return max(share.span.first_token, write_first), min(share.span.end_token, write_end)


def pack_share(call: Call, share: SpanShare, out: np.ndarray) -> None:
    """Writes one share's runs into out[share.offset :] (u8). Raises PagesDoNotFit."""
    span, layer = share.span, call.cache.layers[share.model_layer]
    if not _plain(layer, share):
        reference.pack_share(call.cache, call.table, share, call.keys, out)
        return
    place = call.place(share, span.first_token, span.end_token)
    sides = _sides(layer, share, landing=False)
    part, room = _cut(out, share), _room(share.head_dim)
    data = part if _is_aligned(part) else np.empty(share.nbytes, np.uint8)
    start = span.first_token - span.first_block * BLOCK_TOKENS
    kernels.pack(sides, _wire(data, share, room), *call.tags(share), *place, start)
    if data is not part:
        part[...] = data


def verify_share(call: Call, share: SpanShare, bytes_of: Held) -> None:
    """Raises BadTag or DirtyPadding unless all blocks of the share are whole."""
    bad = np.zeros((share.head_count, share.span.blocks), np.bool_)
    dirty = kernels.verify(bytes_of.wire, *call.tags(share), bad)
    report_bad_tags(bad, share.as_span())
    if dirty:
        raise DirtyPadding("the padding of a tag plane is not zero")


def write_share(call: Call, share: SpanShare, bytes_of: Held, data: np.ndarray, write_first: int, write_end: int) -> None:
    """Writes tokens [write_first, write_end) of a share, which the caller has verified, into the pages. Raises PagesDoNotFit."""
    first, end = written_range(share, write_first, write_end)
    if first >= end:
        return
    layer = call.cache.layers[share.model_layer]
    if not _plain(layer, share):
        reference.write_share(call.cache, call.table, share, data, write_first, write_end)
        return
    place = call.place(share, first, end)
    sides = _sides(layer, share, landing=True)
    kernels.land(sides, bytes_of.wire, *place, first - share.span.first_block * BLOCK_TOKENS)


def land_share(call: Call, share: SpanShare, data: np.ndarray, write_first: int, write_end: int) -> None:
    """Verifies one share's runs in data[share.offset :] (u8), then writes tokens [write_first, write_end) of it into the pages.

    Raises BadTag or DirtyPadding before anything is written, and PagesDoNotFit.
    """
    bytes_of = held(data, share)
    verify_share(call, share, bytes_of)
    write_share(call, share, bytes_of, data, write_first, write_end)
