"""Where every block of a payload lies: chunk, then layer, then kv head, then block. All of it follows from the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bridge.wire import errors
from bridge.wire.alike import LayerKinds, kinds_of
from bridge.wire.coding import BLOCK_TOKENS
from bridge.wire.manifest import MAX_BLOCKS, Layer, Manifest

TAG_BYTES = 8


def tag_plane_bytes(blocks: int) -> int:
    """Size of the tag plane that ends a run of this many blocks: 8 bytes each, rounded up to a multiple of 16."""
    return (TAG_BYTES * blocks + 15) // 16 * 16


class LayerSpan(NamedTuple):
    """One layer's part of one chunk: `heads` runs of equal size, one after another.

    layer: its position in the manifest's table. offset: bytes from the start of the payload. first_block: absolute number of the
    first block (its tokens begin at 16 * first_block). first_ordinal: number of the first block of the first run in payload order,
    which selects its mask. Tokens [first_token, end_token) are valid.
    """

    chunk: int
    layer: int
    offset: int
    heads: int
    blocks: int
    block_bytes: int
    first_block: int
    first_ordinal: int
    first_token: int
    end_token: int

    @property
    def run_bytes(self) -> int:
        """Bytes of one head's run: its blocks, then their tag plane."""
        return self.blocks * self.block_bytes + tag_plane_bytes(self.blocks)

    @property
    def nbytes(self) -> int:
        return self.heads * self.run_bytes

    def head_range(self, first: int, count: int) -> tuple[int, int]:
        """(offset, size) in bytes of `count` heads from the payload's head `first` on: one contiguous range."""
        run_bytes = self.run_bytes
        return self.offset + first * run_bytes, count * run_bytes

    def valid_range(self, block: int) -> tuple[int, int]:
        """(first, end) within 0..16 of the rows that are valid in this span's block number `block`."""
        start = (self.first_block + block) * BLOCK_TOKENS
        return max(self.first_token - start, 0), min(self.end_token - start, BLOCK_TOKENS)


class SpanColumn(NamedTuple):
    """The spans that layers of one codec and group have in one chunk: alike but for where they lie.

    like: the first of them. layers: their layers, ascending. offsets, ordinals: int64 [n], `offset` and `first_ordinal` of each.
    """

    like: LayerSpan
    layers: np.ndarray
    offsets: np.ndarray
    ordinals: np.ndarray


@dataclass(frozen=True, eq=False)
class ChunkMap:
    """One chunk: the unit that is packed, transferred and landed as a whole.

    columns: its spans, by kind of layer; None stands for a kind that has no token in this chunk.
    """

    index: int
    offset: int
    nbytes: int
    first_ordinal: int
    blocks: int
    columns: tuple[SpanColumn | None, ...]

    @cached_property
    def spans(self) -> tuple[LayerSpan, ...]:
        """The spans one by one, in the payload's order."""
        found = [
            column.like._replace(layer=layer, offset=offset, first_ordinal=ordinal)
            for column in self.columns
            if column is not None
            for layer, offset, ordinal in zip(column.layers.tolist(), column.offsets.tolist(), column.ordinals.tolist(), strict=True)
        ]
        return tuple(found) if len(self.columns) == 1 else tuple(sorted(found, key=lambda span: span.layer))


