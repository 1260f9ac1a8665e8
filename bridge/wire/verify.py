"""The full check of a payload: every tag, then every byte that must be zero. Landing checks tags only, since it reads no invalid row."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from bridge.wire import errors
from bridge.wire.coding import BLOCK_TOKENS, SlotCodec
from bridge.wire.manifest import Manifest
from bridge.wire.payload import LayerSpan, PayloadMap
from bridge.wire.tags import TagKeys, split_runs, verify_tags

PIECE_BYTES = 1 << 20
"""How much is checked at a time: small spans together, large ones head by head. A single run may be larger."""


def spans_in_order(layout: PayloadMap) -> Iterator[LayerSpan]:
    """Every span of a payload, in its order: what `layout.chunk` gives, in time proportional to the spans rather than to chunks x layers.

    A small file may describe 2**20 chunks of 1,024 layers of which nearly all are empty.
    """
    m = layout.manifest
    offset = ordinal = 0
    for chunks, positions in _stretches(layout):
        here = [(p, m.groups[m.layers[p].group], layout.block_bytes(m.layers[p])) for p in positions]
        for index in chunks:
            start = (layout.first_chunk + index) * m.chunk_tokens
            for position, group, block_bytes in here:
                first, end = max(group.first_token, start), min(group.end_token, start + m.chunk_tokens)
                first_block = first // BLOCK_TOKENS
                blocks = -(-end // BLOCK_TOKENS) - first_block
                heads = group.head_count
                span = LayerSpan(index, position, offset, heads, blocks, block_bytes, first_block, ordinal, first, end)
                offset += span.nbytes
                ordinal += heads * blocks
                yield span


def occupied_chunks(layout: PayloadMap) -> Iterator[int]:
    """Indices of the chunks that hold any block, ascending: groups that lie far apart leave empty chunks between them."""
    for chunks, _ in _stretches(layout):
        yield from chunks


def _stretches(layout: PayloadMap) -> Iterator[tuple[range, list[int]]]:
    """Neighbouring chunks that hold blocks of the same layers: (chunk indices, positions of these layers), in order."""
    m = layout.manifest
    ends = [(g.first_token // m.chunk_tokens, (g.end_token - 1) // m.chunk_tokens + 1) for g in m.groups]
    for first, end in pairwise(sorted({chunk for both in ends for chunk in both})):
        active = {group for group, (begin, stop) in enumerate(ends) if begin <= first and end <= stop}
        positions = [position for position, layer in enumerate(m.layers) if layer.group in active]
        if positions:
            yield range(first - layout.first_chunk, end - layout.first_chunk), positions


def _pieces(layout: PayloadMap) -> Iterator[tuple[list[LayerSpan], int]]:
    """What is read and checked at a time: neighbouring spans of at most PIECE_BYTES, or a part of a larger one, with its first head."""
    held: list[LayerSpan] = []
    room = PIECE_BYTES
    for span in spans_in_order(layout):
        nbytes = span.nbytes
        if held and nbytes > room:
            yield held, 0
            held, room = [], PIECE_BYTES
        if nbytes > PIECE_BYTES:
            yield from (([part], head) for head, part in _heads(span))
            continue
        room -= nbytes
        held.append(span)
    if held:
        yield held, 0


def _heads(span: LayerSpan) -> Iterator[tuple[int, LayerSpan]]:
    """(first head, a span of some heads) until all heads of a span have come."""
    step = max(1, PIECE_BYTES // span.run_bytes)
    for head in range(0, span.heads, step):
        offset, _ = span.head_range(head, 0)
        ordinal, heads = span.first_ordinal + head * span.blocks, min(step, span.heads - head)
        yield head, span._replace(heads=heads, offset=offset, first_ordinal=ordinal)


def _whole(span: LayerSpan) -> bool:
    """Whether every row of every block is valid."""
    return span.first_token % BLOCK_TOKENS == 0 and span.end_token % BLOCK_TOKENS == 0


def _alike(spans: list[LayerSpan], m: Manifest) -> Iterator[list[LayerSpan]]:
    """The same spans, those together whose runs have the same size, valid range and, where rows are invalid, planes."""
    found: dict[tuple[int, ...], list[LayerSpan]] = {}
    for span in spans:
        start = span.first_block * BLOCK_TOKENS
        layer = m.layers[span.layer]
        planes = () if _whole(span) else (layer.codec, layer.group)
        found.setdefault((span.blocks, span.block_bytes, span.first_token - start, span.end_token - start, *planes), []).append(span)
    yield from found.values()


def _join(array: np.ndarray, starts: list[int], sizes: list[int]) -> np.ndarray:
    """The parts of an array, one after another."""
    if len(starts) == 1:
        return array[starts[0] : starts[0] + sizes[0]]
    return np.concatenate([array[start : start + size] for start, size in zip(starts, sizes, strict=True)])


def verify_rows(data: np.ndarray, span: LayerSpan, codec: SlotCodec, head_dim: int) -> None:
    """Raises DirtyPadding where rows outside the valid range of a span's first or last block (data: u8 [span.nbytes]) are not zero."""
    if _whole(span):
        return
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


