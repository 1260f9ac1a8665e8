"""Payload -> vLLM slots of all kv heads of a wire block in one program, written in the order in which they lie in the page.

Where a page's slots follow one another, a block's are one stretch of memory. Each warp writes whole lines of it, as no kernel can that
takes one head: its slots are 134 bytes of every 536. Two phases. First the block is read in lines of 128 bytes and its tags are checked;
then each word of the stretch is fetched from the first cache as two halves, whose places a table holds (`places`).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from backends.kernels.places import chunk_range, run_words
from backends.kernels.plan import Slots, Span, Tuning
from backends.kernels.tags import range_tag, report_heads, tag_products
from bridge.wire import BLOCK_TOKENS, SlotCodec
from bridge.wire.payload import tag_plane_bytes

MOST_HEADS = 16
MOST_HALVES = 1 << 12
"""What an entry of `places` has room for: kv heads, and half words of a block."""


@triton.jit
def read_places(places, START: tl.constexpr, N: tl.constexpr, TOTAL: tl.constexpr):
    """Entries [START, START + N) of the table, 0 from TOTAL on."""
    word = START + tl.arange(0, N)
    if START + N <= TOTAL:
        return tl.load(places + word)
    else:
        return tl.load(places + word, mask=word < TOTAL, other=0)


@triton.jit
def read_halves(data, place, head_step):
    """int32 [N]: the words whose halves lie at `place` in a block; head_step: half words from one head's block to the next one's."""
    low = tl.load(data + ((place & 0xFFF) + ((place >> 24) & 0xF) * head_step))
    high = tl.load(data + (((place >> 12) & 0xFFF) + ((place >> 28) & 0xF) * head_step))
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def write_words(out, words, START: tl.constexpr, N: tl.constexpr, TOTAL: tl.constexpr):
    """Writes a whole block's words [START, START + N)."""
    word = START + tl.arange(0, N)
    if START + N <= TOTAL:
        tl.store(out + word, words, cache_modifier=".cs")
    else:
        tl.store(out + word, words, mask=word < TOTAL, cache_modifier=".cs")


