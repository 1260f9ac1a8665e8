"""Which part of a chunk one rank packs or lands: the meeting of a payload's layers and heads with the caches that hold them.

An engine keeps one block table for each of its KV groups (full attention, windows, states). A rank's pages are therefore a list of
`CacheGroup`, each a cache with its table; most models have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bridge.devices import SpanShare
from bridge.pages import BlockTable, CacheGroup, PagedCache, PagesDoNotFit
from bridge.wire import ChunkMap, Group, GroupKind, Manifest


@dataclass(frozen=True)
class ChunkShare:
    """A rank's part of one chunk.

    shares: what to pack or land, with offsets into a buffer of `nbytes` that holds this part only.
    ranges: (offset in the payload, offset in the buffer, size) of each contiguous piece, neighbours merged.
    holders: for each of `shares`, the number of the cache that holds it.
    """

    chunk: int
    nbytes: int
    shares: tuple[SpanShare, ...]
    ranges: tuple[tuple[int, int, int], ...]
    holders: tuple[int, ...] = ()


def chunk_share(manifest: Manifest, chunk: ChunkMap, cache: PagedCache | Sequence[PagedCache]) -> ChunkShare:
    """The part of `chunk` whose layers and kv heads `cache` (or one of several) holds. Other layers and heads are left out."""
    caches = [cache] if isinstance(cache, PagedCache) else cache
    held = {
        index: (number, one.first_head, one.first_head + pages.sides[0].heads)
        for number, one in enumerate(caches)
        for index, pages in one.layers.items()
    }
    shares: list[SpanShare] = []
    holders: list[int] = []
    ranges: list[tuple[int, int, int]] = []
    offset, expected = 0, -1
    groups, codecs, layers = manifest.groups, manifest.codecs, manifest.layers
    for span in chunk.spans:
        layer = layers[span.layer]
        found = held.get(layer.index)
        if found is None:
            continue
        group = groups[layer.group]
        holder, first, end = found
        lowest, highest = group.head_first, group.head_first + group.head_count
        first, end = first if first > lowest else lowest, end if end < highest else highest
        if first >= end:
            continue
        skipped, count = first - lowest, end - first
        shares.append(
            SpanShare(
                span, codecs[layer.codec], layer.index, group.head_dim, skipped, count, first, offset, layer.key_scale, layer.value_scale
            )
        )
        holders.append(holder)
        remote, size = span.head_range(skipped, count)
        if remote == expected:
            before = ranges[-1]
            ranges[-1] = (before[0], before[1], before[2] + size)
        else:
            ranges.append((remote, offset, size))
        expected = remote + size
        offset += size
    return ChunkShare(chunk.index, offset, tuple(shares), tuple(ranges), tuple(holders))


def as_groups(cache: PagedCache | Sequence[CacheGroup], table: BlockTable | None) -> tuple[CacheGroup, ...]:
    """A cache with its table, or several of both, as groups. Raises PagesDoNotFit where a layer stands in two, or a table is missing."""
    if isinstance(cache, PagedCache):
        if table is None:
            raise PagesDoNotFit("a cache was given without its block table")
        return (CacheGroup(cache, table),)
    groups = tuple(cache)
    if table is not None:
        raise PagesDoNotFit("a block table was given beside groups, which have their own")
    layers = [index for group in groups for index in group.cache.layers]
    if not layers or len(set(layers)) != len(layers):
        raise PagesDoNotFit("groups without a layer, or with one layer in two of them")
    return groups


def token_end(manifest: Manifest) -> int:
    """One past the last token that a payload carries. States have no tokens; a payload of states only ends with their block."""
    return max((group.end_token for group in manifest.groups if group.kind is not GroupKind.STATE), default=manifest.end_token)


def written_range(group: Group, first_token: int, end_token: int) -> tuple[int, int]:
    """The rows of a manifest's group that land when tokens [first_token, end_token) are wanted: a state always as a whole."""
    if group.kind is GroupKind.STATE:
        return group.first_token, group.end_token
    return max(group.first_token, first_token), min(group.end_token, end_token)


Batch: TypeAlias = tuple[int, list[SpanShare], tuple[int, int]]
"""One call to a device: (cache number, shares, rows to write)."""


def batches(manifest: Manifest, share: ChunkShare, first_token: int, end_token: int) -> Iterator[Batch]:
    """The calls to a device that a chunk takes: the shares of one cache, states apart from tokens.

    first_token, end_token: the tokens that are wanted. Shares of which nothing is wanted are left out.
    """
    found: dict[tuple[int, GroupKind | None], list[SpanShare]] = {}
    rows: dict[tuple[int, GroupKind | None], tuple[int, int]] = {}
    written = [written_range(group, first_token, end_token) for group in manifest.groups]
    for holder, one in zip(share.holders, share.shares, strict=True):
        number = manifest.layers[one.span.layer].group
        first, end = written[number]
        if max(first, one.span.first_token) >= min(end, one.span.end_token):
            continue
        call = holder, GroupKind.STATE if manifest.groups[number].kind is GroupKind.STATE else None
        found.setdefault(call, []).append(one)
        before = rows.get(call)
        if before is None or before != (first, end):
            rows[call] = (first, end) if before is None else (min(before[0], first), max(before[1], end))
    for call, shares in found.items():
        yield call[0], shares, rows[call]


def check_held(manifest: Manifest, groups: Sequence[CacheGroup]) -> None:
    """Raises PagesDoNotFit unless the caches hold every layer and kv head that the manifest names."""
    holder_of = {index: group.cache for group in groups for index in group.cache.layers}
    for layer in manifest.layers:
        group, cache = manifest.groups[layer.group], holder_of.get(layer.index)
        first = cache.first_head if cache is not None else 0
        heads = cache.layers[layer.index].sides[0].heads if cache is not None else 0
        if first > group.head_first or first + heads < group.head_first + group.head_count:
            raise PagesDoNotFit(f"the cache lacks layers or kv heads that the manifest names, of layer {layer.index} for one")
