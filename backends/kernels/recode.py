"""Payload of raw elements -> vLLM TurboQuant slots in one pass: tags verified, keys rotated and coded, values quantised, slots written.

One program takes one wire block of one (chunk, layer, kv head). The arithmetic is pack's; slots are written in half words.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backends.kernels import plan
from backends.kernels.elements import dot_operand, to_float
from backends.kernels.fp8 import encode_e4m3
from backends.kernels.pack import affine_groups, divide, load_side, smooth_groups
from backends.kernels.places import chunk_range, page_rows, run_place
from backends.kernels.plan import Slots, Span, Tuning
from backends.kernels.rotation import (
    bucketise,
    butterfly,
    butterfly_parts,
    join_halves,
    join_quarters,
    parts_squared,
    reciprocal,
    root,
    sum_of_squares,
)
from backends.kernels.slots import check_slots
from backends.kernels.streams import filled_columns, group_codes, word_columns, words_of_bytes, words_of_groups
from backends.kernels.tags import range_tag, report_tags, sum_blocks, tag_products
from bridge.wire import CodingKind, Element, SlotCodec

FP8 = tl.constexpr(2)
CODEBOOK = tl.constexpr(3)
AFFINE = tl.constexpr(4)
FP32 = tl.constexpr(3)


@triton.jit
def write_halves(slots, row, write, words, first, CODE_BITS: tl.constexpr):
    """Words [16, W] of a code plane's rows -> half words of slots from `first` on. CODE_BITS: see word_columns."""
    there = write[:, None]
    if CODE_BITS == 3:
        there = there & filled_columns(words.shape[1])
    place = row[:, None] + (first + 2 * word_columns(words.shape[1], CODE_BITS))[None, :]
    tl.store(slots + place, words.to(tl.int16), mask=there)
    tl.store(slots + (place + 1), (words >> 16).to(tl.int16), mask=there)


