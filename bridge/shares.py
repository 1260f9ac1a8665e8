"""Which part of a chunk one rank packs or lands: the meeting of a payload's layers and heads with the caches that hold them.

An engine keeps one block table for each of its KV groups (full attention, windows, states). A rank's pages are therefore a list of
`CacheGroup`, each a cache with its table; most models have one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import call, is_
from typing import Any, TypeAlias

import numpy as np

from bridge.devices import HeldLayers, ShareColumn, Shares, SpanShare
from bridge.pages import BlockTable, CacheGroup, PagedCache, PagesDoNotFit
from bridge.wire import ChunkMap, Group, GroupKind, Layer, Manifest
from bridge.wire.alike import kinds_of

_TABLES = 64


@dataclass(frozen=True)
class ChunkShare:
    """A rank's part of one chunk.

    columns: what to pack or land, with offsets into a buffer of `nbytes` that holds this part only.
    ranges: (offset in the payload, offset in the buffer, size) of each contiguous piece, neighbours merged.
    """

    chunk: int
    nbytes: int
    columns: tuple[ShareColumn, ...]
    ranges: tuple[tuple[int, int, int], ...]

    @property
    def shares(self) -> Shares:
        """All of them."""
        return Shares(self.columns)


@dataclass(frozen=True)
class _Remembered:
    """What was found out about a table of layers and caches. seen: the caches and, of each, its layers; none is kept alive for it."""

    layers: Sequence[Layer]
    indices: tuple[tuple[int, ...], ...]
    seen: list[weakref.ref[Any]]
    held: tuple[HeldLayers, ...]

    def is_of(self, layers: Sequence[Layer], caches: Sequence[PagedCache]) -> bool:
        """Whether everything is what it was: an engine may have put other pages into a cache's mapping."""
        return (
            self.layers is layers
            and self.indices == tuple(tuple(cache.layers) for cache in caches)
            and all(map(is_, map(call, self.seen), _objects(caches)))
        )


def _objects(caches: Sequence[PagedCache]) -> Iterator[object]:
    return chain(caches, *(cache.layers.values() for cache in caches))


_held: OrderedDict[tuple[int, ...], _Remembered] = OrderedDict()


def held_layers(layers: Sequence[Layer], caches: Sequence[PagedCache]) -> tuple[HeldLayers, ...]:
    """Which of a manifest's layers these caches hold, those together that are alike in the manifest and in the cache.

    Worked out once for a table of layers and caches that are the same objects and hold the same pages.
    """
    key = (id(layers), *map(id, caches))
    known = _held.get(key)
    if known is not None and known.is_of(layers, caches):
        return known.held
    made = tuple(_sorted_out(layers, caches))
    if type(layers) is tuple:
        indices = tuple(tuple(cache.layers) for cache in caches)
        with contextlib.suppress(TypeError):  # of pages of a class without weak references: they are looked at each time
            _held[key] = _Remembered(layers, indices, [weakref.ref(one) for one in _objects(caches)], made)
        while len(_held) > _TABLES:
            _held.popitem(last=False)
    return made


def _sorted_out(layers: Sequence[Layer], caches: Sequence[PagedCache]) -> Iterator[HeldLayers]:
    holder_of = {index: number for number, cache in enumerate(caches) for index in cache.layers}
    kinds = kinds_of(layers)
    for kind, members in enumerate(kinds.members):
        alike: dict[tuple, list[int]] = {}
        for place, position in enumerate(members.tolist()):
            holder = holder_of.get(layers[position].index)
            if holder is None:
                continue
            pages = caches[holder].layers[layers[position].index]
            key = pages.sides[0]
            codings = tuple(side and side.coding for side in pages.sides)
            alike.setdefault((holder, key.heads, pages.head_dim, key.num_pages, codings), []).append(place)
        for (holder, heads, *_), places in alike.items():
            within = np.array(places, np.int64)
            found, first = [layers[position] for position in members[within].tolist()], caches[holder].first_head
            yield HeldLayers(
                holder=holder,
                kind=kind,
                within=None if len(places) == len(members) else within,
                layers=members[within],
                model_layers=tuple(layer.index for layer in found),
                key_scales=tuple(layer.key_scale for layer in found),
                value_scales=tuple(layer.value_scale for layer in found),
                first_head=first,
                end_head=first + heads,
            )


