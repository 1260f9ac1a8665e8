"""Where a program's blocks lie: the arithmetic at the head of every kernel. A chunk's run of one kv head is blocks, then their tags."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def chunk_range(chunk, first_token, end_token, chunk_tokens, first_chunk):
    """(first token, end token, first block, blocks) of the chunk number `chunk`, thus of each of its runs."""
    start = (first_chunk + chunk) * chunk_tokens
    lo = tl.maximum(first_token, start)
    hi = tl.minimum(end_token, start + chunk_tokens)
    return lo, hi, lo // 16, (hi + 15) // 16 - lo // 16


@triton.jit
def run_words(nb, BLOCK_WORDS: tl.constexpr):
    """Words of a run of `nb` blocks, int64."""
    return (nb.to(tl.int64) * (BLOCK_WORDS // 4) + (nb + 1) // 2) * 4


@triton.jit
def run_place(runs, layer, layers, chunk, h, nb, BLOCK_WORDS: tl.constexpr):
    """(first word in the payload, ordinal of the first block) of kv head `h`'s run of `nb` blocks, both int64."""
    run = runs + (chunk * layers + layer) * 2
    # Offsets of runs are multiples of 16; the division tells the compiler.
    return tl.load(run) // 16 * 4 + h * run_words(nb, BLOCK_WORDS), tl.load(run + 1) + h * nb


@triton.jit
def page_rows(block_table, first, valid, page_stride, token_stride, TB: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """(place, rows): offset of the pages that hold the 16 * TB tokens from `first` on, int64, and of each token from there.

    valid: int1 [16 * TB], the tokens whose pages may be looked up. One block in one page has rows of 32 bits, known before the table is.
    """
    t = tl.arange(0, 16 * TB)
    if TB == 1 and BLOCK_SIZE % 16 == 0:
        page = tl.load(block_table + first // BLOCK_SIZE).to(tl.int64)
        return page * page_stride + (first % BLOCK_SIZE).to(tl.int64) * token_stride, t * token_stride
    else:
        token = first + t
        page = tl.load(block_table + token // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        return tl.zeros([], tl.int64), page * page_stride + (token % BLOCK_SIZE) * token_stride
