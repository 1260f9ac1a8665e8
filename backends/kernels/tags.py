"""The words' part of a block's tag: sum of key * word modulo 2**64, over any tiling of the block, since it is linear in the words.

Keys lie on the device as int64 [2 + n]: nothing, k[0], k[1] ... k[n]; so the key of word 0 is on a multiple of 16 bytes.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def tag_products(words, key):
    """int32 words and their int64 keys, of the same shape -> their products, int64."""
    return words.to(tl.uint32, bitcast=True).to(tl.int64) * key


@triton.jit
def sum_blocks(products, TB: tl.constexpr, W: tl.constexpr):
    """int64 [16 * TB, W] -> int64 [TB]. Planes of equal width are added before this, because a sum over threads is dear."""
    return tl.sum(tl.reshape(products, [TB, 16 * W]), axis=1)


@triton.jit
def sum_rows(products, TB: tl.constexpr):
    """int64 [16 * TB], one a token -> int64 [TB]."""
    return tl.sum(tl.reshape(products, [TB, 16]), axis=1)


@triton.jit
def norm_products(half, r, key):
    """The tag's share of the K scalars, two of which share a word: int16 [T] and the keys of their words, int64 [T] -> int64 [T]."""
    return ((half.to(tl.int64) & 0xFFFF) << (16 * (r % 2))) * key


@triton.jit
def range_tag(keys, first, end):
    """A tag's share of the blocks' valid ranges: int32 [TB], within 0 to 16 -> int64 [TB]."""
    return tl.load(keys + 1) * (first | (end << 8)).to(tl.int64)


@triton.jit
def store_tags(payload, tag_word, exists, nb, tag, block, TB: tl.constexpr):
    """Stores tags [TB] of blocks `block` to `block + TB` in the tag plane at word `tag_word`, and its padding after the last."""
    tags = payload.to(tl.pointer_type(tl.int64)) + tag_word // 2
    tl.store(tags + (block + tl.arange(0, TB)), tag, mask=exists)
    tl.store(tags + nb, tl.zeros([], tl.int64), mask=(nb % 2 == 1) & (block + TB >= nb))


@triton.jit
def report_tags(payload, tag_word, stored, exists, nb, tag, ordinal, result, block, TB: tl.constexpr):
    """Compares tags [TB] of blocks `block` to `block + TB` of a run with those `stored` in its tag plane, at word `tag_word`.

    result: int64 [3]: counts wrong tags, keeps the least ordinal of one, counts runs whose padding is not zero.
    """
    wrong = exists & (stored != tag)
    count = tl.sum(wrong.to(tl.int32), 0)
    if count > 0:
        tl.atomic_add(result, count.to(tl.int64))
        tl.atomic_min(result + 1, tl.min(tl.where(wrong, ordinal, 0x7FFFFFFFFFFFFFFF), 0))
    if (nb % 2 == 1) & (block + TB >= nb):  # noqa: SIM102 (the load must not happen otherwise)
        if tl.load(payload.to(tl.pointer_type(tl.int64)) + tag_word // 2 + nb) != 0:
            tl.atomic_add(result + 2, tl.full([], 1, tl.int64))


@triton.jit
def report_heads(tags, difference, nb, ordinal, result, block, run_step, HEADS: tl.constexpr, WIDE: tl.constexpr):
    """report_tags for one block of each of HEADS kv heads.

    tags: where the first head's stored tag lies. difference: int64 [WIDE], the tag of each head's block less the stored one. ordinal: of
    the first head's block. run_step: int64 words from one head's run to the next one's.
    """
    h = tl.arange(0, WIDE)
    wrong = (difference != 0) & (h < HEADS)
    tl.atomic_add(result + 0 * h, tl.full([WIDE], 1, tl.int64), mask=wrong, sem="relaxed")
    tl.atomic_min(result + (1 + 0 * h), ordinal + h * nb, mask=wrong, sem="relaxed")
    if (nb % 2 == 1) & (block + 1 == nb):
        padding = tl.load(tags + (1 + h.to(tl.int64) * run_step), mask=h < HEADS, other=0)
        tl.atomic_add(result + (2 + 0 * h), tl.full([WIDE], 1, tl.int64), mask=padding != 0, sem="relaxed")
