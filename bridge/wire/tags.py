"""Tags: a keyed 8-byte fingerprint of a block's bytes, its valid range and its place.

tag = mask + k[0] * (first | end << 8) + sum over j of k[j + 1] * w[j]  (mod 2**64), w: the block as little-endian u32 words.

The sum is multilinear hashing (Carter and Wegman 1979; Lemire and Kaser, "Strongly universal string hashing is fast", 2014) with
64-bit keys: two different blocks differ in some word by d = 2**v * odd, v < 32, and k * d hits a given value with probability
2**-(64 - v) <= 2**-33 over the choice of k. The mask (a ChaCha20 key stream, RFC 8439, addressed by the block's ordinal) hides the
sum and ties it to lease, generation, layer, kv head and block.
"""

from __future__ import annotations

import secrets
import struct

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from bridge.wire import errors
from bridge.wire.coding import BLOCK_TOKENS
from bridge.wire.manifest import bounded
from bridge.wire.payload import LayerSpan
from bridge.wire.sealing import KEY_BYTES, check_key

_HASH_KEY_OFFSET = 1 << 37
"""Byte of the key stream at which the hash keys begin: block counter 2**31, past the masks of 2**34 blocks."""

_ZEROS = memoryview(bytes(1 << 16))
_SLICE_WORDS = 1 << 17
"""Words that are widened at a time: 1 MiB of u64, whatever the size of a span or of a block."""
_SLICE_COLUMNS = 256
"""Of one block at a time, so that the keys stay in the cache too."""


def new_key() -> bytes:
    """A payload's key: 32 random bytes, used for one payload only."""
    return secrets.token_bytes(KEY_BYTES)


class TagKeys:
    """The masks and hash keys of one payload.

    key: 32 bytes. lease, generation: as in the manifest. A key must never serve two payloads. Raises BadSeal for a key of another size,
    TooLarge for a lease over u64 or a generation over u32. Several threads may use one.
    """

    def __init__(self, key: bytes, lease: int, generation: int) -> None:
        check_key(key)
        bounded(lease, 0, 2**64 - 1, errors.TooLarge, "the lease")
        bounded(generation, 0, 2**32 - 1, errors.TooLarge, "the generation")
        self._key = key
        self._lease, self._generation = lease, generation
        self._nonce = struct.pack("<QI", lease, generation)
        self._hash_keys = np.zeros(0, dtype="<u8")

    def parts(self) -> tuple[bytes, int, int]:
        """(key, lease, generation): makes the same keys in another process of this host."""
        return self._key, self._lease, self._generation

    def state(self) -> np.ndarray:
        """u32 [16]: ChaCha20's state (RFC 8439, section 2.3) with the counter 0, from which a device makes the same masks."""
        return np.frombuffer(b"expand 32-byte k" + self._key + bytes(4) + self._nonce, dtype="<u4")

    def _stream(self, offset: int, count: int) -> np.ndarray:
        """`count` u64 of the key stream from byte `offset` (a multiple of 8) on."""
        counter, skip = divmod(offset, 64)
        cipher = Cipher(ChaCha20(self._key, struct.pack("<I", counter) + self._nonce), mode=None).encryptor()
        out = np.empty(skip + 8 * count, dtype=np.uint8)
        view = out.data
        # Piece by piece: the zeros to encrypt would take as much memory as the key stream.
        for start in range(0, len(out), len(_ZEROS)):
            cipher.update_into(_ZEROS[: len(out) - start], view[start : start + len(_ZEROS)])
        out.flags.writeable = False
        return out[skip:].view("<u8")

    def masks(self, first_ordinal: int, count: int) -> np.ndarray:
        """u64 [count]: masks of the blocks from `first_ordinal` of the payload order on."""
        return self._stream(8 * first_ordinal, count)

    def hash_keys(self, block_bytes: int) -> np.ndarray:
        """u64 [1 + block_bytes / 4]: the key of the valid range, then one for each word of a block of this size."""
        count = 1 + block_bytes // 4
        # The keys of a smaller block are the first of a larger one's. Threads that race draw the same keys; the array is never written.
        keys = self._hash_keys
        if len(keys) < count:
            keys = self._hash_keys = self._stream(_HASH_KEY_OFFSET, count)
        return keys[:count]