@triton.jit
def write_some(out, words, begin, end, START: tl.constexpr, N: tl.constexpr, ODD: tl.constexpr):
    """The same for half words [begin, end) of the block only. ODD: whether they may begin or end within a word."""
    half = 2 * (START + tl.arange(0, N))
    low = (half >= begin) & (half < end)
    high = (half + 1 >= begin) & (half + 1 < end)
    tl.store(out + half // 2, words, mask=low & high)
    if ODD:
        halves = out.to(tl.pointer_type(tl.int16))
        tl.store(halves + half, words.to(tl.int16), mask=low & ~high)
        tl.store(halves + half + 1, (words >> 16).to(tl.int16), mask=high & ~low)


@triton.jit(do_not_specialize=["free"])
def page_order_kernel(
    anchor, offsets, block_table, runs, payload, keys, masks, places, result,
    page_stride, first_token, end_token, chunk_tokens, first_chunk, write_first, write_end, free,
    BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr, BLOCK_WORDS: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    # TOKEN: half words of a token's slots. WIDE: HEADS, rounded up. A, B, C: words of a block's slots in pieces, see `pieces`.
    block = tl.program_id(0)
    layer = tl.program_id(1)
    chunk = tl.program_id(2)
    TOTAL: tl.constexpr = 8 * TOKEN
    LINES: tl.constexpr = BLOCK_WORDS // 128

    lo, hi, block0, nb = chunk_range(chunk, first_token, end_token, chunk_tokens, first_chunk)
    if block >= nb:
        return
    run = runs + (chunk * tl.num_programs(1) + layer) * 2
    # Offsets of runs are multiples of 16; the division tells the compiler.
    run_first = tl.load(run) // 16 * 4
    ordinal = tl.load(run + 1) + block
    start = (block0 + block) * 16
    page = tl.load(block_table + start // BLOCK_SIZE).to(tl.int64)
    # The division: slots begin on words.
    slots = anchor + (tl.load(offsets + layer) + page * page_stride + (start % BLOCK_SIZE) * TOKEN) // 2 * 2
    run_step = run_words(nb, BLOCK_WORDS)
    data = payload.to(tl.pointer_type(tl.int32)) + (run_first + block.to(tl.int64) * BLOCK_WORDS)

    # Tags, a warp to a head. `free` is 0, but not to the compiler, which would else give a thread several of the few words that a head
    # has beside whole lines, and heads other warps than above.
    h = tl.arange(0, WIDE)[:, None]
    line = tl.arange(0, 128)[None, :]
    c = tl.arange(0, 32)[None, :]
    rest_c = tl.arange(0, REST)[None, :]
    head_data = data + h.to(tl.int64) * run_step
    exists = h < HEADS
    products = tl.zeros([WIDE, 128], tl.int64)
    for i in tl.static_range(LINES):
        if WIDE == HEADS:  # noqa: SIM108 (a conditional expression would compile both)
            words = tl.load(head_data + (i * 128 + line))
        else:
            words = tl.load(head_data + (i * 128 + line), mask=exists, other=0)
        products += tag_products(words, tl.load(keys + 2 + (i * 128 + line + 0 * h)))
    rest_there = exists & (rest_c < BLOCK_WORDS - 128 * LINES)
    rest = tl.load(head_data + free + (128 * LINES + rest_c), mask=rest_there, other=0)
    rest_products = tag_products(rest, tl.load(keys + 2 + free + (128 * LINES + rest_c + 0 * h), mask=rest_there, other=0))
    tags = payload.to(tl.pointer_type(tl.int64)) + (run_first + nb.to(tl.int64) * BLOCK_WORDS) // 2 + block
    one = exists & (c == 0)
    mask = tl.load(masks + free + (ordinal + h * nb + c), mask=one, other=0)
    stored = tl.load(tags + free + (h.to(tl.int64) * (run_step // 2) + c), mask=one, other=0)
    ranges = range_tag(keys, tl.maximum(lo - start, 0), tl.minimum(hi - start, 16))
    sums = tl.sum(tl.reshape(products, [WIDE, 32, 4]), 2) + tl.sum(tl.reshape(rest_products, [WIDE, REST // 32, 32]), 1)
    difference = tl.sum(sums + tl.where(one, mask + ranges - stored, 0), 1)
    place_a = read_places(places + free, 0, A, TOTAL)
    if B > 0:
        place_b = read_places(places + free, A, B, TOTAL)
    if C > 0:
        place_c = read_places(places + free, A + B, C, TOTAL)
    report_heads(tags, difference, nb, ordinal, result, block, run_step // 2, HEADS, WIDE)

    # Slots.
    halves = data.to(tl.pointer_type(tl.int16))
    head_step = 2 * run_step.to(tl.int32)
    words_a = read_halves(halves, place_a, head_step)
    if B > 0:
        words_b = read_halves(halves, place_b, head_step)
    if C > 0:
        words_c = read_halves(halves, place_c, head_step)
    out = slots.to(tl.pointer_type(tl.int32))
    first = tl.maximum(lo, write_first) - start
    end = tl.minimum(hi, write_end) - start
    if (first <= 0) & (end >= 16):
        write_words(out, words_a, 0, A, TOTAL)
        if B > 0:
            write_words(out, words_b, A, B, TOTAL)
        if C > 0:
            write_words(out, words_c, A + B, C, TOTAL)
    else:
        first = tl.maximum(first, 0) * TOKEN
        end = tl.minimum(end, 16) * TOKEN
        write_some(out, words_a, first, end, 0, A, TOKEN % 2 == 1)
        if B > 0:
            write_some(out, words_b, first, end, A, B, TOKEN % 2 == 1)
        if C > 0:
            write_some(out, words_c, first, end, A + B, C, TOKEN % 2 == 1)


def pieces(words: int) -> tuple[int, int, int]:
    """`words` as sizes of tiles, powers of two or 0, of which the last may be too long by a few."""
    first = 1 << (words.bit_length() - 1)
    rest = words - first
    if not rest:
        return first, 0, 0
    second = 1 << (rest.bit_length() - 1)
    if 2 * second - rest <= 64 or rest == second:
        return first, second if rest == second else 2 * second, 0
    return first, second, triton.next_power_of_2(rest - second)


@lru_cache(maxsize=64)
def places(codec: SlotCodec, head_dim: int, heads: int, device: str) -> torch.Tensor:
    """int32 [words]: where the halves of each word of a block's slots lie in the payload, on the device.

    Bits 0 to 11 and 12 to 23: the low and the high half's place in a head's block, in half words; 24 to 27 and 28 to 31: their heads.
    """
    planes = codec.planes(head_dim)
    parts = [np.arange(BLOCK_TOKENS)[:, None] * (plane.row_bytes // 2) + np.arange(plane.row_bytes // 2) + plane.offset // 2
             for plane in (planes[0], planes[2], planes[1], planes[3]) if plane.row_bytes]  # fmt: skip
    slot = np.concatenate(parts, axis=1)
    half = np.repeat(slot[:, None], heads, axis=1).reshape(-1)
    head = np.repeat(np.tile(np.arange(heads), BLOCK_TOKENS), slot.shape[1])
    entries = half[::2] | half[1::2] << 12 | head[::2] << 24 | head[1::2] << 28
    return torch.from_numpy(entries.astype(np.uint32).view(np.int32)).to(device)


def in_page_order(slots: Slots, span: Span, codec: SlotCodec, heads: int) -> bool:
    """Whether the slots of a block follow one another in their page, from a whole word on, and places have room."""
    slot = codec.slot_bytes(slots.head_dim) // 2
    block_bytes = codec.block_bytes(slots.head_dim)
    run_halves = (span.most_blocks * block_bytes + tag_plane_bytes(span.most_blocks)) // 2
    return (
        heads == slots.heads
        and heads <= MOST_HEADS
        and slots.head_stride == slot
        and slots.token_stride == heads * slot
        and slots.block_size % BLOCK_TOKENS == 0
        and slots.words
        and block_bytes // 2 <= MOST_HALVES
        and (heads - 1) * run_halves + MOST_HALVES < 2**31
    )


def land_in_page_order(
    slots: Slots,
    block_table: torch.Tensor,
    span: Span,
    codec: SlotCodec,
    runs: torch.Tensor,
    payload: torch.Tensor,
    keys: torch.Tensor,
    masks: torch.Tensor,
    result: torch.Tensor,
    tuning: Tuning,
    write: tuple[int, int],
) -> None:
    """slots.land_slots for launches that are `in_page_order`."""
    wide = triton.next_power_of_2(slots.heads)
    block_words = codec.block_bytes(slots.head_dim) // 4
    a, b, c = pieces(8 * slots.token_stride)
    options = tuning.options() | {"num_warps": min(16, wide * tuning.together)}
    page_order_kernel[(span.most_blocks, slots.layers, span.chunks)](
        slots.anchor, slots.offsets, block_table, runs, payload, keys, masks,
        places(codec, slots.head_dim, slots.heads, str(payload.device)), result,
        slots.page_stride, span.first, span.end, span.chunk_tokens, span.first_chunk, *write, 0,
        BLOCK_SIZE=slots.block_size, TOKEN=slots.token_stride, BLOCK_WORDS=block_words, HEADS=slots.heads, WIDE=wide,
        REST=max(32, triton.next_power_of_2(block_words % 128)), A=a, B=b, C=c, **options,
    )  # fmt: skip
