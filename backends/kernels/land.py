"""payload -> pages: verification of tags, decoding, un-rotation and masked writes in one pass over the data.

One program takes `TB` neighbouring wire blocks of one (chunk, layer, kv head). Blocks are verified whole, whatever is written of them.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backends.kernels import plan
from backends.kernels.elements import E4M3, from_float
from backends.kernels.fp8 import decode_e4m3, encode_e4m3
from backends.kernels.places import chunk_range, page_rows, run_place
from backends.kernels.plan import Pages, Span, Tuning
from backends.kernels.rotation import butterfly, butterfly_parts, parts_squared, quotient, reciprocal, root, sum_of_squares
from backends.kernels.streams import bytes_of_words, codes_of_groups, filled_columns, groups_of_words, word_columns
from backends.kernels.tags import norm_products, range_tag, report_tags, sum_blocks, sum_rows, tag_products
from bridge.wire import Element, SlotCodec

RAW = tl.constexpr(1)
FP8 = tl.constexpr(2)
CODEBOOK = tl.constexpr(3)
AFFINE = tl.constexpr(4)


@triton.jit
def read_words(base, exists, row_word, index, DENSE: tl.constexpr):
    """A tile of a plane, int32 [16 * TB, W], or of its keys, int64. index: words from the block's beginning; see word_columns for DENSE."""
    there = exists[:, None]
    if not DENSE:
        there = there & filled_columns(index.shape[1])
    return tl.load(base + (row_word[:, None] + index), mask=there, other=0)


