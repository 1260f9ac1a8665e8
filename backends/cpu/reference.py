"""Pack and land in NumPy: the oracle. `compiled.py` has the same two functions, and one conformance suite runs over both."""

from __future__ import annotations

import numpy as np

from backends.cpu.pages import check_share, check_table, element_view
from bridge.codecs import reference
from bridge.devices import BlockTable, PagedCache, SpanShare
from bridge.wire import BLOCK_TOKENS, Coding, CodingKind, Element, TagKeys, verify_tags, write_tags
from bridge.wire.tags import split_runs


def _encode(raw: np.ndarray, element: Element, coding: Coding, scale: float) -> tuple[np.ndarray, np.ndarray]:
    if coding.kind is CodingKind.RAW and coding.element is element:
        return raw, np.zeros((*raw.shape[:-1], 0), np.uint8)
    return reference.encode(reference.to_float(raw, element), coding, scale)


def _decode(codes: np.ndarray, scalars: np.ndarray, coding: Coding, element: Element, head_dim: int, scale: float) -> np.ndarray:
    if coding.kind is CodingKind.RAW and coding.element is element:
        return codes
    return reference.from_float(reference.decode(codes, scalars, coding, head_dim, scale), element)


def pack_share(cache: PagedCache, table: BlockTable, share: SpanShare, keys: TagKeys, out: np.ndarray) -> None:
    """Writes one share's runs into out[share.offset :] (u8). Raises PagesDoNotFit."""
    layer, span = cache.layers[share.index], share.span
    local, element = check_share(layer, share, cache.first_head), cache.element()
    check_table(layer, table)
    page, position = table.locate(span.first_token, span.end_token, layer.key.shape[0])
    data = out[share.offset : share.offset + share.nbytes]
    blocks, _ = split_runs(data, share.as_span())
    blocks[...] = 0
    start = span.first_token - span.first_block * BLOCK_TOKENS
    sides = ((layer.key, share.codec.key, share.key_scale), (layer.value, share.codec.value, share.value_scale))
    planes = share.codec.planes(share.head_dim)
    for side, (pages, coding, scale) in enumerate(sides):
        words = element_view(pages, element)[page, position, local : local + share.head_count]
        vectors = np.ascontiguousarray(words.swapaxes(0, 1)).view(np.uint8)
        for plane, coded in zip((planes[side], planes[side + 2]), _encode(vectors, element, coding, scale), strict=True):
            rows = np.zeros((share.head_count, span.blocks * BLOCK_TOKENS, plane.row_bytes), np.uint8)
            rows[:, start : start + coded.shape[1]] = coded
            blocks[..., plane.offset : plane.offset + plane.nbytes] = rows.reshape(share.head_count, span.blocks, plane.nbytes)
    write_tags(data, share.as_span(), keys)


def land_share(
    cache: PagedCache, table: BlockTable, share: SpanShare, keys: TagKeys, data: np.ndarray, write_first: int, write_end: int
) -> None:
    """Verifies one share's runs in data[share.offset :] (u8), then writes tokens [write_first, write_end) of it into the pages.

    Raises BadTag or DirtyPadding before anything is written, and PagesDoNotFit.
    """
    layer, span = cache.layers[share.index], share.span
    local, element = check_share(layer, share, cache.first_head), cache.element()
    runs = data[share.offset : share.offset + share.nbytes]
    verify_tags(runs, share.as_span(), keys)
    first, end = max(span.first_token, write_first), min(span.end_token, write_end)
    if first >= end:
        return
    check_table(layer, table)
    page, position = table.locate(first, end, layer.key.shape[0])
    blocks, _ = split_runs(runs, share.as_span())
    planes = share.codec.planes(share.head_dim)
    start = first - span.first_block * BLOCK_TOKENS

    def rows(index: int) -> np.ndarray:
        plane = planes[index]
        part = blocks[..., plane.offset : plane.offset + plane.nbytes]
        return part.reshape(share.head_count, span.blocks * BLOCK_TOKENS, plane.row_bytes)[:, start : start + end - first]

    sides = ((layer.key, share.codec.key, share.key_scale), (layer.value, share.codec.value, share.value_scale))
    for side, (pages, coding, scale) in enumerate(sides):
        vectors = _decode(rows(side), rows(side + 2), coding, element, share.head_dim, scale)
        words = element_view(pages, element)
        decoded = np.ascontiguousarray(vectors).view(words.dtype)
        words[page, position, local : local + share.head_count] = decoded.swapaxes(0, 1)