def chunk_share(manifest: Manifest, chunk: ChunkMap, cache: PagedCache | Sequence[PagedCache]) -> ChunkShare:
    """The part of `chunk` whose layers and kv heads `cache` (or one of several) holds. Other layers and heads are left out."""
    kinds = kinds_of(manifest.layers).kinds
    found: list[tuple[HeldLayers, SpanShare, np.ndarray, np.ndarray, int, int]] = []
    for held in held_layers(manifest.layers, [cache] if isinstance(cache, PagedCache) else cache):
        column, (codec, number) = chunk.columns[held.kind], kinds[held.kind]
        group = manifest.groups[number]
        first, end = max(held.first_head, group.head_first), min(held.end_head, group.head_first + group.head_count)
        if column is None or first >= end:
            continue
        offsets, ordinals = column.offsets, column.ordinals
        if held.within is not None:
            offsets, ordinals = offsets[held.within], ordinals[held.within]
        span = column.like._replace(layer=int(held.layers[0]), offset=int(offsets[0]), first_ordinal=int(ordinals[0]))
        skipped, count = first - group.head_first, end - first
        like = SpanShare(
            span, manifest.codecs[codec], held.model_layers[0], group.head_dim, skipped, count, first, 0, held.key_scales[0],
            held.value_scales[0],
        )  # fmt: skip
        found.append((held, like, offsets, ordinals, skipped * span.run_bytes, count * span.run_bytes))
    if not found:
        return ChunkShare(chunk.index, 0, (), ())
    if len(found) == 1:
        held, like, offsets, ordinals, skipped, size = found[0]
        local, nbytes = np.arange(len(offsets)) * size, len(offsets) * size
        columns = [ShareColumn(like, held, offsets, ordinals, local)]
        return ChunkShare(chunk.index, nbytes, tuple(columns), _ranges(offsets + skipped, local, size, nbytes))
    # In the payload's order, which is the layers' own: where each share's bytes are read from, and where they go.
    order = np.argsort(np.concatenate([held.layers for held, *_ in found]))
    sizes = np.repeat([size for *_, size in found], [len(offsets) for _, _, offsets, *_ in found])[order]
    remote = np.concatenate([offsets + skipped for _, _, offsets, _, skipped, _ in found])[order]
    ends = sizes.cumsum()
    local, nbytes = ends - sizes, int(ends[-1])
    places = np.empty_like(local)
    places[order] = local
    columns, done = [], 0
    for held, like, offsets, ordinals, *_ in found:
        mine = places[done : done + len(offsets)]
        done += len(offsets)
        columns.append(ShareColumn(like._replace(offset=int(mine[0])), held, offsets, ordinals, mine))
    return ChunkShare(chunk.index, nbytes, tuple(columns), _ranges(remote, local, sizes[:-1], nbytes))


def _ranges(remote: np.ndarray, local: np.ndarray, sizes: np.ndarray | int, nbytes: int) -> tuple[tuple[int, int, int], ...]:
    """Where shares lie in the payload and in the buffer, of so many bytes each but for the last, as ranges: neighbours merged."""
    begins = [0, *(np.flatnonzero(remote[1:] != remote[:-1] + sizes) + 1).tolist()]
    starts = [int(local[begin]) for begin in begins]
    return tuple((int(remote[begin]), start, end - start) for begin, start, end in zip(begins, starts, [*starts[1:], nbytes], strict=True))


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


Batch: TypeAlias = tuple[int, Shares, tuple[int, int]]
"""One call to a device: (cache number, shares, rows to write)."""


def batches(manifest: Manifest, share: ChunkShare, first_token: int, end_token: int) -> Iterator[Batch]:
    """The calls to a device that a chunk takes: the shares of one cache, states apart from tokens.

    first_token, end_token: the tokens that are wanted. Shares of which nothing is wanted are left out.
    """
    kinds = kinds_of(manifest.layers).kinds
    found: dict[tuple[int, bool], tuple[list[ShareColumn], int, int]] = {}
    for column in share.columns:
        group, span = manifest.groups[kinds[column.held.kind][1]], column.like.span
        first, end = written_range(group, first_token, end_token)
        if max(first, span.first_token) >= min(end, span.end_token):
            continue
        call = column.held.holder, group.kind is GroupKind.STATE
        columns, lowest, highest = found.get(call, ([], first, end))
        columns.append(column)
        found[call] = columns, min(lowest, first), max(highest, end)
    for (holder, _), (columns, first, end) in found.items():
        yield holder, Shares(columns), (first, end)


def check_held(manifest: Manifest, groups: Sequence[CacheGroup]) -> None:
    """Raises PagesDoNotFit unless the caches hold every layer and kv head that the manifest names."""
    kinds, whole = kinds_of(manifest.layers).kinds, set[int]()
    for held in held_layers(manifest.layers, [group.cache for group in groups]):
        group = manifest.groups[kinds[held.kind][1]]
        if held.first_head <= group.head_first and held.end_head >= group.head_first + group.head_count:
            whole.update(held.model_layers)
    if len(whole) < len(manifest.layers):
        lacking = [layer.index for layer in manifest.layers if layer.index not in whole]
        raise PagesDoNotFit(f"the cache lacks layers or kv heads that the manifest names, of layer {lacking[0]} for one")