def verify_payload(manifest: Manifest, key: bytes, payload: bytes | memoryview | np.ndarray | io.BufferedIOBase) -> None:
    """Checks a whole payload, span (chunk, layer) after span: its tags, then the padding of its tag planes, then its invalid rows.

    manifest: checked. key: the payload's 32 bytes. payload: all of its bytes, from the first chunk on, or an open file that stands at
    them, which is read no further than the first fault.
    Raises PayloadSize, BadTag or DirtyPadding; Truncated where a file ends early, TooLarge where memory does not hold a single run.
    Takes time in proportion to the payload, not to the sizes that the manifest claims; memory for PIECE_BYTES or for one run.
    """
    try:
        layout = PayloadMap(manifest)
        if isinstance(payload, io.BufferedIOBase):
            _verify(layout, key, _reader(payload))
            return
        data = np.frombuffer(payload, dtype=np.uint8)
        if data.size != layout.payload_bytes:
            raise errors.PayloadSize(f"the payload has {data.size} bytes, the manifest describes {layout.payload_bytes}")
        _verify(layout, key, lambda offset, size: data[offset : offset + size])
    except MemoryError:
        raise errors.TooLarge("a run of the payload does not fit in memory", remedy="check it on a machine with more memory") from None


def _reader(file: io.BufferedIOBase) -> Callable[[int, int], np.ndarray]:
    """Reads one piece after another from where the file stands: (offset, size) -> u8 [size]."""

    def read(_: int, size: int) -> np.ndarray:
        data = np.frombuffer(file.read(size), dtype=np.uint8)
        if data.size < size:
            raise errors.Truncated(f"the file ends {size - data.size} bytes before the end of a layer's chunk")
        return data

    return read


def _verify(layout: PayloadMap, key: bytes, read: Callable[[int, int], np.ndarray]) -> None:
    m = layout.manifest
    keys = TagKeys(key, m.lease, m.generation)
    for spans, first_head in _pieces(layout):
        start, last = spans[0].offset, spans[-1]
        data = read(start, last.offset + last.nbytes - start)
        if not _right(m, data, spans, keys):
            span = _first_wrong(m, data, spans, keys)
            part = data[span.offset - start : span.offset - start + span.nbytes]
            verify_tags(part, span, keys, first_head)
            verify_rows(part, span, *_coding(m, span))
            raise errors.BadTag(f"a chunk of the payload's layer {span.layer} failed once and passed once; suspect this machine's memory")
        # Before the next piece is read: only one is held.
        del data


def _first_wrong(m: Manifest, data: np.ndarray, spans: list[LayerSpan], keys: TagKeys) -> LayerSpan:
    """The first wrong one of neighbouring spans, one of which is wrong; found by halves, since there may be 2**15 of them."""
    start = spans[0].offset
    while len(spans) > 1:
        first, second = spans[: len(spans) // 2], spans[len(spans) // 2 :]
        spans = second if _right(m, data[first[0].offset - start :], first, keys) else first
    return spans[0]


def _coding(m: Manifest, span: LayerSpan) -> tuple[SlotCodec, int]:
    """(codec, head dimension) of a span's layer."""
    layer = m.layers[span.layer]
    return m.codecs[layer.codec], m.groups[layer.group].head_dim


def _right(m: Manifest, data: np.ndarray, spans: list[LayerSpan], keys: TagKeys) -> bool:
    """Whether neighbouring spans (data: u8, from the first one's beginning on) are right, in a few steps for however many are alike.

    Runs that are alike are checked as the heads of one span; a wrong one is looked for by the caller.
    """
    offset, ordinal, last = spans[0].offset, spans[0].first_ordinal, spans[-1]
    masks = keys.masks(ordinal, last.first_ordinal + last.heads * last.blocks - ordinal)
    for alike in _alike(spans, m):
        one = alike[0] if len(alike) == 1 else alike[0]._replace(heads=sum(span.heads for span in alike))
        joined = _join(data, [span.offset - offset for span in alike], [span.nbytes for span in alike])
        expected = _join(masks, [span.first_ordinal - ordinal for span in alike], [span.heads * span.blocks for span in alike])
        try:
            verify_tags(joined, one, keys, masks=expected.reshape(one.heads, one.blocks))
            verify_rows(joined, one, *_coding(m, one))
        except errors.WireError:
            return False
    return True
