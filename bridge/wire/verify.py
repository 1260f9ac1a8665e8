"""The full check of a payload: every tag, then every byte that must be zero. Landing checks tags only, since it reads no invalid row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bridge.wire import errors
from bridge.wire.coding import BLOCK_TOKENS, SlotCodec
from bridge.wire.manifest import Manifest
from bridge.wire.payload import LayerSpan, PayloadMap
from bridge.wire.tags import TagKeys, split_runs, verify_tags


def spans_in_order(layout: PayloadMap) -> Iterator[LayerSpan]:
    """Every span of a payload, in its order: what `layout.chunk` gives, in time proportional to the spans rather than to chunks x layers.

    A small file may describe 2**20 chunks of 1,024 layers of which nearly all are empty.
    """
    m = layout.manifest
    positions: dict[int, list[int]] = {}
    for position, layer in enumerate(m.layers):
        positions.setdefault(layer.group, []).append(position)
    offset = ordinal = 0
    for index in occupied_chunks(layout):
        start = (layout.first_chunk + index) * m.chunk_tokens
        ranges = {g: (max(group.first_token, start), min(group.end_token, start + m.chunk_tokens)) for g, group in enumerate(m.groups)}
        active = sorted(position for g, (first, end) in ranges.items() if first < end for position in positions[g])
        for position in active:
            layer = m.layers[position]
            group, (first, end) = m.groups[layer.group], ranges[layer.group]
            span = LayerSpan(
                chunk=index,
                layer=position,
                offset=offset,
                heads=group.head_count,
                blocks=-(-end // BLOCK_TOKENS) - first // BLOCK_TOKENS,
                block_bytes=m.codecs[layer.codec].block_bytes(group.head_dim),
                first_block=first // BLOCK_TOKENS,
                first_ordinal=ordinal,
                first_token=first,
                end_token=end,
            )
            offset += span.nbytes
            ordinal += span.heads * span.blocks
            yield span


def occupied_chunks(layout: PayloadMap) -> Iterator[int]:
    """Indices of the chunks that hold any block, ascending: groups that lie far apart leave empty chunks between them."""
    size, following = layout.manifest.chunk_tokens, 0
    ranges = [(g.first_token // size, (g.end_token - 1) // size + 1) for g in layout.manifest.groups]
    for first, end in sorted(ranges):
        yield from range(max(first - layout.first_chunk, following), end - layout.first_chunk)
        following = max(following, end - layout.first_chunk)


def verify_rows(data: np.ndarray, span: LayerSpan, codec: SlotCodec, head_dim: int) -> None:
    """Raises DirtyPadding where rows outside the valid range of a span's first or last block (data: u8 [span.nbytes]) are not zero."""
    blocks, _ = split_runs(data, span)
    for block in sorted({0, span.blocks - 1}):
        first, end = span.valid_range(block)
        for plane in codec.planes(head_dim):
            rows = blocks[:, block, plane.offset : plane.offset + plane.nbytes].reshape(span.heads, BLOCK_TOKENS, plane.row_bytes)
            if rows[:, :first].any() or rows[:, end:].any():
                raise errors.DirtyPadding(
                    f"{plane.name} of layer {span.layer} of the payload are not zero outside rows {first} to {end} of the block "
                    f"with tokens from {(span.first_block + block) * BLOCK_TOKENS} on"
                )


def verify_payload(manifest: Manifest, key: bytes, payload: bytes | memoryview | np.ndarray) -> None:
    """Checks a whole payload, span (chunk, layer) after span: its tags, then the padding of its tag planes, then its invalid rows.

    manifest: checked. key: the payload's 32 bytes. payload: all of its bytes, from the first chunk on.
    Raises PayloadSize, BadTag or DirtyPadding. Takes time in proportion to the payload, not to the sizes that the manifest claims.
    """
    layout = PayloadMap(manifest)
    data = np.frombuffer(payload, dtype=np.uint8)
    if data.size != layout.payload_bytes:
        raise errors.PayloadSize(f"the payload has {data.size} bytes, the manifest describes {layout.payload_bytes}")
    keys = TagKeys(key, manifest.lease, manifest.generation)
    for span in spans_in_order(layout):
        part = data[span.offset : span.offset + span.nbytes]
        layer = manifest.layers[span.layer]
        verify_tags(part, span, keys)
        verify_rows(part, span, manifest.codecs[layer.codec], manifest.groups[layer.group].head_dim)
