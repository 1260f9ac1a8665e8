"""pages -> payload: gather by block table, rotation, bucketising, value quantisation, planes and tags in one pass over the data.

One program makes `TB` neighbouring wire blocks of one (chunk, layer, kv head). Rows of invalid tokens become zero bytes.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backends.kernels import plan
from backends.kernels.elements import dot_operand, to_float
from backends.kernels.fp8 import encode_e4m3
from backends.kernels.places import chunk_range, page_rows, run_place
from backends.kernels.plan import Pages, Span, Tuning
from backends.kernels.rotation import (
    bucketise,
    bucketise_smooth,
    butterfly,
    butterfly_parts,
    join_halves,
    join_quarters,
    parts_squared,
    quotient,
    reciprocal,
    root,
    sum_of_squares,
)
from backends.kernels.streams import filled_columns, group_codes, word_columns, words_of_bytes, words_of_groups
from backends.kernels.tags import norm_products, range_tag, store_tags, sum_blocks, sum_rows, tag_products
from bridge.wire import Element, SlotCodec

RAW = tl.constexpr(1)
FP8 = tl.constexpr(2)
CODEBOOK = tl.constexpr(3)
AFFINE = tl.constexpr(4)


@triton.jit
def load_rows(base, row, valid, column, N: tl.constexpr):
    """Raw elements [T, N] of rows at element offsets `row` [T], from column `column` on; zero where not valid."""
    return tl.load(base + (row[:, None] + (column + tl.arange(0, N))[None, :]), mask=valid[:, None], other=0)


@triton.jit
def divide(a, b, inverse, FUSED: tl.constexpr):
    """fp32 a / b, correctly rounded.

    FUSED: from a product with b's reciprocal by one correction, exact for all values met so far; needs fma with a single rounding.
    """
    if FUSED:
        q = a * inverse
        return tl.fma(tl.fma(-q, b, a), inverse, q)
    else:
        return tl.div_rn(a, b)


@triton.jit
def affine_groups(
    x, zero, scale, inverse, T: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, FUSED: tl.constexpr, TIES_UP: tl.constexpr
):  # fmt: skip
    """fp32 [T, N] -> int32 groups [T, N / 8] of clamp(trunc((x - zero) / scale + 0.5)).

    TIES_UP: one operation instead of five. Quotients within 2**-20 of a half go up, while the reference's rounding of the scale sends
    some of the exact halves, which short mantissas meet once in 4,000 elements, down.
    """
    d = x - zero[:, None]
    if TIES_UP:
        codes = tl.fma(d, (inverse * 1.000000476837158203125)[:, None] + tl.zeros_like(d), 0.5).to(tl.int32)
    else:
        q = divide(d, scale[:, None] + tl.zeros_like(d), inverse[:, None] + tl.zeros_like(d), FUSED)
        codes = (q + 0.5).to(tl.int32)
    if not FUSED:
        codes = tl.minimum(codes, (1 << BITS) - 1)
    return group_codes(codes, T, N, BITS)


@triton.jit
def smooth_groups(y, inverse, p0, p1, p2, p3, p4, p5, p6, T: tl.constexpr, N: tl.constexpr, LIMIT: tl.constexpr, BITS: tl.constexpr):
    """fp32 [T, N] products, in the columns of plan.encode_columns, and 1 / norm [T] -> int32 groups [T, N / 8] in the vector's order."""
    codes = bucketise_smooth(y, inverse[:, None], p0, p1, p2, p3, p4, p5, p6, LIMIT, BITS)
    codes = tl.reshape(tl.permute(tl.reshape(codes, [T, N // 8, 4, 2]), [0, 2, 1, 3]), [T, N])
    # Every element still carries 0x4b400000; the sum of the eight shifted ones is taken off at once, modulo 2**32.
    if BITS == 4:
        return group_codes(codes, T, N, BITS) + -1061158912
    else:
        return group_codes(codes, T, N, BITS) + 180355072


@triton.jit
def store_words(out, words, exists, row_word, plane_word, columns, ROW: tl.constexpr, DENSE: tl.constexpr):
    """Stores the tile [16 * TB, W] into its plane.

    row_word: [T], where each token's block begins, in words. columns: int32 [W], the word of a row that a column holds, see
    word_columns; every column holds one if DENSE. ROW: words of a row of the plane.
    """
    r = tl.arange(0, words.shape[0]) % 16
    there = exists[:, None]
    if not DENSE:
        there = there & filled_columns(words.shape[1])
    tl.store(out + (row_word[:, None] + ((plane_word + r * ROW)[:, None] + columns[None, :])), words, mask=there)


@triton.jit
def plane_keys(keys, plane_word, W: tl.constexpr, ROW: tl.constexpr, CODE_BITS: tl.constexpr, TB: tl.constexpr):
    """The keys of a plane's words as a tile, int64 [16 * TB, W], zero in columns that hold no word. CODE_BITS: see word_columns."""
    r = tl.arange(0, 16 * TB) % 16
    index = (plane_word + r * ROW)[:, None] + word_columns(W, CODE_BITS)[None, :]
    if CODE_BITS == 3:
        return tl.load(keys + 2 + index, mask=filled_columns(W), other=0)
    else:
        return tl.load(keys + 2 + index)


@triton.jit
def load_side(base, row, valid, KIND: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr, MATRIX_UNITS: tl.constexpr, PART: tl.constexpr):
    """One side's rows as the four tiles that its coding wants; unused ones repeat the first. All loads are issued before any is used.

    Raw: the whole row as 32-bit words. FP8 and a butterfly: the whole row. Affine: quarters, so that few threads share a row and most
    of a minimum is found within a thread. Matrix units: parts of PART.
    """
    if KIND == RAW:
        # Elements of 16 bits are read as pairs.
        wide = base.to(tl.pointer_type(tl.int32))
        x0 = tl.load(wide + ((row * WORDS // D)[:, None] + tl.arange(0, WORDS)[None, :]), mask=valid[:, None], other=0)
        return x0, x0, x0, x0
    elif KIND == AFFINE:
        x0 = load_rows(base, row, valid, 0, D // 4)
        x1 = load_rows(base, row, valid, D // 4, D // 4)
        x2 = load_rows(base, row, valid, D // 2, D // 4)
        x3 = load_rows(base, row, valid, 3 * D // 4, D // 4)
        return x0, x1, x2, x3
    elif KIND == CODEBOOK and MATRIX_UNITS:
        x0 = load_rows(base, row, valid, 0, PART)
        x1 = load_rows(base, row, valid, PART, PART)
        if PART * 2 == D:
            return x0, x1, x0, x1
        x2 = load_rows(base, row, valid, 2 * PART, PART)
        x3 = load_rows(base, row, valid, 3 * PART, PART)
        return x0, x1, x2, x3
    else:
        x0 = load_rows(base, row, valid, 0, D)
        return x0, x0, x0, x0


@triton.jit
def pack_kernel(
    anchor, offsets, block_table, runs, payload, keys, masks, scales, matrix, midpoints,
    p0, p1, p2, p3, p4, p5, p6,
    page_stride, token_stride, head_stride, origin, first_token, end_token, chunk_tokens, first_chunk, heads, layers,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, ELEMENT: tl.constexpr, ALIGN: tl.constexpr,
    KEY: tl.constexpr, KEY_BITS: tl.constexpr, VALUE: tl.constexpr, VALUE_BITS: tl.constexpr,
    KEY_SCALED: tl.constexpr, VALUE_SCALED: tl.constexpr, LIMIT: tl.constexpr, ROOT: tl.constexpr,
    TB: tl.constexpr, PART: tl.constexpr, MATRIX_UNITS: tl.constexpr, WIDE: tl.constexpr, FUSED: tl.constexpr,
    SOFT_ROOTS: tl.constexpr, CANONICAL_NAN: tl.constexpr, TIES_UP: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, ONE_LAYER: tl.constexpr,
):  # fmt: skip
    # A step is a pair of layer and kv head; the program's pairs follow one another.
    pair0 = tl.program_id(1) * STEPS
    layer0 = pair0 // heads
    head0 = pair0 % heads
    block = tl.program_id(0) * TB
    chunk = tl.program_id(2)

    T: tl.constexpr = 16 * TB
    KEY_ROW: tl.constexpr = D * KEY_BITS // 32
    VALUE_ROW: tl.constexpr = D * VALUE_BITS // 32
    KEY_SCALARS: tl.constexpr = 1 if KEY == CODEBOOK else 0
    VALUE_SCALARS: tl.constexpr = 2 if VALUE == AFFINE else 0
    # Planes of a block, in words.
    VALUE_PLANE: tl.constexpr = 16 * KEY_ROW
    KEY_SCALAR_PLANE: tl.constexpr = VALUE_PLANE + 16 * VALUE_ROW
    VALUE_SCALAR_PLANE: tl.constexpr = KEY_SCALAR_PLANE + 8 * KEY_SCALARS
    BLOCK_WORDS: tl.constexpr = VALUE_SCALAR_PLANE + 8 * VALUE_SCALARS
    PARTS: tl.constexpr = D // PART
    VALUE_TILE: tl.constexpr = D // 8 if VALUE == AFFINE else VALUE_ROW
    KEY_TILE: tl.constexpr = D // 8 if KEY == CODEBOOK else KEY_ROW
    value_dense: tl.constexpr = VALUE != AFFINE or VALUE_BITS == 4
    key_dense: tl.constexpr = KEY != CODEBOOK or KEY_BITS == 4

    lo, hi, block0, nb = chunk_range(chunk, first_token, end_token, chunk_tokens, first_chunk)
    if block >= nb:
        return
    t = tl.arange(0, T)
    r = t % 16
    token = (block0 + block) * 16 + t
    exists = t // 16 < nb - block if TB > 1 else tl.full([T], True, tl.int1)
    valid = (token >= lo) & (token < hi)
    # From here on places are small distances from the tile's own: 32-bit arithmetic, and constants where a program has one block.
    place, row = page_rows(block_table, (block0 + block) * 16, valid, page_stride, token_stride, TB, BLOCK_SIZE)
    row_word = t // 16 * BLOCK_WORDS
    bt = block + tl.arange(0, TB)
    exists_block = bt < nb
    starts = (block0 + bt) * 16
    first = tl.maximum(lo - starts, 0)
    end = tl.minimum(hi - starts, 16)
    if MATRIX_UNITS:
        hadamard = tl.load(matrix + tl.arange(0, PART)[:, None] * PART + tl.arange(0, PART)[None, :])
    ranges = range_tag(keys, first, end)

    for step in tl.range(0, STEPS, num_stages=STAGES):
        if ONE_LAYER:
            layer = layer0
            h = head0 + step
        else:
            layer = (pair0 + step) // heads
            h = (pair0 + step) % heads
        head_place = place + h.to(tl.int64) * head_stride + origin
        # The divisions tell the compiler how rows are aligned.
        key_base = anchor + (tl.load(offsets + layer * 2) + head_place) // ALIGN * ALIGN
        value_base = anchor + (tl.load(offsets + layer * 2 + 1) + head_place) // ALIGN * ALIGN
        v0, v1, v2, v3 = load_side(value_base, row, valid, VALUE, D, VALUE_ROW, MATRIX_UNITS, PART)
        k0, k1, k2, k3 = load_side(key_base, row, valid, KEY, D, KEY_ROW, MATRIX_UNITS, PART)
        run, run_ordinal = run_place(runs, layer, layers, chunk, h, nb, BLOCK_WORDS)
        out = payload.to(tl.pointer_type(tl.int32)) + (run + block.to(tl.int64) * BLOCK_WORDS)
        tag = tl.load(masks + (run_ordinal + bt), mask=exists_block, other=0) + ranges

        # Values.
        if VALUE == RAW:
            words = v0
            columns = tl.arange(0, VALUE_ROW)
        elif VALUE == FP8:
            x = to_float(v0, ELEMENT)
            if VALUE_SCALED:
                x = quotient(x, tl.load(scales + layer * 2 + 1), SOFT_ROOTS)
            words = words_of_bytes(encode_e4m3(x, CANONICAL_NAN), T, D)
            columns = tl.arange(0, VALUE_ROW)
        else:
            x0 = to_float(v0, ELEMENT)
            x1 = to_float(v1, ELEMENT)
            x2 = to_float(v2, ELEMENT)
            x3 = to_float(v3, ELEMENT)
            zero = tl.min(tl.minimum(tl.minimum(x0, x1), tl.minimum(x2, x3)), 1)
            top = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 1)
            levels = tl.full([T], (1 << VALUE_BITS) - 1, tl.float32)
            scale = tl.maximum(divide(top - zero, levels, tl.full([T], 1.0 / ((1 << VALUE_BITS) - 1), tl.float32), FUSED), 1e-8)
            inverse = 1.0 / scale
            g0 = affine_groups(x0, zero, scale, inverse, T, D // 4, VALUE_BITS, FUSED, TIES_UP)
            g1 = affine_groups(x1, zero, scale, inverse, T, D // 4, VALUE_BITS, FUSED, TIES_UP)
            g2 = affine_groups(x2, zero, scale, inverse, T, D // 4, VALUE_BITS, FUSED, TIES_UP)
            g3 = affine_groups(x3, zero, scale, inverse, T, D // 4, VALUE_BITS, FUSED, TIES_UP)
            words = words_of_groups(join_quarters(g0, g1, g2, g3, T, D // 32), T, D // 8, VALUE_BITS)
            columns = word_columns(D // 8, VALUE_BITS)
            pair = scale.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            pair |= zero.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
            tl.store(out + (row_word + VALUE_SCALAR_PLANE + r), pair, mask=exists)
        value_words = words
        store_words(out, words, exists, row_word, VALUE_PLANE, columns, VALUE_ROW, value_dense)

        # Keys.
        if KEY == RAW:
            words = k0
            columns = tl.arange(0, KEY_ROW)
        elif KEY == FP8:
            x = to_float(k0, ELEMENT)
            if KEY_SCALED:
                x = quotient(x, tl.load(scales + layer * 2), SOFT_ROOTS)
            words = words_of_bytes(encode_e4m3(x, CANONICAL_NAN), T, D)
            columns = tl.arange(0, KEY_ROW)
        else:
            if MATRIX_UNITS:
                y0 = tl.dot(dot_operand(k0, ELEMENT, WIDE), hadamard)
                y1 = tl.dot(dot_operand(k1, ELEMENT, WIDE), hadamard)
                y2 = y0
                y3 = y1
                if PARTS == 4:
                    y2 = tl.dot(dot_operand(k2, ELEMENT, WIDE), hadamard)
                    y3 = tl.dot(dot_operand(k3, ELEMENT, WIDE), hadamard)
                y0, y1, y2, y3 = butterfly_parts(y0, y1, y2, y3, PARTS)
                # The matrix is orthogonal: the rotated vector's squares sum to D times the vector's.
                norm = tl.sqrt_rn(parts_squared(y0, y1, y2, y3, PARTS) * (1.0 / D))
                inverse = 1.0 / (norm + 1e-8)
                groups = smooth_groups(y0, inverse, p0, p1, p2, p3, p4, p5, p6, T, PART, LIMIT, KEY_BITS)
                g1 = smooth_groups(y1, inverse, p0, p1, p2, p3, p4, p5, p6, T, PART, LIMIT, KEY_BITS)
                if PARTS == 4:
                    g2 = smooth_groups(y2, inverse, p0, p1, p2, p3, p4, p5, p6, T, PART, LIMIT, KEY_BITS)
                    g3 = smooth_groups(y3, inverse, p0, p1, p2, p3, p4, p5, p6, T, PART, LIMIT, KEY_BITS)
                    groups = join_quarters(groups, g1, g2, g3, T, PART // 8)
                else:
                    groups = join_halves(groups, g1, T, PART // 8)
            else:
                x = to_float(k0, ELEMENT)
                norm = root(sum_of_squares(x, T, D), SOFT_ROOTS)
                inverse = reciprocal(norm + 1e-8, SOFT_ROOTS)
                unit = butterfly(x, T, D) * inverse[:, None]
                groups = group_codes(bucketise(unit * ROOT, midpoints, KEY_BITS), T, D, KEY_BITS)
            # Rows that are not valid were read as zeros, which all other codings keep.
            words = tl.where(valid[:, None], words_of_groups(groups, T, D // 8, KEY_BITS), 0)
            columns = word_columns(D // 8, KEY_BITS)
            half = norm.to(tl.float16).to(tl.int16, bitcast=True)
            tl.store(out.to(tl.pointer_type(tl.int16)) + (row_word * 2 + 2 * KEY_SCALAR_PLANE + r), half, mask=exists)
        store_words(out, words, exists, row_word, 0, columns, KEY_ROW, key_dense)

        # Tags. The condition always holds: it keeps the keys from being held in registers, or copied ahead, through the loop.
        if nb > 0:
            products = tag_products(words, plane_keys(keys, 0, KEY_TILE, KEY_ROW, KEY_BITS if KEY == CODEBOOK else 32, TB))
            value_products = tag_products(
                value_words, plane_keys(keys, VALUE_PLANE, VALUE_TILE, VALUE_ROW, VALUE_BITS if VALUE == AFFINE else 32, TB)
            )
            if KEY_TILE == VALUE_TILE:
                tag += sum_blocks(products + value_products, TB, KEY_TILE)
            else:
                tag += sum_blocks(products, TB, KEY_TILE) + sum_blocks(value_products, TB, VALUE_TILE)
            if VALUE == AFFINE:
                tag += sum_rows(tag_products(pair, tl.load(keys + 2 + VALUE_SCALAR_PLANE + r)), TB)
            if KEY == CODEBOOK:
                tag += sum_rows(norm_products(half, r, tl.load(keys + 2 + KEY_SCALAR_PLANE + r // 2)), TB)
        store_tags(payload, run + nb.to(tl.int64) * BLOCK_WORDS, exists_block, nb, tag, block, TB)


def pack_pages(
    pages: Pages,
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
    scales: torch.Tensor | None = None,
) -> None:
    """Queues one launch that packs `heads` kv heads of all layers of `pages`, all chunks of `span`, into `payload`.

    block_table: int32 on the device, page ids from token 0 on. runs: int64 [chunks, layers, 2], see plan.run_table. payload: uint8 on
    the device, beginning on a multiple of 16 bytes. keys, masks: see plan.device_keys and plan.device_words; masks are indexed by
    ordinal. first_head: head of the pages that is packed first. scales: fp32 [layers, 2], fp8 scales of K and V, None for 1.0.
    Writes every byte of every run and none outside. Raises PagesDoNotFit.
    """
    plan.check_launch(pages, span, block_table, first_head + heads, runs, payload)
    key, value = plan.side_kind(codec.key, pages.element), plan.side_kind(codec.value, pages.element)
    device = str(payload.device)
    rotates = key == CODEBOOK.value
    matrix_units = tuning.matrix and rotates and pages.element is not Element.FP32
    smooth, limit = plan.bucket_polynomial(pages.head_dim, codec.key.bits) if rotates else ((0.0,) * 7, 0.0)
    part = plan.pack_part(pages.head_dim, tuning.part)
    tiles = (span.most_blocks + tuning.blocks - 1) // tuning.blocks
    steps = tuning.steps_of(heads * pages.layers, tiles * span.chunks)
    pack_kernel[(tiles, heads * pages.layers // steps, span.chunks)](
        pages.anchor, pages.offsets, block_table, runs, payload, keys, masks,
        masks if scales is None else scales,
        plan.rotation_matrix(part, Element.FP32 if tuning.wide else pages.element, device, True) if matrix_units else masks,
        plan.midpoint_tensor(pages.head_dim, codec.key.bits, device) if rotates else masks,
        *smooth,
        pages.page_stride, pages.token_stride, pages.head_stride, first_head * pages.head_stride,
        span.first, span.end, span.chunk_tokens, span.first_chunk, heads, pages.layers,
        D=pages.head_dim, BLOCK_SIZE=pages.block_size, ELEMENT=int(pages.element), ALIGN=pages.align_elements,
        KEY=key, KEY_BITS=codec.key.bits, VALUE=value, VALUE_BITS=codec.value.bits,
        KEY_SCALED=scales is not None and codec.key.scaled, VALUE_SCALED=scales is not None and codec.value.scaled,
        LIMIT=limit, ROOT=plan.inverse_root(pages.head_dim),
        TB=tuning.blocks, PART=part, MATRIX_UNITS=matrix_units, WIDE=tuning.wide, FUSED=tuning.fused,
        SOFT_ROOTS=tuning.soft_roots, CANONICAL_NAN=tuning.canonical_nan, TIES_UP=tuning.ties_up,
        STEPS=steps, STAGES=tuning.stages, ONE_LAYER=heads % steps == 0, **tuning.options(),
    )  # fmt: skip
