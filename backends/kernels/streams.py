"""Bit streams of 3 and 4 bit codes, least significant bit first, as little-endian 32-bit words in registers.

A group is eight codes: 32 bits (a word) at 4 bits a code, 24 bits at 3. Four 24-bit groups make three words; such a triple is held in
four columns, the last of them empty, because tiles need sizes that are powers of two.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def group_codes(codes, T: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr):
    """int32 codes [T, N] -> int32 groups [T, N / 8]. The sum is modulo 2**32: bits above a code may be anything that cancels later."""
    eight = tl.reshape(codes, [T, N // 8, 8])
    return tl.sum(eight << (tl.arange(0, 8) * BITS)[None, None, :], axis=2)


@triton.jit
def words_of_bytes(codes, T: tl.constexpr, N: tl.constexpr):
    """int32 codes 0..255 [T, N] -> int32 words [T, N / 4]."""
    return tl.sum(tl.reshape(codes, [T, N // 4, 4]) << (tl.arange(0, 4) * 8)[None, None, :], axis=2)


@triton.jit
def bytes_of_words(words, T: tl.constexpr, W: tl.constexpr):
    """int32 words [T, W] -> int32 codes 0..255 [T, 4 * W]."""
    return tl.reshape((words[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 0xFF, [T, 4 * W])


@triton.jit
def words_of_groups(groups, T: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr):
    """int32 groups [T, G] -> int32 words [T, G], in the columns of `word_columns`."""
    if BITS == 4:
        return groups
    else:
        g02, g13 = tl.split(tl.reshape(groups & 0xFFFFFF, [T, G // 4, 2, 2]))
        g0, g2 = tl.split(g02)
        g1, g3 = tl.split(g13)
        w0 = g0 | (g1 << 24)
        w1 = (g1 >> 8) | (g2 << 16)
        w2 = (g2 >> 16) | (g3 << 8)
        # join(join(a, c), join(b, d)) is a, b, c, d along the two new axes.
        return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, tl.zeros_like(w2))), [T, G])


@triton.jit
def groups_of_words(words, T: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr):
    """int32 words [T, G] in the columns of `word_columns` -> int32 groups [T, G]; above a 3 bit group's 24 bits lies anything."""
    if BITS == 4:
        return words
    else:
        w02, w1e = tl.split(tl.reshape(words, [T, G // 4, 2, 2]))
        w0, w2 = tl.split(w02)
        w1, _ = tl.split(w1e)
        g1 = ((w0 >> 24) & 0xFF) | (w1 << 8)
        g2 = ((w1 >> 16) & 0xFFFF) | (w2 << 16)
        return tl.reshape(tl.join(tl.join(w0, g2), tl.join(g1, w2 >> 8)), [T, G])


@triton.jit
def codes_of_groups(groups, T: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr):
    """int32 groups [T, G] -> int32 codes [T, 8 * G]."""
    codes = (groups[:, :, None] >> (tl.arange(0, 8) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(codes, [T, 8 * G])


@triton.jit
def word_columns(G: tl.constexpr, BITS: tl.constexpr):
    """int32 [G]: the word of a row that each column holds; at 3 bits every fourth column holds none, see `filled_columns`."""
    column = tl.arange(0, G)
    if BITS == 3:
        return column // 4 * 3 + column % 4
    else:
        return column


@triton.jit
def filled_columns(G: tl.constexpr):
    """int1 [1, G]: which columns of a tile of 3 bit words hold one.

    Not asked of the words' numbers: from a comparison of those with 0, Triton 3.6 took it that pairs of columns are filled alike.
    """
    return (tl.arange(0, G) % 4 != 3)[None, :]
