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
from backends.kernels.plan import Slots, Span, Tuning
from backends.kernels.tags import norm_products, report_tags, sum_blocks, sum_rows, tag_base, tag_products
from bridge.pages import PagesDoNotFit
from bridge.wire import CodingKind, SlotCodec


@triton.jit
def load_codes(
    data, slots, exists, valid, row_word, row, index,
    T: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr, TO_SLOTS: tl.constexpr,
):  # fmt: skip
    """One code plane as int32 words [T, W]. row: int64 [T], where the codes of each token's slot begin, in int16. W: ROW, rounded up."""
    if TO_SLOTS:
        return tl.load(data + (row_word[:, None] + index), mask=exists[:, None] & (tl.arange(0, W) < ROW)[None, :], other=0)
    else:
        column = tl.arange(0, 2 * W)
        halves = tl.load(slots + (row[:, None] + column[None, :]), mask=valid[:, None] & (column < 2 * ROW)[None, :], other=0)
        low, high = tl.split(tl.reshape(halves, [T, W, 2]))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def copy_columns(
    data16, slots, exists, valid, row_half, row, r, first,
    WIDTH: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, KEY_SCALARS: tl.constexpr,
):  # fmt: skip
    """int16 columns [first, first + WIDTH) of slots, gathered from the planes, so that a slot is written in one or two whole pieces.

    Writing planes one by one would touch twice as many 32-byte sectors, most of them in part.
    """
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
def slots_kernel(
    anchor, offsets, block_table, runs, payload, keys, masks, result,
    page_stride, token_stride, head_stride, origin, first_token, end_token, chunk_tokens, first_chunk, heads, write_first, write_end,
    BLOCK_SIZE: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, KEY_WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    KEY_SCALARS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, TB: tl.constexpr, TO_SLOTS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    layer = tl.program_id(1)
    chunk = tl.program_id(2)
    layers = tl.num_programs(1)

    T: tl.constexpr = 16 * TB
    VALUE_PLANE: tl.constexpr = 16 * KEY_ROW
    KEY_SCALAR_PLANE: tl.constexpr = VALUE_PLANE + 16 * VALUE_ROW
    VALUE_SCALAR_PLANE: tl.constexpr = KEY_SCALAR_PLANE + 8 * KEY_SCALARS
    BLOCK_WORDS: tl.constexpr = VALUE_SCALAR_PLANE + 16

    start = (first_chunk + chunk) * chunk_tokens
    lo = tl.maximum(first_token, start)
    hi = tl.minimum(end_token, start + chunk_tokens)
    block0 = lo // 16
    nb = (hi + 15) // 16 - block0
    block = tile * TB
    if block >= nb:
        return

    run = runs + (chunk * layers + layer) * 2
    run_word = (tl.load(run) // 16 + h.to(tl.int64) * (nb.to(tl.int64) * (BLOCK_WORDS // 4) + (nb + 1) // 2)) * 4
    ordinal = tl.load(run + 1) + h * nb + block
    # From here on places are small distances from the tile's own: 32-bit arithmetic, and constants where a program has one block.
    data = payload.to(tl.pointer_type(tl.int32)) + (run_word + block.to(tl.int64) * BLOCK_WORDS)

    t = tl.arange(0, T)
    token = (block0 + block) * 16 + t
    exists = t // 16 < nb - block if TB > 1 else tl.full([T], True, tl.int1)
    # Packing reads valid tokens; landing writes those that were asked for.
    valid = (token >= tl.maximum(lo, write_first)) & (token < tl.minimum(hi, write_end))
    slots = anchor + tl.load(offsets + layer) + h.to(tl.int64) * head_stride + origin
    if TB == 1 and BLOCK_SIZE % 16 == 0:
        # The block lies in one page.
        token0 = (block0 + block) * 16
        page = tl.load(block_table + token0 // BLOCK_SIZE).to(tl.int64)
        slots += page * page_stride + (token0 % BLOCK_SIZE).to(tl.int64) * token_stride
        row = t * token_stride
    else:
        page = tl.load(block_table + token // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        row = page * page_stride + (token % BLOCK_SIZE) * token_stride
    row_word = t // 16 * BLOCK_WORDS
    r = t % 16

    # Everything that is read is asked for before anything is used.
    value_row = row + 2 * KEY_ROW + KEY_SCALARS
    key_index = (r * KEY_ROW)[:, None] + tl.arange(0, KEY_WIDE)[None, :]
    value_index = (VALUE_PLANE + r * VALUE_ROW)[:, None] + tl.arange(0, VALUE_WIDE)[None, :]
    k = load_codes(data, slots, exists, valid, row_word, row, key_index, T, KEY_WIDE, KEY_ROW, TO_SLOTS)
    v = load_codes(data, slots, exists, valid, row_word, value_row, value_index, T, VALUE_WIDE, VALUE_ROW, TO_SLOTS)
    wire16 = data.to(tl.pointer_type(tl.int16)) + (row_word * 2 + 2 * KEY_SCALAR_PLANE + r)
    wire32 = data + (row_word + VALUE_SCALAR_PLANE + r)
    scalars = slots + (value_row + 2 * VALUE_ROW)
    half = tl.zeros([T], tl.int16)
    if TO_SLOTS:
        pair = tl.load(wire32, mask=exists, other=0)
        if KEY_SCALARS == 1:
            half = tl.load(wire16, mask=exists, other=0)
    else:
        low = tl.load(scalars, mask=valid, other=0).to(tl.int32) & 0xFFFF
        pair = low | (tl.load(scalars + 1, mask=valid, other=0).to(tl.int32) << 16)
        if KEY_SCALARS == 1:
            half = tl.load(slots + (row + 2 * KEY_ROW), mask=valid, other=0)
    bt = block + tl.arange(0, TB)
    exists_block = bt < nb
    starts = (block0 + bt) * 16
    ordinals = ordinal + tl.arange(0, TB)
    tag = tag_base(keys, masks, ordinals, tl.maximum(lo - starts, 0), tl.minimum(hi - starts, 16), exists_block)
    tag_word = run_word + nb.to(tl.int64) * BLOCK_WORDS
    tags = payload.to(tl.pointer_type(tl.int64)) + (tag_word // 2 + bt)
    stored = tag
    if TO_SLOTS:
        stored = tl.load(tags, mask=exists_block, other=0)
    key_keys = tl.load(keys + 2 + key_index, mask=(tl.arange(0, KEY_WIDE) < KEY_ROW)[None, :], other=0)
    value_keys = tl.load(keys + 2 + value_index, mask=(tl.arange(0, VALUE_WIDE) < VALUE_ROW)[None, :], other=0)
    rows = tag_products(pair, tl.load(keys + 2 + VALUE_SCALAR_PLANE + r))
    if KEY_SCALARS == 1:
        rows += norm_products(half, r, keys, KEY_SCALAR_PLANE)

    if TO_SLOTS:
        data16 = data.to(tl.pointer_type(tl.int16))
        copy_columns(data16, slots, exists, valid, row_word * 2, row, r, 0, MAIN, KEY_ROW, VALUE_ROW, KEY_SCALARS)
        copy_columns(data16, slots, exists, valid, row_word * 2, row, r, MAIN, REST, KEY_ROW, VALUE_ROW, KEY_SCALARS)
    else:
        tl.store(data + (row_word[:, None] + key_index), k, mask=exists[:, None] & (tl.arange(0, KEY_WIDE) < KEY_ROW)[None, :])
        tl.store(data + (row_word[:, None] + value_index), v, mask=exists[:, None] & (tl.arange(0, VALUE_WIDE) < VALUE_ROW)[None, :])
        tl.store(wire32, pair, mask=exists)
        if KEY_SCALARS == 1:
            tl.store(wire16, half, mask=exists)

    if KEY_WIDE == VALUE_WIDE:
        tag += sum_blocks(tag_products(k, key_keys) + tag_products(v, value_keys), TB, KEY_WIDE)
    else:
        tag += sum_blocks(tag_products(k, key_keys), TB, KEY_WIDE) + sum_blocks(tag_products(v, value_keys), TB, VALUE_WIDE)
    tag += sum_rows(rows, TB)
    if TO_SLOTS:
        report_tags(payload, tag_word, stored, exists_block, nb, tag, ordinals, result, block, TB)
    else:
        tl.store(tags, tag, mask=exists_block)
        if (nb % 2 == 1) & (block + TB >= nb):
            tl.store(payload.to(tl.pointer_type(tl.int64)) + (tag_word // 2 + nb), tl.zeros([], tl.int64))


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
    plan.check_launch(slots, span, block_table, first_head + heads, runs, payload)
    if codec.key.kind not in (CodingKind.FP8, CodingKind.CODEBOOK) or codec.value.kind is not CodingKind.AFFINE:
        raise PagesDoNotFit("vLLM slots hold the TurboQuant presets, this payload's codec is another")
    if codec.slot_bytes(slots.head_dim) != 2 * slots.anchor.shape[-1]:
        raise PagesDoNotFit(f"slots of {2 * slots.anchor.shape[-1]} bytes, the codec's have {codec.slot_bytes(slots.head_dim)}")
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
        TB=tuning.blocks, TO_SLOTS=to_slots, **tuning.options(),
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
    write = (write_first, span.end if write_end is None else write_end)
    _launch(slots, block_table, span, codec, heads, runs, payload, keys, masks, result, tuning, write, first_head, True)
