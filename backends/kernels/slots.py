"""vLLM TurboQuant slots <-> payload of the same preset: the bytes in another order, tags made or verified on the way.

A slot holds a token's K codes, K scalars, V codes and V scalars (vLLM 0.32, the layout of CUDA and XPU); sizes are even, so everything
moves in words of 16 bits on the slots' side and of 32 bits on the payload's.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backends.kernels import plan
from backends.kernels.page_order import in_page_order, land_in_page_order
from backends.kernels.places import chunk_range, page_rows, run_place
from backends.kernels.plan import Slots, Span, Tuning
from backends.kernels.tags import norm_products, range_tag, report_tags, store_tags, sum_blocks, sum_rows, tag_products
from bridge.pages import PagesDoNotFit
from bridge.wire import CodingKind, SlotCodec


@triton.jit
def write_halves(
    data16, slots, exists, valid, row_half, row, r, first,
    WIDTH: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, KEY_SCALARS: tl.constexpr,
):  # fmt: skip
    """Writes int16 columns [first, first + WIDTH) of slots, gathered from the planes: for pages whose slots lie at odd halves by turns."""
    c = first + tl.arange(0, WIDTH)
    k: tl.constexpr = 2 * KEY_ROW
    v: tl.constexpr = 2 * VALUE_ROW
    in_key = c < k
    in_norm = c < k + KEY_SCALARS
    in_value = c < k + KEY_SCALARS + v
    place = c + (16 * (k + v + KEY_SCALARS) - k - KEY_SCALARS - v)
    place = tl.where(in_value, c + (16 * k - k - KEY_SCALARS), place)
    place = tl.where(in_norm, 16 * (k + v), place)
    place = tl.where(in_key, c, place)
    step = tl.where(in_key, k, tl.where(in_norm, 1, tl.where(in_value, v, 2)))
    there = (c < k + KEY_SCALARS + v + 2)[None, :]
    index = row_half[:, None] + (place[None, :] + r[:, None] * step[None, :])
    halves = tl.load(data16 + index, mask=exists[:, None] & there, other=0)
    tl.store(slots + (row[:, None] + c[None, :]), halves, mask=valid[:, None] & there)


@triton.jit
def read_row(plane, exists, row_word, r, W: tl.constexpr, ROW: tl.constexpr, SHIFT: tl.constexpr):
    """Rows of ROW words of a plane, int32 [T, W], SHIFT words further on, zero where that is in another row."""
    j = tl.arange(0, W)
    there = (j + SHIFT >= 0) & (j + SHIFT < ROW)
    return tl.load(plane + (row_word[:, None] + (r * ROW + SHIFT)[:, None] + j[None, :]), mask=exists[:, None] & there[None, :], other=0)


@triton.jit
def write_row(slots, start, row, valid, words, ROW: tl.constexpr):
    """Writes ROW words of each token's slot from half word `start` on, a multiple of 4 bytes in memory."""
    j = tl.arange(0, words.shape[1])
    there = valid[:, None] & (j < ROW)[None, :]
    tl.store((slots + start).to(tl.pointer_type(tl.int32)) + ((row // 2)[:, None] + j[None, :]), words, mask=there)


@triton.jit
def straddle(low, high):
    """int32: the high halves of `low`, then the low halves of `high`."""
    return ((low >> 16) & 0xFFFF) | (high << 16)


@triton.jit
def write_slots(
    data, slots, exists, valid, row_word, row, r, odd, k, v, pair, half,
    KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, KEY_WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, KEY_SCALARS: tl.constexpr,
):  # fmt: skip
    """Writes whole slots, whose codes are `k` and `v`, in words of 32 bits. odd: whether they begin 2 bytes past a multiple of 4.

    Of two code planes with a norm between them, one lies on such multiples and the other does not; its words are put together of two
    neighbours, and the norm or the scale fills the one at its end. Everything is read before anything is written.
    """
    V: tl.constexpr = 2 * KEY_ROW + KEY_SCALARS
    S: tl.constexpr = V + 2 * VALUE_ROW
    values = data + 16 * KEY_ROW
    if KEY_SCALARS == 0:
        write_row(slots, 0, row, valid, k, KEY_ROW)
        write_row(slots, V, row, valid, v, VALUE_ROW)
        tl.store((slots + S).to(tl.pointer_type(tl.int32)) + row // 2, pair, mask=valid)
    else:
        norm = half.to(tl.int32) & 0xFFFF
        if odd:
            following = read_row(data, exists, row_word, r, KEY_WIDE, KEY_ROW, 1)
            first = tl.load(data + (row_word + r * KEY_ROW), mask=exists, other=0)
            last_column = (tl.arange(0, KEY_WIDE) == KEY_ROW - 1)[None, :]
            tl.store(slots + row, first.to(tl.int16), mask=valid)
            write_row(slots, 1, row, valid, straddle(k, tl.where(last_column, norm[:, None], following)), KEY_ROW)
            write_row(slots, V, row, valid, v, VALUE_ROW)
            tl.store((slots + S).to(tl.pointer_type(tl.int32)) + row // 2, pair, mask=valid)
        else:
            preceding = read_row(values, exists, row_word, r, VALUE_WIDE, VALUE_ROW, -1)
            last = tl.load(values + (row_word + r * VALUE_ROW + (VALUE_ROW - 1)), mask=exists, other=0)
            first_column = (tl.arange(0, VALUE_WIDE) == 0)[None, :]
            write_row(slots, 0, row, valid, k, KEY_ROW)
            write_row(slots, V - 1, row, valid, straddle(tl.where(first_column, norm[:, None] << 16, preceding), v), VALUE_ROW)
            tl.store((slots + (S - 1)).to(tl.pointer_type(tl.int32)) + row // 2, straddle(last, pair), mask=valid)
            tl.store(slots + (row + (S + 1)), (pair >> 16).to(tl.int16), mask=valid)


@triton.jit
def read_plane(base, exists, row_word, index, W: tl.constexpr, ROW: tl.constexpr):
    """One code plane of a block as int32 words [T, W]. W: ROW, rounded up."""
    return tl.load(base + (row_word[:, None] + index), mask=exists[:, None] & (tl.arange(0, W) < ROW)[None, :], other=0)


@triton.jit
def read_codes(slots, valid, row, T: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr):
    """The same from slots. row: where the codes of each token's slot begin, in int16."""
    column = tl.arange(0, 2 * W)
    halves = tl.load(slots + (row[:, None] + column[None, :]), mask=valid[:, None] & (column < 2 * ROW)[None, :], other=0)
    low, high = tl.split(tl.reshape(halves, [T, W, 2]))
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def slots_kernel(
    anchor, offsets, block_table, runs, payload, keys, masks, result,
    page_stride, token_stride, head_stride, origin, first_token, end_token, chunk_tokens, first_chunk, heads, write_first, write_end,
    BLOCK_SIZE: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, KEY_WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    KEY_SCALARS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, TB: tl.constexpr, TO_SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    block = tl.program_id(0) // heads * TB
    layer = tl.program_id(1)
    chunk = tl.program_id(2)

    T: tl.constexpr = 16 * TB
    VALUE_PLANE: tl.constexpr = 16 * KEY_ROW
    KEY_SCALAR_PLANE: tl.constexpr = VALUE_PLANE + 16 * VALUE_ROW
    VALUE_SCALAR_PLANE: tl.constexpr = KEY_SCALAR_PLANE + 8 * KEY_SCALARS
    BLOCK_WORDS: tl.constexpr = VALUE_SCALAR_PLANE + 16

    lo, hi, block0, nb = chunk_range(chunk, first_token, end_token, chunk_tokens, first_chunk)
    if block >= nb:
        return
    t = tl.arange(0, T)
    r = t % 16
    token = (block0 + block) * 16 + t
    exists = t // 16 < nb - block if TB > 1 else tl.full([T], True, tl.int1)
    # Packing reads valid tokens; landing writes those that were asked for.
    valid = (token >= tl.maximum(lo, write_first)) & (token < tl.minimum(hi, write_end))
    place, row = page_rows(block_table, (block0 + block) * 16, valid, page_stride, token_stride, TB, BLOCK_SIZE)
    slot_half = tl.load(offsets + layer) + place + h.to(tl.int64) * head_stride + origin
    slots = anchor + slot_half
    run, run_ordinal = run_place(runs, layer, tl.num_programs(1), chunk, h, nb, BLOCK_WORDS)
    row_word = t // 16 * BLOCK_WORDS
    bt = block + tl.arange(0, TB)
    exists_block = bt < nb
    starts = (block0 + bt) * 16
    ranges = range_tag(keys, tl.maximum(lo - starts, 0), tl.minimum(hi - starts, 16))
    key_index = (r * KEY_ROW)[:, None] + tl.arange(0, KEY_WIDE)[None, :]
    value_index = (VALUE_PLANE + r * VALUE_ROW)[:, None] + tl.arange(0, VALUE_WIDE)[None, :]

    data = payload.to(tl.pointer_type(tl.int32)) + (run + block.to(tl.int64) * BLOCK_WORDS)
    ordinals = run_ordinal + bt
    tag_word = run + nb.to(tl.int64) * BLOCK_WORDS

    # Everything that is read is asked for before anything is used.
    if TO_SLOTS:
        k = read_plane(data, exists, row_word, key_index, KEY_WIDE, KEY_ROW)
        v = read_plane(data, exists, row_word, value_index, VALUE_WIDE, VALUE_ROW)
        pair = tl.load(data + (row_word + VALUE_SCALAR_PLANE + r), mask=exists, other=0)
    else:
        value_row = row + 2 * KEY_ROW + KEY_SCALARS
        k = read_codes(slots, valid, row, T, KEY_WIDE, KEY_ROW)
        v = read_codes(slots, valid, value_row, T, VALUE_WIDE, VALUE_ROW)
        scalars = slots + (value_row + 2 * VALUE_ROW)
        low = tl.load(scalars, mask=valid, other=0).to(tl.int32) & 0xFFFF
        pair = low | (tl.load(scalars + 1, mask=valid, other=0).to(tl.int32) << 16)
    half = tl.zeros([T], tl.int16)
    wire16 = data.to(tl.pointer_type(tl.int16)) + (row_word * 2 + 2 * KEY_SCALAR_PLANE + r)
    if KEY_SCALARS == 1:
        if TO_SLOTS:  # noqa: SIM108 (a conditional expression would compile both)
            half = tl.load(wire16, mask=exists, other=0)
        else:
            half = tl.load(slots + (row + 2 * KEY_ROW), mask=valid, other=0)
    tag = tl.load(masks + ordinals, mask=exists_block, other=0) + ranges
    stored = tag
    if TO_SLOTS:
        stored = tl.load(payload.to(tl.pointer_type(tl.int64)) + (tag_word // 2 + bt), mask=exists_block, other=0)
    key_keys = read_plane(keys + 2, exists | True, r * 0, key_index, KEY_WIDE, KEY_ROW)
    value_keys = read_plane(keys + 2, exists | True, r * 0, value_index, VALUE_WIDE, VALUE_ROW)
    rows = tag_products(pair, tl.load(keys + 2 + VALUE_SCALAR_PLANE + r))
    if KEY_SCALARS == 1:
        rows += norm_products(half, r, tl.load(keys + 2 + KEY_SCALAR_PLANE + r // 2))

    if not TO_SLOTS:
        tl.store(data + (row_word[:, None] + key_index), k, mask=exists[:, None] & (tl.arange(0, KEY_WIDE) < KEY_ROW)[None, :])
        tl.store(data + (row_word[:, None] + value_index), v, mask=exists[:, None] & (tl.arange(0, VALUE_WIDE) < VALUE_ROW)[None, :])
        tl.store(data + (row_word + VALUE_SCALAR_PLANE + r), pair, mask=exists)
        if KEY_SCALARS == 1:
            tl.store(wire16, half, mask=exists)
    elif WORDS:
        odd = (slot_half & 1) == 1
        write_k = read_row(data, exists, row_word, r, KEY_WIDE, KEY_ROW, 0)
        write_v = read_row(data + VALUE_PLANE, exists, row_word, r, VALUE_WIDE, VALUE_ROW, 0)
        write_slots(data, slots, exists, valid, row_word, row, r, odd, write_k, write_v, pair, half,
                    KEY_ROW, VALUE_ROW, KEY_WIDE, VALUE_WIDE, KEY_SCALARS)  # fmt: skip
    else:
        data16 = data.to(tl.pointer_type(tl.int16))
        write_halves(data16, slots, exists, valid, row_word * 2, row, r, 0, MAIN, KEY_ROW, VALUE_ROW, KEY_SCALARS)
        write_halves(data16, slots, exists, valid, row_word * 2, row, r, MAIN, REST, KEY_ROW, VALUE_ROW, KEY_SCALARS)

    if KEY_WIDE == VALUE_WIDE:
        tag += sum_blocks(tag_products(k, key_keys) + tag_products(v, value_keys), TB, KEY_WIDE)
    else:
        tag += sum_blocks(tag_products(k, key_keys), TB, KEY_WIDE) + sum_blocks(tag_products(v, value_keys), TB, VALUE_WIDE)
    tag += sum_rows(rows, TB)
    if TO_SLOTS:
        report_tags(payload, tag_word, stored, exists_block, nb, tag, ordinals, result, block, TB)
    else:
        store_tags(payload, tag_word, exists_block, nb, tag, block, TB)


def check_slots(
    slots: Slots, block_table: torch.Tensor, span: Span, codec: SlotCodec, heads: int, runs: torch.Tensor, payload: torch.Tensor
) -> None:
    """codec: the slots'. heads: that the pages have to have. Raises PagesDoNotFit."""
    plan.check_launch(slots, span, block_table, heads, runs, payload)
    if codec.key.kind not in (CodingKind.FP8, CodingKind.CODEBOOK) or codec.value.kind is not CodingKind.AFFINE:
        raise PagesDoNotFit("vLLM slots hold the TurboQuant presets, this codec is another")
    if codec.slot_bytes(slots.head_dim) != 2 * slots.anchor.shape[-1]:
        raise PagesDoNotFit(f"slots of {2 * slots.anchor.shape[-1]} bytes, the codec's have {codec.slot_bytes(slots.head_dim)}")


def _launch(
    slots: Slots,
    block_table: torch.Tensor,
    span: Span,
    codec: SlotCodec,
    heads: int,
    runs: torch.Tensor,
    payload: torch.Tensor,
    keys: torch.Tensor,
    masks: torch.Tensor,
    result: torch.Tensor,
    tuning: Tuning,
    write: tuple[int, int],
    first_head: int,
    to_slots: bool,
) -> None:
    key_row, value_row = codec.key.code_bytes(slots.head_dim) // 4, codec.value.code_bytes(slots.head_dim) // 4
    columns = codec.slot_bytes(slots.head_dim) // 2
    main = triton.next_power_of_2(columns // 2 + 1)
    tiles = (span.most_blocks + tuning.blocks - 1) // tuning.blocks
    slots_kernel[(heads * tiles, slots.layers, span.chunks)](
        slots.anchor, slots.offsets, block_table, runs, payload, keys, masks, result,
        slots.page_stride, slots.token_stride, slots.head_stride, first_head * slots.head_stride,
        span.first, span.end, span.chunk_tokens, span.first_chunk, heads, *write,
        BLOCK_SIZE=slots.block_size, KEY_ROW=key_row, VALUE_ROW=value_row,
        KEY_WIDE=triton.next_power_of_2(key_row), VALUE_WIDE=triton.next_power_of_2(value_row),
        KEY_SCALARS=codec.key.scalar_bytes() // 2, MAIN=main, REST=triton.next_power_of_2(max(columns - main, 1)),
        WORDS=slots.aligned, TB=tuning.blocks, TO_SLOTS=to_slots, **tuning.options(),
    )  # fmt: skip


def pack_slots(
    slots: Slots,
    block_table: torch.Tensor,
    span: Span,
    codec: SlotCodec,
    heads: int,
    runs: torch.Tensor,
    payload: torch.Tensor,
    keys: torch.Tensor,
    masks: torch.Tensor,
    tuning: Tuning,
    *,
    first_head: int = 0,
) -> None:
    """pack.pack_pages for pages that hold slots of the payload's own preset: the same bytes. Raises PagesDoNotFit."""
    check_slots(slots, block_table, span, codec, first_head + heads, runs, payload)
    _launch(slots, block_table, span, codec, heads, runs, payload, keys, masks, masks, tuning, (span.first, span.end), first_head, False)


def land_slots(
    slots: Slots,
    block_table: torch.Tensor,
    span: Span,
    codec: SlotCodec,
    heads: int,
    runs: torch.Tensor,
    payload: torch.Tensor,
    keys: torch.Tensor,
    masks: torch.Tensor,
    result: torch.Tensor,
    tuning: Tuning,
    *,
    write_first: int = 0,
    write_end: int | None = None,
    first_head: int = 0,
) -> None:
    """land.land_pages for pages that hold slots of the payload's own preset: the same bytes. Raises PagesDoNotFit."""
    check_slots(slots, block_table, span, codec, first_head + heads, runs, payload)
    write = (write_first, span.end if write_end is None else write_end)
    if tuning.together and in_page_order(slots, span, codec, heads):
        land_in_page_order(slots, block_table, span, codec, runs, payload, keys, masks, result, tuning, write)
        return
    _launch(slots, block_table, span, codec, heads, runs, payload, keys, masks, result, tuning, write, first_head, True)
