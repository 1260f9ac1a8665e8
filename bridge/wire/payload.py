"""Where every block of a payload lies: chunk, then layer, then kv head, then block. All of it follows from the manifest."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.wire import errors
from bridge.wire.coding import BLOCK_TOKENS
from bridge.wire.manifest import MAX_BLOCKS, Layer, Manifest

TAG_BYTES = 8


def tag_plane_bytes(blocks: int) -> int:
    """Size of the tag plane that ends a run of this many blocks: 8 bytes each, rounded up to a multiple of 16."""
    return (TAG_BYTES * blocks + 15) // 16 * 16


@dataclass(frozen=True)
class LayerSpan:
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
        return self.offset + first * self.run_bytes, count * self.run_bytes

    def valid_range(self, block: int) -> tuple[int, int]:
        """(first, end) within 0..16 of the rows that are valid in this span's block number `block`."""
        start = (self.first_block + block) * BLOCK_TOKENS
        return max(self.first_token - start, 0), min(self.end_token - start, BLOCK_TOKENS)


@dataclass(frozen=True)
class ChunkMap:
    """One chunk: the unit that is packed, transferred and landed as a whole."""

    index: int
    offset: int
    nbytes: int
    first_ordinal: int
    blocks: int
    spans: tuple[LayerSpan, ...]


class PayloadMap:
    """The chunks of a payload and their spans, computed from a checked manifest. Raises TooLarge for over 2**34 blocks.

    Nothing is allocated for a chunk before it is asked for, so a hostile manifest costs no memory.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        # Sizes that every chunk asks for again: a codec's block bytes are dear.
        sizes = {(layer.codec, layer.group) for layer in manifest.layers}
        self._block_bytes = {(c, g): manifest.codecs[c].block_bytes(manifest.groups[g].head_dim) for c, g in sizes}
        self.first_chunk = manifest.first_token // manifest.chunk_tokens
        self.chunk_count = (manifest.end_token - 1) // manifest.chunk_tokens - self.first_chunk + 1
        self.payload_bytes, self.blocks = self._before(self.chunk_count)
        if self.blocks > MAX_BLOCKS:
            raise errors.TooLarge(f"the payload has {self.blocks} blocks, the limit is {MAX_BLOCKS}")

    def chunk(self, index: int) -> ChunkMap:
        """The chunk number `index`, from 0 to chunk_count - 1. Raises IndexError outside."""
        if not 0 <= index < self.chunk_count:
            raise IndexError(f"chunk {index} of {self.chunk_count}")
        m = self.manifest
        start = self._start(index)
        first_offset, first_ordinal = offset, ordinal = self._before(index)
        spans = []
        for position, layer in enumerate(m.layers):
            group = m.groups[layer.group]
            first, end = max(group.first_token, start), min(group.end_token, start + m.chunk_tokens)
            if first >= end:
                continue
            span = LayerSpan(
                chunk=index,
                layer=position,
                offset=offset,
                heads=group.head_count,
                blocks=_block_count(first, end),
                block_bytes=self.block_bytes(layer),
                first_block=first // BLOCK_TOKENS,
                first_ordinal=ordinal,
                first_token=first,
                end_token=end,
            )
            spans.append(span)
            offset += span.nbytes
            ordinal += span.heads * span.blocks
        return ChunkMap(index, first_offset, offset - first_offset, first_ordinal, ordinal - first_ordinal, tuple(spans))

    @property
    def chunk_bytes_bound(self) -> int:
        """Bytes that hold any chunk of this payload: the size of a staging slot."""
        total = 0
        for layer in self.manifest.layers:
            group = self.manifest.groups[layer.group]
            blocks = min(self.manifest.chunk_tokens // BLOCK_TOKENS, _block_count(group.first_token, group.end_token))
            total += group.head_count * self._run_bytes(layer, blocks)
        return total

    def _start(self, index: int) -> int:
        """First token of the chunk's place on the absolute chunk grid."""
        return (self.first_chunk + index) * self.manifest.chunk_tokens

    def block_bytes(self, layer: Layer) -> int:
        """Bytes of one of this layer's blocks."""
        return self._block_bytes[layer.codec, layer.group]

    def _run_bytes(self, layer: Layer, blocks: int) -> int:
        return blocks * self.block_bytes(layer) + tag_plane_bytes(blocks)

    def _before(self, index: int) -> tuple[int, int]:
        """(bytes, blocks) of all chunks before `index`: a first run, whole runs, a last run for each layer."""
        m, stop = self.manifest, self._start(index)
        total_bytes = total_blocks = 0
        for layer in m.layers:
            group = m.groups[layer.group]
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
                total_bytes += group.head_count * times * self._run_bytes(layer, blocks)
                total_blocks += group.head_count * times * blocks
        return total_bytes, total_blocks


def _block_count(first_token: int, end_token: int) -> int:
    """Blocks of the absolute grid that tokens [first_token, end_token) touch."""
    return (end_token + BLOCK_TOKENS - 1) // BLOCK_TOKENS - first_token // BLOCK_TOKENS