@triton.jit
def read_block(
    data, exists, row_word, key_index, value_index, r,
    KEY: tl.constexpr, KEY_DENSE: tl.constexpr, VALUE: tl.constexpr, VALUE_DENSE: tl.constexpr,
    KEY_SCALAR_PLANE: tl.constexpr, VALUE_SCALAR_PLANE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """All of a program's blocks: K codes as PARTS tiles, STEP words apart in a row (the unused repeat the first), V codes, scalars."""
    v = read_words(data, exists, row_word, value_index, VALUE_DENSE)
    k0 = read_words(data, exists, row_word, key_index, KEY_DENSE)
    k1, k2, k3 = k0, k0, k0
    if PARTS > 1:
        k1 = read_words(data, exists, row_word, key_index + STEP, KEY_DENSE)
    if PARTS > 2:
        k2 = read_words(data, exists, row_word, key_index + 2 * STEP, KEY_DENSE)
        k3 = read_words(data, exists, row_word, key_index + 3 * STEP, KEY_DENSE)
    pair = tl.zeros(row_word.shape, tl.int32)
    half = tl.zeros(row_word.shape, tl.int16)
    if VALUE == AFFINE:
        pair = tl.load(data + (row_word + VALUE_SCALAR_PLANE + r), mask=exists, other=0)
    if KEY == CODEBOOK:
        half = tl.load(data.to(tl.pointer_type(tl.int16)) + (row_word * 2 + 2 * KEY_SCALAR_PLANE + r), mask=exists, other=0)
    return k0, k1, k2, k3, v, pair, half


@triton.jit
def store_rows(
    x, base, row, write, column, scale, N: tl.constexpr, ELEMENT: tl.constexpr, SCALED: tl.constexpr, INTEGER_CAST: tl.constexpr,
    SOFT_ROOTS: tl.constexpr,
):  # fmt: skip
    """fp32 [T, N] -> elements of pages at element offsets `row` [T], from column `column` on."""
    if ELEMENT == E4M3:
        if SCALED:
            x = quotient(x, scale, SOFT_ROOTS)
        raw = encode_e4m3(x, False).to(tl.uint8)
    else:
        raw = from_float(x, ELEMENT, INTEGER_CAST)
    tl.store(base + (row[:, None] + (column + tl.arange(0, N))[None, :]), raw, mask=write[:, None])


@triton.jit
def store_raw(words, base, row, write, W: tl.constexpr, PER_WORD: tl.constexpr):
    """int32 words [T, W] -> the same bytes in pages whose elements are PER_WORD to a word."""
    if PER_WORD == 4:
        raw = tl.reshape((words[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]), [words.shape[0], 4 * W]).to(tl.uint8)
    elif PER_WORD == 2:
        raw = tl.reshape((words[:, :, None] >> (tl.arange(0, 2) * 16)[None, None, :]), [words.shape[0], 2 * W]).to(tl.int16)
    else:
        raw = words
    tl.store(base + (row[:, None] + tl.arange(0, PER_WORD * W)[None, :]), raw, mask=write[:, None])


@triton.jit
def entry_product(words, entries, matrix, T: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr):
    """int32 words of a part [T, N / 8] -> fp32 [T, N]: the code book's entries times the +-1 matrix on the matrix units.

    entries: each fp32 entry as the sum of two fp16 numbers, so products and the sum of both are exact to 2**-22.
    """
    groups = groups_of_words(words, T, N // 8, BITS)
    pair = tl.load(entries + codes_of_groups(groups, T, N // 8, BITS))
    high = pair.to(tl.int16).to(tl.float16, bitcast=True)
    low = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    if WIDE:
        return tl.dot(low.to(tl.float32), matrix) + tl.dot(high.to(tl.float32), matrix)
    else:
        return tl.dot(high, matrix, tl.dot(low, matrix))


@triton.jit
def land_kernel(
    anchor, offsets, block_table, runs, payload, keys, masks, scales, page_scales, matrix, entries, centroids, result,
    page_stride, token_stride, head_stride, origin, first_token, end_token, chunk_tokens, first_chunk, heads, write_first, write_end,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, ELEMENT: tl.constexpr, ALIGN: tl.constexpr, PER_WORD: tl.constexpr,
    KEY: tl.constexpr, KEY_BITS: tl.constexpr, VALUE: tl.constexpr, VALUE_BITS: tl.constexpr, COPY_FP8: tl.constexpr,
    SCALED: tl.constexpr, PAGES_SCALED: tl.constexpr, ROOT: tl.constexpr,
    TB: tl.constexpr, PART: tl.constexpr, MATRIX_UNITS: tl.constexpr, WIDE: tl.constexpr, INTEGER_CAST: tl.constexpr,
    SOFT_ROOTS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    block = tl.program_id(0) // heads * TB
    layer = tl.program_id(1)
    chunk = tl.program_id(2)

    T: tl.constexpr = 16 * TB
    KEY_ROW: tl.constexpr = D * KEY_BITS // 32
    VALUE_ROW: tl.constexpr = D * VALUE_BITS // 32
    KEY_SCALARS: tl.constexpr = 1 if KEY == CODEBOOK else 0
    VALUE_SCALARS: tl.constexpr = 2 if VALUE == AFFINE else 0
    VALUE_PLANE: tl.constexpr = 16 * KEY_ROW
    KEY_SCALAR_PLANE: tl.constexpr = VALUE_PLANE + 16 * VALUE_ROW
    VALUE_SCALAR_PLANE: tl.constexpr = KEY_SCALAR_PLANE + 8 * KEY_SCALARS
    BLOCK_WORDS: tl.constexpr = VALUE_SCALAR_PLANE + 8 * VALUE_SCALARS
    PARTS: tl.constexpr = D // PART if MATRIX_UNITS else 1
    PART_WORDS: tl.constexpr = PART * KEY_BITS // 32
    VALUE_TILE: tl.constexpr = D // 8 if VALUE == AFFINE else VALUE_ROW
    TILE: tl.constexpr = PART // 8 if MATRIX_UNITS else D // 8
    KEY_TILE: tl.constexpr = TILE if KEY == CODEBOOK else KEY_ROW
    value_dense: tl.constexpr = VALUE != AFFINE or VALUE_BITS == 4
    key_dense: tl.constexpr = KEY != CODEBOOK or KEY_BITS == 4

    lo, hi, block0, nb = chunk_range(chunk, first_token, end_token, chunk_tokens, first_chunk)
    if block >= nb:
        return
    t = tl.arange(0, T)
    r = t % 16
    token = (block0 + block) * 16 + t
    exists = t // 16 < nb - block if TB > 1 else tl.full([T], True, tl.int1)
    write = (token >= tl.maximum(lo, write_first)) & (token < tl.minimum(hi, write_end))
    place, row = page_rows(block_table, (block0 + block) * 16, write, page_stride, token_stride, TB, BLOCK_SIZE)
    row_word = t // 16 * BLOCK_WORDS
    bt = block + tl.arange(0, TB)
    exists_block = bt < nb
    starts = (block0 + bt) * 16
    ranges = range_tag(keys, tl.maximum(lo - starts, 0), tl.minimum(hi - starts, 16))
    key_index = (r * KEY_ROW)[:, None] + word_columns(KEY_TILE, KEY_BITS if KEY == CODEBOOK else 32)[None, :]
    value_index = (VALUE_PLANE + r * VALUE_ROW)[:, None] + word_columns(VALUE_TILE, VALUE_BITS if VALUE == AFFINE else 32)[None, :]

    if MATRIX_UNITS:
        hadamard = tl.load(matrix + tl.arange(0, PART)[:, None] * PART + tl.arange(0, PART)[None, :])
    head_place = place + h.to(tl.int64) * head_stride + origin
    # The divisions tell the compiler how rows are aligned.
    key_base = anchor + (tl.load(offsets + layer * 2) + head_place) // ALIGN * ALIGN
    value_base = anchor + (tl.load(offsets + layer * 2 + 1) + head_place) // ALIGN * ALIGN
    key_page_scale = 1.0
    value_page_scale = 1.0
    if PAGES_SCALED:
        key_page_scale = tl.load(page_scales + layer * 2)
        value_page_scale = tl.load(page_scales + layer * 2 + 1)

    # Everything that is read is asked for before anything is used.
    run, run_ordinal = run_place(runs, layer, tl.num_programs(1), chunk, h, nb, BLOCK_WORDS)
    data = payload.to(tl.pointer_type(tl.int32)) + (run + block.to(tl.int64) * BLOCK_WORDS)
    k0, k1, k2, k3, v, pair, half = read_block(
        data, exists, row_word, key_index, value_index, r,
        KEY, key_dense, VALUE, value_dense, KEY_SCALAR_PLANE, VALUE_SCALAR_PLANE, PART_WORDS, PARTS,
    )  # fmt: skip
    tag_word = run + nb.to(tl.int64) * BLOCK_WORDS
    ordinals = run_ordinal + bt
    tag = tl.load(masks + ordinals, mask=exists_block, other=0) + ranges
    stored = tl.load(payload.to(tl.pointer_type(tl.int64)) + (tag_word // 2 + bt), mask=exists_block, other=0)

    # Tags. Keys lie as the first block's words do.
    products = tag_products(k0, read_words(keys + 2, exists | True, r * 0, key_index, key_dense))
    if PARTS > 1:
        products += tag_products(k1, read_words(keys + 2, exists | True, r * 0, key_index + PART_WORDS, key_dense))
    if PARTS > 2:
        products += tag_products(k2, read_words(keys + 2, exists | True, r * 0, key_index + 2 * PART_WORDS, key_dense))
        products += tag_products(k3, read_words(keys + 2, exists | True, r * 0, key_index + 3 * PART_WORDS, key_dense))
    value_products = tag_products(v, read_words(keys + 2, exists | True, r * 0, value_index, value_dense))
    if KEY_TILE == VALUE_TILE:
        tag += sum_blocks(products + value_products, TB, KEY_TILE)
    else:
        tag += sum_blocks(products, TB, KEY_TILE) + sum_blocks(value_products, TB, VALUE_TILE)
    if VALUE == AFFINE or KEY == CODEBOOK:
        rows = tl.zeros([T], tl.int64)
        if VALUE == AFFINE:
            rows += tag_products(pair, tl.load(keys + 2 + VALUE_SCALAR_PLANE + r))
        if KEY == CODEBOOK:
            rows += norm_products(half, r, tl.load(keys + 2 + KEY_SCALAR_PLANE + r // 2))
        tag += sum_rows(rows, TB)
    report_tags(payload, tag_word, stored, exists_block, nb, tag, ordinals, result, block, TB)

    # Values.
    if VALUE == RAW or (VALUE == FP8 and COPY_FP8):
        store_raw(v, value_base, row, write, VALUE_ROW, PER_WORD)
    elif VALUE == FP8:
        x = decode_e4m3(bytes_of_words(v, T, VALUE_ROW))
        if SCALED:
            x = x * tl.load(scales + layer * 2 + 1)
        store_rows(x, value_base, row, write, 0, value_page_scale, D, ELEMENT, PAGES_SCALED, INTEGER_CAST, SOFT_ROOTS)
    else:
        scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        zero = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        codes = codes_of_groups(groups_of_words(v, T, D // 8, VALUE_BITS), T, D // 8, VALUE_BITS)
        # The product of a code and an fp16 number is exact in fp32, so a fused multiply-add rounds as the reference does.
        x = codes.to(tl.float32) * scale[:, None] + zero[:, None]
        store_rows(x, value_base, row, write, 0, value_page_scale, D, ELEMENT, PAGES_SCALED, INTEGER_CAST, SOFT_ROOTS)

    # Keys.
    if KEY == RAW or (KEY == FP8 and COPY_FP8):
        store_raw(k0, key_base, row, write, KEY_ROW, PER_WORD)
    elif KEY == FP8:
        x = decode_e4m3(bytes_of_words(k0, T, KEY_ROW))
        if SCALED:
            x = x * tl.load(scales + layer * 2)
        store_rows(x, key_base, row, write, 0, key_page_scale, D, ELEMENT, PAGES_SCALED, INTEGER_CAST, SOFT_ROOTS)
    else:
        norm = half.to(tl.float16, bitcast=True).to(tl.float32)
        if MATRIX_UNITS:
            y0 = entry_product(k0, entries, hadamard, T, PART, KEY_BITS, WIDE)
            y1 = entry_product(k1, entries, hadamard, T, PART, KEY_BITS, WIDE)
            y2, y3 = y0, y1
            if PARTS == 4:
                y2 = entry_product(k2, entries, hadamard, T, PART, KEY_BITS, WIDE)
                y3 = entry_product(k3, entries, hadamard, T, PART, KEY_BITS, WIDE)
            y0, y1, y2, y3 = butterfly_parts(y0, y1, y2, y3, PARTS)
            # The entries' own norm follows from that of the product, since the matrix is orthogonal.
            factor = (norm / tl.sqrt_rn(parts_squared(y0, y1, y2, y3, PARTS) + 1e-20))[:, None]
            store_rows(y0 * factor, key_base, row, write, 0, key_page_scale, PART, ELEMENT, PAGES_SCALED, INTEGER_CAST, SOFT_ROOTS)
            store_rows(y1 * factor, key_base, row, write, PART, key_page_scale, PART, ELEMENT, PAGES_SCALED, INTEGER_CAST, SOFT_ROOTS)
            if PARTS == 4:
                store_rows(
                    y2 * factor, key_base, row, write, 2 * PART, key_page_scale, PART, ELEMENT, PAGES_SCALED, INTEGER_CAST, SOFT_ROOTS
                )
                store_rows(
                    y3 * factor, key_base, row, write, 3 * PART, key_page_scale, PART, ELEMENT, PAGES_SCALED, INTEGER_CAST, SOFT_ROOTS
                )
        else:
            c = tl.load(centroids + codes_of_groups(groups_of_words(k0, T, D // 8, KEY_BITS), T, D // 8, KEY_BITS))
            total = sum_of_squares(c, T, D) + 1e-16
            factor = norm * reciprocal(root(total, SOFT_ROOTS), SOFT_ROOTS) * ROOT
            x = butterfly(c, T, D) * factor[:, None]
            store_rows(x, key_base, row, write, 0, key_page_scale, D, ELEMENT, PAGES_SCALED, INTEGER_CAST, SOFT_ROOTS)


def land_pages(
    pages: Pages,
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
    scales: torch.Tensor | None = None,
    page_scales: torch.Tensor | None = None,
) -> None:
    """Queues one launch that verifies all blocks of `span` in `payload` and writes tokens [write_first, write_end) of it into `pages`.

    Arguments as for pack.pack_pages. result: int64 [3] on the device as made by plan.new_result; the kernel adds the number of blocks
    whose tags are wrong, lowers the least ordinal of such a block, and adds the number of runs whose tag plane's padding is not zero.
    Pages hold the payload's bytes whether or not the tags are right: a caller commits them after it has read the result.
    page_scales: fp32 [layers, 2], scales of fp8 pages. Raises PagesDoNotFit.
    """
    plan.check_launch(pages, span, block_table, first_head + heads, runs, payload)
    element = codec.key.element if pages.element is Element.E4M3FN else pages.element
    key, value = plan.side_kind(codec.key, element), plan.side_kind(codec.value, element)
    if pages.element is Element.E4M3FN and RAW.value in (key, value):
        raise plan.PagesDoNotFit("raw elements into fp8 pages: pack with codec fp8_e4m3 instead")
    device = str(payload.device)
    rotates = key == CODEBOOK.value
    matrix_units = tuning.matrix and rotates and pages.element is not Element.FP32
    part = plan.land_part(pages.head_dim)
    tiles = (span.most_blocks + tuning.blocks - 1) // tuning.blocks
    land_kernel[(heads * tiles, pages.layers, span.chunks)](
        pages.anchor, pages.offsets, block_table, runs, payload, keys, masks,
        masks if scales is None else scales, masks if page_scales is None else page_scales,
        plan.rotation_matrix(part, Element.FP32 if tuning.wide else Element.FP16, device, False) if matrix_units else masks,
        plan.split_centroids(pages.head_dim, codec.key.bits, device) if matrix_units else masks,
        plan.centroid_tensor(pages.head_dim, codec.key.bits, device) if rotates else masks,
        result,
        pages.page_stride, pages.token_stride, pages.head_stride, first_head * pages.head_stride,
        span.first, span.end, span.chunk_tokens, span.first_chunk, heads, write_first, span.end if write_end is None else write_end,
        D=pages.head_dim, BLOCK_SIZE=pages.block_size, ELEMENT=int(pages.element), ALIGN=pages.align_elements,
        PER_WORD=4 // pages.anchor.element_size(),
        KEY=key, KEY_BITS=codec.key.bits, VALUE=value, VALUE_BITS=codec.value.bits,
        COPY_FP8=pages.element is Element.E4M3FN and scales is None and page_scales is None,
        SCALED=scales is not None, PAGES_SCALED=page_scales is not None, ROOT=plan.inverse_root(pages.head_dim),
        TB=tuning.blocks, PART=part, MATRIX_UNITS=matrix_units, WIDE=tuning.wide, INTEGER_CAST=tuning.integer_cast,
        SOFT_ROOTS=tuning.soft_roots, **tuning.options(),
    )  # fmt: skip