class PayloadMap:
    """The chunks of a payload and their spans, computed from a checked manifest. Raises TooLarge for over 2**34 blocks.

    Nothing is allocated for a chunk before it is asked for, so a hostile manifest costs no memory.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        # Layers are mostly alike, and sizes are asked for at every chunk: they are worked out once for each kind of layer.
        self._kinds: LayerKinds = kinds_of(manifest.layers)
        self._block_bytes = {(c, g): manifest.codecs[c].block_bytes(manifest.groups[g].head_dim) for c, g in self._kinds.kinds}
        self.first_chunk = manifest.first_token // manifest.chunk_tokens
        self.chunk_count = (manifest.end_token - 1) // manifest.chunk_tokens - self.first_chunk + 1
        self.payload_bytes, self.blocks = self._before(self.chunk_count)
        if self.blocks > MAX_BLOCKS:
            raise errors.TooLarge(f"the payload has {self.blocks} blocks, the limit is {MAX_BLOCKS}")

    def chunk(self, index: int) -> ChunkMap:
        """The chunk number `index`, from 0 to chunk_count - 1. Raises IndexError outside."""
        if not 0 <= index < self.chunk_count:
            raise IndexError(f"chunk {index} of {self.chunk_count}")
        kinds, (offset, ordinal) = self._kinds, self._before(index)
        like = [self._span(index, *kind) for kind in kinds.kinds]
        sizes = np.array([0 if one is None else one[-1] for one in like], np.int64)[kinds.kind_of]
        blocks = np.array([0 if one is None else one[0] * one[1] for one in like], np.int64)[kinds.kind_of]
        size_ends, block_ends = sizes.cumsum(), blocks.cumsum()
        offsets, ordinals = size_ends - sizes + offset, block_ends - blocks + ordinal
        columns: list[SpanColumn | None] = []
        for one, members in zip(like, kinds.members, strict=True):
            if one is None:
                columns.append(None)
                continue
            heads, count, block_bytes, first_block, first, end, _ = one
            places = offsets[members], ordinals[members]
            span = LayerSpan(
                index, int(members[0]), int(places[0][0]), heads, count, block_bytes, first_block, int(places[1][0]), first, end
            )
            columns.append(SpanColumn(span, members, *places))
        return ChunkMap(index, offset, int(size_ends[-1]), ordinal, int(block_ends[-1]), tuple(columns))

    def chunk_bytes(self, index: int) -> int:
        """Size of chunk `index`, without its spans."""
        return self._before(index + 1)[0] - self._before(index)[0]

    def _span(self, index: int, codec: int, group: int) -> tuple[int, int, int, int, int, int, int] | None:
        """What the spans of all layers of this kind have in common in chunk `index`; None where the chunk has none of their tokens.

        (heads, blocks, block bytes, first block, first token, end token, bytes)
        """
        m, start = self.manifest, self._start(index)
        held = m.groups[group]
        first, end = max(held.first_token, start), min(held.end_token, start + m.chunk_tokens)
        if first >= end:
            return None
        heads, blocks, block_bytes = held.head_count, _block_count(first, end), self._block_bytes[codec, group]
        return heads, blocks, block_bytes, first // BLOCK_TOKENS, first, end, heads * _run_bytes(block_bytes, blocks)

    @property
    def chunk_bytes_bound(self) -> int:
        """Bytes that hold any chunk of this payload: the size of a staging slot."""
        total = 0
        for (codec, number), layers in self._kinds.counts:
            group = self.manifest.groups[number]
            blocks = min(self.manifest.chunk_tokens // BLOCK_TOKENS, _block_count(group.first_token, group.end_token))
            total += layers * group.head_count * _run_bytes(self._block_bytes[codec, number], blocks)
        return total

    def _start(self, index: int) -> int:
        """First token of the chunk's place on the absolute chunk grid."""
        return (self.first_chunk + index) * self.manifest.chunk_tokens

    def block_bytes(self, layer: Layer) -> int:
        """Bytes of one of this layer's blocks."""
        return self._block_bytes[layer.codec, layer.group]

    def _before(self, index: int) -> tuple[int, int]:
        """(bytes, blocks) of all chunks before `index`: a first run, whole runs, a last run for each layer."""
        m, stop = self.manifest, self._start(index)
        total_bytes = total_blocks = 0
        for (codec, number), layers in self._kinds.counts:
            group = m.groups[number]
            first, end = group.first_token, min(group.end_token, stop)
            if first >= end:
                continue
            whole = m.chunk_tokens // BLOCK_TOKENS
            first_chunk, last_chunk = first // m.chunk_tokens, (end - 1) // m.chunk_tokens
            if first_chunk == last_chunk:
                runs = [(_block_count(first, end), 1)]
            else:
                runs = [
                    (_block_count(first, (first_chunk + 1) * m.chunk_tokens), 1),
                    (whole, last_chunk - first_chunk - 1),
                    (_block_count(last_chunk * m.chunk_tokens, end), 1),
                ]
            for blocks, times in runs:
                runs_of_all = layers * group.head_count * times
                total_bytes += runs_of_all * _run_bytes(self._block_bytes[codec, number], blocks)
                total_blocks += runs_of_all * blocks
        return total_bytes, total_blocks


def _run_bytes(block_bytes: int, blocks: int) -> int:
    return blocks * block_bytes + tag_plane_bytes(blocks)


def _block_count(first_token: int, end_token: int) -> int:
    """Blocks of the absolute grid that tokens [first_token, end_token) touch."""
    return (end_token + BLOCK_TOKENS - 1) // BLOCK_TOKENS - first_token // BLOCK_TOKENS
