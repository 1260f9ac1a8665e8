"""Pack and land in NumPy: the oracle. `compiled.py` has the same two functions, and one conformance suite runs over both."""

from __future__ import annotations

import numpy as np

from backends.cpu.pages import check_share, check_table, read_rows, write_rows
from bridge.codecs import NotCarried
from bridge.codecs.conversion import convert, fold, unfold
from bridge.devices import SpanShare
from bridge.pages import BlockTable, LayerDescription, PagedCache, PagesDoNotFit, PageSide
from bridge.wire import BLOCK_TOKENS, Coding, CodingKind, TagKeys, verify_tags, write_tags
from bridge.wire.tags import split_runs


def _paired(layer: LayerDescription, share: SpanShare) -> list[tuple[int, PageSide, Coding, float]]:
    """(0 for K or 1 for V, the pages' side, the wire's coding, its scale). Raises PagesDoNotFit where only one of both has a V side."""
    wire = ((share.codec.key, share.key_scale), (share.codec.value, share.value_scale))
    found = []
    for number, (pages, (coding, scale)) in enumerate(zip(layer.sides, wire, strict=True)):
        if (pages is None) != (coding.kind is CodingKind.NONE):
            raise PagesDoNotFit(f"layer {share.model_layer} has a V side either here or in the payload, not in both")
        if pages is not None:
            found.append((number, pages, coding, scale))
    return found


def _check_buffer(data: np.ndarray, share: SpanShare) -> None:
    if share.offset < 0 or share.offset + share.nbytes > data.size:
        raise PagesDoNotFit(f"a share of {share.nbytes} bytes at offset {share.offset} does not lie in a buffer of {data.nbytes} bytes")


def pack_share(cache: PagedCache, table: BlockTable, share: SpanShare, keys: TagKeys, out: np.ndarray) -> None:
    """Writes one share's runs into out[share.offset :] (u8). Raises PagesDoNotFit."""
    layer, span = cache.layers[share.model_layer], share.span
    local = check_share(layer, share, cache.first_head)
    check_table(layer, table)
    _check_buffer(out, share)
    page, position = table.locate(span.first_token, span.end_token, layer.sides[0].num_pages)
    heads = slice(local, local + share.head_count)
    data = out[share.offset : share.offset + share.nbytes]
    blocks, _ = split_runs(data, share.as_span())
    blocks[...] = 0
    start = span.first_token - span.first_block * BLOCK_TOKENS
    planes = share.codec.planes(share.head_dim)
    for number, pages, coding, scale in _paired(layer, share):
        codes = read_rows(pages.codes, pages.tiled, page, position, heads)
        scalars = read_rows(pages.scalars, False, page, position, heads)
        if pages.folded:
            scalars = unfold(codes, scalars, pages.coding, share.head_dim)
        try:
            rows_of_planes = convert(codes, scalars, pages.coding, coding, share.head_dim, pages.scale, scale)
        except NotCarried as error:
            raise PagesDoNotFit(f"layer {share.model_layer}: {error.detail}", remedy=error.advice) from None
        for plane, coded in zip((planes[number], planes[number + 2]), rows_of_planes, strict=True):
            rows = np.zeros((share.head_count, span.blocks * BLOCK_TOKENS, plane.row_bytes), np.uint8)
            rows[:, start : start + coded.shape[1]] = coded
            blocks[..., plane.offset : plane.offset + plane.nbytes] = rows.reshape(share.head_count, span.blocks, plane.nbytes)
    write_tags(data, share.as_span(), keys)


def write_share(cache: PagedCache, table: BlockTable, share: SpanShare, data: np.ndarray, write_first: int, write_end: int) -> None:
    """Writes tokens [write_first, write_end) of a share, which the caller has verified, into the pages. Raises PagesDoNotFit."""
    layer, span = cache.layers[share.model_layer], share.span
    first, end = max(span.first_token, write_first), min(span.end_token, write_end)
    if first >= end:
        return
    local = check_share(layer, share, cache.first_head)
    check_table(layer, table)
    page, position = table.locate(first, end, layer.sides[0].num_pages)
    heads = slice(local, local + share.head_count)
    blocks, _ = split_runs(data[share.offset : share.offset + share.nbytes], share.as_span())
    planes = share.codec.planes(share.head_dim)
    start = first - span.first_block * BLOCK_TOKENS

    def rows(index: int) -> np.ndarray:
        plane = planes[index]
        part = blocks[..., plane.offset : plane.offset + plane.nbytes]
        return part.reshape(share.head_count, span.blocks * BLOCK_TOKENS, plane.row_bytes)[:, start : start + end - first]

    converted = []
    for number, pages, coding, scale in _paired(layer, share):
        try:
            codes, scalars = convert(rows(number), rows(number + 2), coding, pages.coding, share.head_dim, scale, pages.scale)
        except NotCarried as error:
            raise PagesDoNotFit(f"layer {share.model_layer}: {error.detail}", remedy=error.advice) from None
        if pages.folded:
            scalars = fold(codes, scalars, pages.coding, share.head_dim)
        converted.append((pages, codes, scalars))
    # Nothing is written before both sides are known to fit.
    for pages, codes, scalars in converted:
        write_rows(pages.codes, pages.tiled, page, position, heads, codes)
        write_rows(pages.scalars, False, page, position, heads, scalars)


def land_share(
    cache: PagedCache, table: BlockTable, share: SpanShare, keys: TagKeys, data: np.ndarray, write_first: int, write_end: int
) -> None:
    """Verifies one share's runs in data[share.offset :] (u8), then writes tokens [write_first, write_end) of it into the pages.

    Raises BadTag or DirtyPadding before anything is written, and PagesDoNotFit.
    """
    check_share(cache.layers[share.model_layer], share, cache.first_head)
    _check_buffer(data, share)
    verify_tags(data[share.offset : share.offset + share.nbytes], share.as_span(), keys)
    write_share(cache, table, share, data, write_first, write_end)