def valid_ranges(span: LayerSpan) -> np.ndarray:
    """u64 [span.blocks]: first | end << 8 of each block of a run."""
    ranges = np.full(span.blocks, BLOCK_TOKENS << 8, dtype=np.uint64)
    for block in {0, span.blocks - 1}:
        first, end = span.valid_range(block)
        ranges[block] = first | end << 8
    return ranges


def hash_blocks(blocks: np.ndarray, ranges: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The sums without their masks. blocks: u8 [..., n, block_bytes]; ranges: u64 [n]; keys: u64 [1 + block_bytes/4] -> u64 [..., n]."""
    words = blocks.view("<u4").reshape(-1, *blocks.shape[-2:-1], blocks.shape[-1] // 4)
    heads, count, size = words.shape
    sums = np.zeros((heads, count), dtype=np.uint64)
    sums += ranges * keys[0]
    rows = _SLICE_WORDS // min(size, _SLICE_COLUMNS)
    for head in range(0, heads, step := max(1, rows // count)):
        for block in range(0, count, rows):
            part = sums[head : head + step, block : block + rows]
            for start in range(0, size, _SLICE_COLUMNS):
                end = start + _SLICE_COLUMNS
                widened = words[head : head + step, block : block + rows, start:end].astype(np.uint64)
                part += widened @ keys[1 + start : 1 + min(end, size)]
    return sums.reshape(blocks.shape[:-1])


def span_masks(span: LayerSpan, keys: TagKeys) -> np.ndarray:
    """u64 [heads, blocks]: the masks of a span."""
    return keys.masks(span.first_ordinal, span.heads * span.blocks).reshape(span.heads, span.blocks)


def split_runs(data: np.ndarray, span: LayerSpan) -> tuple[np.ndarray, np.ndarray]:
    """Views on a span's bytes: blocks u8 [heads, blocks, block_bytes] and tag planes u8 [heads, tag_plane_bytes].

    data: u8 [span.nbytes], the span's part of the payload.
    """
    runs = data.reshape(span.heads, span.run_bytes)
    end = span.blocks * span.block_bytes
    return runs[:, :end].reshape(span.heads, span.blocks, span.block_bytes), runs[:, end:]


def write_tags(data: np.ndarray, span: LayerSpan, keys: TagKeys) -> None:
    """Computes and stores the tags of a span whose blocks are already in `data` (u8 [span.nbytes])."""
    blocks, planes = split_runs(data, span)
    tags = hash_blocks(blocks, valid_ranges(span), keys.hash_keys(span.block_bytes)) + span_masks(span, keys)
    planes[:, : 8 * span.blocks] = tags.astype("<u8").view(np.uint8)
    planes[:, 8 * span.blocks :] = 0


def verify_tags(data: np.ndarray, span: LayerSpan, keys: TagKeys, first_head: int = 0, masks: np.ndarray | None = None) -> None:
    """Raises BadTag for the first block of a span (u8 [span.nbytes]) whose tag is wrong, DirtyPadding for its tag plane's padding.

    first_head: the payload's number of the span's first head, where the span is a part of one; only the sentence depends on it.
    masks: u64 [heads, blocks], the span's, where the caller has them already.
    """
    blocks, planes = split_runs(data, span)
    tags = hash_blocks(blocks, valid_ranges(span), keys.hash_keys(span.block_bytes)) + (span_masks(span, keys) if masks is None else masks)
    stored = np.ascontiguousarray(planes[:, : 8 * span.blocks]).view("<u8")
    report_bad_tags(stored != tags, span, first_head)
    if planes[:, 8 * span.blocks :].any():
        raise errors.DirtyPadding("the padding of a tag plane is not zero")


def report_bad_tags(bad: np.ndarray, span: LayerSpan, first_head: int = 0) -> None:
    """Raises BadTag if any of `bad` (bool [heads, blocks]) is set, naming the first."""
    if bad.any():
        head, block = np.argwhere(bad)[0]
        raise errors.BadTag(
            f"{int(bad.sum())} of {bad.size} blocks that were checked together failed; the first is of the payload's layer "
            f"{span.layer}, kv head {first_head + head}, "
            f"tokens from {(span.first_block + block) * BLOCK_TOKENS} on"
        )
