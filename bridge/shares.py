"""Which part of a chunk one rank packs or lands: the meeting of a payload's layers and heads with a cache's."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.devices import SpanShare
from bridge.pages import PagedCache
from bridge.wire import ChunkMap, Manifest


@dataclass(frozen=True)
class ChunkShare:
    """A rank's part of one chunk.

    shares: what to pack or land, with offsets into a buffer of `nbytes` that holds this part only.
    ranges: (offset in the payload, offset in the buffer, size) of each contiguous piece, neighbours merged.
    """

    chunk: int
    nbytes: int
    shares: tuple[SpanShare, ...]
    ranges: tuple[tuple[int, int, int], ...]


def chunk_share(manifest: Manifest, chunk: ChunkMap, cache: PagedCache) -> ChunkShare:
    """The part of `chunk` whose layers and kv heads `cache` holds. Other layers and heads are left out."""
    shares: list[SpanShare] = []
    ranges: list[tuple[int, int, int]] = []
    offset = 0
    for span in chunk.spans:
        layer = manifest.layers[span.layer]
        group = manifest.groups[layer.group]
        pages = cache.layers.get(layer.index)
        if pages is None:
            continue
        first = max(group.head_first, cache.first_head)
        end = min(group.head_first + group.head_count, cache.first_head + pages.sides[0].heads)
        if first >= end:
            continue
        share = SpanShare(
            span=span,
            codec=manifest.codecs[layer.codec],
            index=layer.index,
            head_dim=group.head_dim,
            head_first=first - group.head_first,
            head_count=end - first,
            model_head=first,
            offset=offset,
            key_scale=layer.key_scale,
            value_scale=layer.value_scale,
        )
        shares.append(share)
        remote, size = span.head_range(share.head_first, share.head_count)
        if ranges and ranges[-1][0] + ranges[-1][2] == remote:
            ranges[-1] = (ranges[-1][0], ranges[-1][1], ranges[-1][2] + size)
        else:
            ranges.append((remote, offset, size))
        offset += size
    return ChunkShare(chunk.index, offset, tuple(shares), tuple(ranges))
