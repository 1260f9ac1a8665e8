"""Pack and land in compiled code: the fast twin of `reference.py`, byte for byte. The loops stand in `kernels.py`."""

from __future__ import annotations

import sys
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
from bridge.wire.tags import report_bad_tags, span_masks, valid_ranges

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


def _tags(share: SpanShare, keys: TagKeys) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hash keys, valid ranges and masks, as the kernels take them."""
    span = share.as_span()
    return np.array(keys.hash_keys(span.block_bytes)), valid_ranges(span), np.array(span_masks(span, keys))


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


def prepare() -> None:
    """Compiles all kernels (some twenty seconds, once a machine), or reads them from numba's cache."""
    none, words = np.zeros(0, np.int64), np.zeros(1, np.uint64)
    sides, wires = np.zeros(2, kernels.SIDE), np.zeros(1, kernels.WIRE)
    masks = words.reshape(1, 1)
    kernels.pack(sides, wires, words, words, masks, none, none, 0, 0)
    kernels.verify(wires, words, words, masks, np.zeros((1, 1), np.bool_))
    kernels.land(sides, wires, none, none, 0, 0)


def place_share(cache: PagedCache, table: BlockTable, share: SpanShare, first: int, end: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Page ids and positions of tokens [first, end), and the pages' head that is the share's first. Raises PagesDoNotFit."""
    layer = cache.layers[share.model_layer]
    local = check_share(layer, share, cache.first_head)
    check_table(layer, table)
    pages, positions = table.locate(first, end, layer.sides[0].num_pages)
    return pages, positions, local


def written_range(share: SpanShare, write_first: int, write_end: int) -> tuple[int, int]:
    """The tokens of the share within [write_first, write_end); none where the second is not greater than the first."""
    return max(share.span.first_token, write_first), min(share.span.end_token, write_end)


def pack_share(cache: PagedCache, table: BlockTable, share: SpanShare, keys: TagKeys, out: np.ndarray) -> None:
    """Writes one share's runs into out[share.offset :] (u8). Raises PagesDoNotFit."""
    span, layer = share.span, cache.layers[share.model_layer]
    if not _plain(layer, share):
        reference.pack_share(cache, table, share, keys, out)
        return
    place = place_share(cache, table, share, span.first_token, span.end_token)
    sides = _sides(layer, share, landing=False)
    part, room = _cut(out, share), _room(share.head_dim)
    data = part if _is_aligned(part) else np.empty(share.nbytes, np.uint8)
    start = span.first_token - span.first_block * BLOCK_TOKENS
    kernels.pack(sides, _wire(data, share, room), *_tags(share, keys), *place, start)
    if data is not part:
        part[...] = data


def verify_share(share: SpanShare, keys: TagKeys, data: np.ndarray) -> None:
    """Raises BadTag or DirtyPadding unless all blocks of the share in data[share.offset :] (u8) are whole."""
    part, room = _aligned(_cut(data, share)), _room(share.head_dim)
    bad = np.zeros((share.head_count, share.span.blocks), np.bool_)
    dirty = kernels.verify(_wire(part, share, room), *_tags(share, keys), bad)
    report_bad_tags(bad, share.as_span())
    if dirty:
        raise DirtyPadding("the padding of a tag plane is not zero")


def write_share(cache: PagedCache, table: BlockTable, share: SpanShare, data: np.ndarray, write_first: int, write_end: int) -> None:
    """Writes tokens [write_first, write_end) of a share, which the caller has verified, into the pages. Raises PagesDoNotFit."""
    first, end = written_range(share, write_first, write_end)
    if first >= end:
        return
    layer = cache.layers[share.model_layer]
    if not _plain(layer, share):
        reference.write_share(cache, table, share, data, write_first, write_end)
        return
    place = place_share(cache, table, share, first, end)
    sides = _sides(layer, share, landing=True)
    part, room = _aligned(_cut(data, share)), _room(share.head_dim)
    kernels.land(sides, _wire(part, share, room), *place, first - share.span.first_block * BLOCK_TOKENS)


def land_share(
    cache: PagedCache, table: BlockTable, share: SpanShare, keys: TagKeys, data: np.ndarray, write_first: int, write_end: int
) -> None:
    """Verifies one share's runs in data[share.offset :] (u8), then writes tokens [write_first, write_end) of it into the pages.

    Raises BadTag or DirtyPadding before anything is written, and PagesDoNotFit.
    """
    verify_share(share, keys, data)
    write_share(cache, table, share, data, write_first, write_end)