@triton.jit
def recode_kernel(
    anchor, offsets, block_table, runs, payload, keys, masks, matrix, midpoints, result,
    p0, p1, p2, p3, p4, p5, p6,
    page_stride, token_stride, head_stride, origin, first_token, end_token, chunk_tokens, first_chunk, heads, write_first, write_end,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, ELEMENT: tl.constexpr, KEY: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, LIMIT: tl.constexpr, ROOT: tl.constexpr, PART: tl.constexpr, MATRIX_UNITS: tl.constexpr,
    WIDE: tl.constexpr, FUSED: tl.constexpr, SOFT_ROOTS: tl.constexpr, CANONICAL_NAN: tl.constexpr, TIES_UP: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    block = tl.program_id(0) // heads
    layer = tl.program_id(1)
    chunk = tl.program_id(2)
    ROW: tl.constexpr = D if ELEMENT == FP32 else D // 2
    BLOCK_WORDS: tl.constexpr = 32 * ROW
    KEY_HALVES: tl.constexpr = D * KEY_BITS // 16
    KEY_SCALARS: tl.constexpr = 1 if KEY == CODEBOOK else 0
    VALUE_HALF: tl.constexpr = KEY_HALVES + KEY_SCALARS
    SCALE_HALF: tl.constexpr = VALUE_HALF + D * VALUE_BITS // 16

    lo, hi, block0, nb = chunk_range(chunk, first_token, end_token, chunk_tokens, first_chunk)
    if block >= nb:
        return
    r = tl.arange(0, 16)
    start = (block0 + block) * 16
    token = start + r
    write = (token >= tl.maximum(lo, write_first)) & (token < tl.minimum(hi, write_end))
    place, row = page_rows(block_table, start, write, page_stride, token_stride, 1, BLOCK_SIZE)
    slots = anchor + (tl.load(offsets + layer) + place + h.to(tl.int64) * head_stride + origin)
    run, run_ordinal = run_place(runs, layer, tl.num_programs(1), chunk, h, nb, BLOCK_WORDS)
    first_word = run + block.to(tl.int64) * BLOCK_WORDS
    data = payload.to(tl.pointer_type(tl.int32)) + first_word

    # Tags.
    word = r[:, None] * ROW + tl.arange(0, ROW)[None, :]
    products = tag_products(tl.load(data + word), tl.load(keys + 2 + word))
    products += tag_products(tl.load(data + (16 * ROW + word)), tl.load(keys + 2 + (16 * ROW + word)))
    bt = block + tl.arange(0, 1)
    tag_word = run + nb.to(tl.int64) * BLOCK_WORDS
    ranges = range_tag(keys, tl.maximum(lo - start, 0), tl.minimum(hi - start, 16))
    tag = tl.load(masks + (run_ordinal + bt)) + ranges + sum_blocks(products, 1, ROW)
    stored = tl.load(payload.to(tl.pointer_type(tl.int64)) + (tag_word // 2 + bt))
    report_tags(payload, tag_word, stored, bt < nb, nb, tag, run_ordinal + bt, result, block, 1)

    every = tl.full([16], True, tl.int1)
    if ELEMENT == FP32:  # noqa: SIM108 (a conditional expression would compile both)
        elements = data
    else:
        elements = data.to(tl.pointer_type(tl.int16))

    # Values.
    v0, v1, v2, v3 = load_side(elements + 16 * D, r * D, every, AFFINE, D, ROW, MATRIX_UNITS, PART)
    x0 = to_float(v0, ELEMENT)
    x1 = to_float(v1, ELEMENT)
    x2 = to_float(v2, ELEMENT)
    x3 = to_float(v3, ELEMENT)
    zero = tl.min(tl.minimum(tl.minimum(x0, x1), tl.minimum(x2, x3)), 1)
    top = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 1)
    levels = tl.full([16], (1 << VALUE_BITS) - 1, tl.float32)
    scale = tl.maximum(divide(top - zero, levels, tl.full([16], 1.0 / ((1 << VALUE_BITS) - 1), tl.float32), FUSED), 1e-8)
    inverse = 1.0 / scale
    g0 = affine_groups(x0, zero, scale, inverse, 16, D // 4, VALUE_BITS, FUSED, TIES_UP)
    g1 = affine_groups(x1, zero, scale, inverse, 16, D // 4, VALUE_BITS, FUSED, TIES_UP)
    g2 = affine_groups(x2, zero, scale, inverse, 16, D // 4, VALUE_BITS, FUSED, TIES_UP)
    g3 = affine_groups(x3, zero, scale, inverse, 16, D // 4, VALUE_BITS, FUSED, TIES_UP)
    words = words_of_groups(join_quarters(g0, g1, g2, g3, 16, D // 32), 16, D // 8, VALUE_BITS)
    write_halves(slots, row, write, words, VALUE_HALF, VALUE_BITS)
    tl.store(slots + (row + SCALE_HALF), scale.to(tl.float16).to(tl.int16, bitcast=True), mask=write)
    tl.store(slots + (row + (SCALE_HALF + 1)), zero.to(tl.float16).to(tl.int16, bitcast=True), mask=write)

    # Keys.
    k0, k1, k2, k3 = load_side(elements, r * D, every, KEY, D, ROW, MATRIX_UNITS, PART)
    if KEY == FP8:
        write_halves(slots, row, write, words_of_bytes(encode_e4m3(to_float(k0, ELEMENT), CANONICAL_NAN), 16, D), 0, 8)
    else:
        if MATRIX_UNITS:
            hadamard = tl.load(matrix + tl.arange(0, PART)[:, None] * PART + tl.arange(0, PART)[None, :])
            y0 = tl.dot(dot_operand(k0, ELEMENT, WIDE), hadamard)
            y1 = tl.dot(dot_operand(k1, ELEMENT, WIDE), hadamard)
            y2 = y0
            y3 = y1
            if PART * 4 == D:
                y2 = tl.dot(dot_operand(k2, ELEMENT, WIDE), hadamard)
                y3 = tl.dot(dot_operand(k3, ELEMENT, WIDE), hadamard)
            y0, y1, y2, y3 = butterfly_parts(y0, y1, y2, y3, D // PART)
            norm = tl.sqrt_rn(parts_squared(y0, y1, y2, y3, D // PART) * (1.0 / D))
            inverse = 1.0 / (norm + 1e-8)
            groups = smooth_groups(y0, inverse, p0, p1, p2, p3, p4, p5, p6, 16, PART, LIMIT, KEY_BITS)
            g1 = smooth_groups(y1, inverse, p0, p1, p2, p3, p4, p5, p6, 16, PART, LIMIT, KEY_BITS)
            if PART * 4 == D:
                g2 = smooth_groups(y2, inverse, p0, p1, p2, p3, p4, p5, p6, 16, PART, LIMIT, KEY_BITS)
                g3 = smooth_groups(y3, inverse, p0, p1, p2, p3, p4, p5, p6, 16, PART, LIMIT, KEY_BITS)
                groups = join_quarters(groups, g1, g2, g3, 16, PART // 8)
            else:
                groups = join_halves(groups, g1, 16, PART // 8)
        else:
            x = to_float(k0, ELEMENT)
            norm = root(sum_of_squares(x, 16, D), SOFT_ROOTS)
            inverse = reciprocal(norm + 1e-8, SOFT_ROOTS)
            unit = butterfly(x, 16, D) * inverse[:, None]
            groups = group_codes(bucketise(unit * ROOT, midpoints, KEY_BITS), 16, D, KEY_BITS)
        write_halves(slots, row, write, words_of_groups(groups, 16, D // 8, KEY_BITS), 0, KEY_BITS)
        tl.store(slots + (row + KEY_HALVES), norm.to(tl.float16).to(tl.int16, bitcast=True), mask=write)


def recode_slots(
    slots: Slots,
    block_table: torch.Tensor,
    span: Span,
    codec: SlotCodec,
    element: Element,
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
    """land.land_pages of a payload of raw elements into slots of the preset `codec`, whose fp8 keys have the scale 1.

    element: of K and V in the payload, BF16, FP16 or FP32. tuning: pack's for that preset. The slots are those that pack and
    land_slots would make. Raises PagesDoNotFit.
    """
    check_slots(slots, block_table, span, codec, first_head + heads, runs, payload)
    device = str(payload.device)
    rotates = codec.key.kind is CodingKind.CODEBOOK
    matrix_units = tuning.matrix and rotates and element is not Element.FP32
    smooth, limit = plan.bucket_polynomial(slots.head_dim, codec.key.bits) if rotates else ((0.0,) * 7, 0.0)
    part = plan.pack_part(slots.head_dim, tuning.part)
    options = tuning.options() | {"num_warps": max(2, tuning.warps), "num_stages": 1}
    options.pop("maxnreg", None)
    recode_kernel[(heads * span.most_blocks, slots.layers, span.chunks)](
        slots.anchor, slots.offsets, block_table, runs, payload, keys, masks,
        plan.rotation_matrix(part, Element.FP32 if tuning.wide else element, device, True) if matrix_units else masks,
        plan.midpoint_tensor(slots.head_dim, codec.key.bits, device) if rotates else masks,
        result, *smooth,
        slots.page_stride, slots.token_stride, slots.head_stride, first_head * slots.head_stride,
        span.first, span.end, span.chunk_tokens, span.first_chunk, heads, write_first, span.end if write_end is None else write_end,
        D=slots.head_dim, BLOCK_SIZE=slots.block_size, ELEMENT=int(element), KEY=int(codec.key.kind), KEY_BITS=codec.key.bits,
        VALUE_BITS=codec.value.bits, LIMIT=limit, ROOT=plan.inverse_root(slots.head_dim), PART=part, MATRIX_UNITS=matrix_units,
        WIDE=tuning.wide, FUSED=tuning.fused, SOFT_ROOTS=tuning.soft_roots, CANONICAL_NAN=tuning.canonical_nan, TIES_UP=tuning.ties_up,
        **options,
    )  # fmt: skip
