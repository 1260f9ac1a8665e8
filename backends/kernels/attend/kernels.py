"""Decode attention over packed pages in Triton: one launch over the pages, one that merges its partial results. No vendor's code.

All work is done on 32-bit words that hold several codes, and a value becomes fp16 only where the matrix unit takes it:

- Values stay codes. A code in the low bits of a half word *is* the fp16 subnormal code * 2^-24, exact in a matrix product; two tokens'
  words are interleaved first, so that one mask gives the pair that a register of the operand wants.
- 4-bit and 3-bit keys become centroids by an odd polynomial of (2 code - levels + 1) / levels in fp16, on pairs of one word.
- fp8 keys become fp16 by moving their bits: the value is 2^-8 of the key's, subnormals included.
- The order of dimensions inside a product is free: queries are put in the order in which the words give keys, and the output comes in
  the order of the values' words (`value_dims`), which the merge undoes.

Tiles of all sequences are laid end to end and every program takes an equal share, whatever the lengths; they are read on the device.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from backends.kernels.elements import from_float, to_float
from backends.kernels.rotation import butterfly

HEADROOM = tl.constexpr(10.0)
"""Probabilities times their value's scale are at most 2**HEADROOM before they are rounded to fp16."""
LOWEST = tl.constexpr(-1e30)
"""A maximum of nothing: finite, so that differences are never NaN."""


@triton.jit
def tiles_of(lengths, window, TOKENS: tl.constexpr):
    """(first tile that is seen, one past the last) of sequences of these lengths."""
    first = tl.where(window > 0, tl.maximum(lengths - window, 0) // TOKENS, 0)
    return first, (lengths + TOKENS - 1) // TOKENS


@triton.jit
def shares(lengths, batch, window, programs, least, TOKENS: tl.constexpr, BATCH: tl.constexpr):
    """(tiles of each sequence [BATCH], the tiles of one program)."""
    i = tl.arange(0, BATCH)
    first, last = tiles_of(tl.load(lengths + i, mask=i < batch, other=0), window, TOKENS)
    tiles = last - first
    return tiles, tl.maximum(tl.maximum((tl.sum(tiles, 0) + programs - 1) // programs, least), 1)


@triton.jit
def halves(pairs):
    """int32 of two half words -> fp16 [..., 2], bit for bit."""
    low = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = ((pairs >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def load_units(words, at, U: tl.constexpr, STEP: tl.constexpr, PLANES: tl.constexpr):
    """int32 [..., U]: STEP bytes each, in the low bits; above them is anything. words: int32 pointers.

    at: where a token's units begin, in words for planes, in bytes for slots.
    """
    if PLANES and STEP == 4:
        return tl.load(words + (at + tl.arange(0, U)[None, None, :]))
    else:
        byte = (at * 4 if PLANES else at) + (tl.arange(0, U) * STEP)[None, None, :]
        shift = (byte & 3) * 8
        low = tl.load(words + (byte >> 2))
        # The next word only where it is needed: else it may lie behind the last page.
        high = tl.load(words + ((byte >> 2) + (shift + 8 * STEP > 32).to(tl.int32)))
        low = (low.to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)).to(tl.int32, bitcast=True)
        return low | (high << ((32 - shift) & 31))


@triton.jit
def key_pairs(x, nothing, J: tl.constexpr, BITS: tl.constexpr, K0, K1, K2, K3, K4):
    """Units [N, U] -> fp16 [N, 2 U]: of each unit, codes J and J + codes / 2. Centroids in units of sigma; fp8 as 2^-8 of the key.

    nothing: as for `value_codes`.
    """
    if BITS == 8:
        key = halves(
            (((x & 0x007F007F) << 7) | ((x & 0x00800080) << 8) | nothing)
            if J == 0
            else (((x & 0x7F007F00) >> 1) | (x & -0x7FFF8000)) | nothing
        )
    else:
        # 64 + code / 8 or 128 + code / 4 as fp16; a sum with `nothing`, so that one instruction masks and adds it. c is exact.
        if BITS == 4:
            x = x << 1 if J == 0 else x >> (4 * J - 1)
            c = halves((x & 0x001E001E) | (nothing + 0x54005400)) - 64.9375
        else:
            x = (x & 0xFFF) | ((x & 0xFFF000) << 4)
            x = x << 1 if J == 0 else x >> (3 * J - 1)
            c = halves((x & 0x000E000E) | (nothing + 0x58005800)) - 128.875
        s = c * c
        key = c * (((((s * K4 + K3) if BITS == 4 else K3) * s + K2) * s + K1) * s + K0)
    return tl.reshape(key, [x.shape[0], 2 * x.shape[1]])


@triton.jit
def value_codes(x0, x1, nothing, N: tl.constexpr, U: tl.constexpr, BITS: tl.constexpr):
    """Units of even and odd tokens, [N / 2, U] each -> fp16 [8 U, N]: code * code_unit * 2^-24, dimensions in the order of `value_dims`.

    Only elementwise operations, views and constants: Triton then asks for the words in the layout of the matrix operand, and nothing
    wider than them goes through shared memory. nothing: zeros [N / 2, U] of which the compiler does not know that they are; else it
    would see which half of a pair comes from where, and take the pairs apart.
    """
    y = (x0 & 0xFFFF) | (x1 << 16)
    if BITS == 4:
        z = ((x0 >> 16) & 0xFFFF) | (x1 & -65536)
        low = tl.join(tl.join(y & 0xF000F, y & 0xF000F0), tl.join((y >> 8) & 0xF000F, (y >> 8) & 0xF000F0))
        high = tl.join(tl.join(z & 0xF000F, z & 0xF000F0), tl.join((z >> 8) & 0xF000F, (z >> 8) & 0xF000F0))
    else:
        z = ((x0 >> 15) & 0x1FF) | ((x1 >> 15) << 16)
        low = tl.join(tl.join(y & 0x70007, y & 0x380038), tl.join(y & 0x1C001C0, (y >> 9) & 0x70007))
        high = tl.join(tl.join((y >> 9) & 0x380038, z & 0x70007), tl.join(z & 0x380038, z & 0x1C001C0))
    codes = halves(tl.join(low, high) | nothing[:, :, None, None, None])
    return tl.reshape(tl.permute(codes, [4, 3, 2, 1, 0, 5]), [8 * U, N])


@triton.jit
def code_unit(D: tl.constexpr, BITS: tl.constexpr):
    """fp32 [D]: what the codes of each row of `value_codes` are multiplied with, because of where they stand in a word."""
    j = tl.arange(0, D) // (D // 8)
    if BITS == 4:
        return tl.where(j % 2 == 0, 1.0, 16.0)
    else:
        j -= tl.where(j >= 5, 5, tl.where(j >= 3, 3, 0))
        return tl.where(j == 0, 1.0, tl.where(j == 1, 8.0, 64.0))


@triton.jit
def value_dims(D: tl.constexpr):
    """int32 [D]: the dimension that stands at each place of `value_codes`."""
    i = tl.arange(0, D)
    return i % (D // 8) * 8 + i // (D // 8)


@triton.jit
def load_queries(queries, at, stride, group, D: tl.constexpr, ELEMENT: tl.constexpr, KEY_BITS: tl.constexpr, ROWS: tl.constexpr):
    """(four fp16 [D / 4, ROWS] in the order of `key_pairs`, for fp8 keys two of [D / 2, ROWS] twice; fp32 [ROWS], what their products are
    to be multiplied with). Columns past the group are 0."""
    row = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    x = to_float(tl.load(queries + (at + row[:, None] * stride + d[None, :]), mask=(row < group)[:, None], other=0), ELEMENT)
    if KEY_BITS != 8:
        x = butterfly(x, ROWS, D)
    top = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    x = (x * (256.0 / top)[:, None]).to(tl.float16)
    if KEY_BITS == 8:
        a, b = tl.split(tl.reshape(x, [ROWS, D // 2, 2]))
        a = tl.trans(a)
        b = tl.trans(b)
        return a, b, a, b, top / 256.0
    else:
        a, b = tl.split(tl.reshape(x, [ROWS, D // 4, 2, 2]))
        q0, q2 = tl.split(a)
        q1, q3 = tl.split(b)
        return tl.trans(q0), tl.trans(q1), tl.trans(q2), tl.trans(q3), top / 256.0


@triton.jit
def shallow_scores(
    queries, query, stride, group, top, words, key_at,
    D: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """fp32 [TOKENS, ROWS] of fp8 keys, as raw as with `load_queries` and `key_pairs`, in products of DEPTH dimensions each.

    For compilers that have no matrix unit and keep a row and a column of a product in every thread. Queries are read again for each
    product, since they would not stay in registers either.
    """
    rows = tl.arange(0, ROWS)[None, :]
    s = tl.zeros([TOKENS, ROWS], tl.float32)
    for unit in tl.static_range(0, D // 4, DEPTH):
        x = load_units(words[:, :, None], key_at[:, :, None] + (unit if PLANES else 4 * unit), DEPTH, 4, PLANES)
        x = tl.reshape(x, [TOKENS, DEPTH])
        for code in tl.static_range(4):
            d = ((unit + tl.arange(0, DEPTH)) * 4 + code)[:, None]
            q = to_float(tl.load(queries + (query + rows * stride + d), mask=rows < group, other=0), ELEMENT)
            byte = x >> (8 * code)
            key = (((byte & 0x7F) << 7) | ((byte & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True)
            s = tl.dot(key, (q * (1.0 / top)[None, :]).to(tl.float16), s)
    return s


@triton.jit
def pages_kernel(
    queries, data, table, lengths, part, ml,
    query_b, query_h, page_stride, head_stride, table_b, batch, heads, group, window, programs, least, scale, softcap,
    D: tl.constexpr, ELEMENT: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, PLANES: tl.constexpr, FOLDED: tl.constexpr,
    SOFTCAP: tl.constexpr, PAGE_BLOCKS: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, K3: tl.constexpr, K4: tl.constexpr, KEY_DEPTH: tl.constexpr,
):  # fmt: skip
    """scale: of raw products of `load_queries` and `key_pairs` with the key's scalar, in units of log2. KEY_DEPTH: of fp8 keys alone, 0:
    half of D."""
    BLOCKS: tl.constexpr = TOKENS // 16
    KEY: tl.constexpr = D * KEY_BITS // 8
    VALUE: tl.constexpr = D * VALUE_BITS // 8
    NORM: tl.constexpr = 0 if KEY_BITS == 8 else 2
    SLOT: tl.constexpr = KEY + NORM + VALUE + 4
    KEY_CODES: tl.constexpr = 4 if KEY_BITS == 8 else 8
    KEY_UNITS: tl.constexpr = D // KEY_CODES
    UNITS: tl.constexpr = D // 8
    KEY_STEP: tl.constexpr = 3 if KEY_BITS == 3 else 4
    VALUE_STEP: tl.constexpr = 3 if VALUE_BITS == 3 else 4
    MIDDLE: tl.constexpr = ((1 << VALUE_BITS) - 1) / 2.0
    CODE: tl.constexpr = 1.0 / (1 << 24)

    head = tl.program_id(0) % heads
    program = tl.program_id(0) // heads
    tiles, share = shares(lengths, batch, window, programs, least, TOKENS, BATCH)
    ends = tl.cumsum(tiles, 0)
    at = program * share
    total = tl.sum(tiles, 0)
    end = tl.minimum(at + share, total)
    behind = ends <= at
    b = tl.sum(behind.to(tl.int32), 0)
    start = tl.sum(tl.where(behind, tiles, 0), 0)

    block = tl.arange(0, BLOCKS)
    r16 = tl.arange(0, 16)
    even = tl.arange(0, 8) * 2
    words = data.to(tl.pointer_type(tl.int32))
    half_words = data.to(tl.pointer_type(tl.float16))
    unit = code_unit(D, VALUE_BITS)

    while at < end:
        n = tl.load(lengths + b)
        floor = tl.where(window > 0, tl.maximum(n - window, 0), 0)
        first, last = tiles_of(n, window, TOKENS)
        tile0 = first + at - start
        tile1 = tl.minimum(last, first + end - start)
        query = b.to(tl.int64) * query_b + (head * group).to(tl.int64) * query_h
        q0, q1, q2, q3, top = load_queries(queries, query, query_h, group, D, ELEMENT, KEY_BITS, ROWS)
        gain = top * scale
        ones = tl.full([2 * KEY_UNITS, ROWS], 1.0, tl.float16)
        m = tl.full([ROWS], LOWEST, tl.float32)
        weights = tl.zeros([ROWS], tl.float32)
        z = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([D, ROWS], tl.float32)
        for tile in tl.range(tile0, tile1):
            index = tile * BLOCKS + block
            page = tl.load(table + (b * table_b + index // PAGE_BLOCKS), mask=index * 16 < n, other=0)
            # No page has a negative number.
            nothing = (page >> 31)[:, None, None]
            key_nothing = tl.reshape(tl.broadcast_to(nothing, [BLOCKS, 16, KEY_UNITS]), [TOKENS, KEY_UNITS])
            nothing = tl.reshape(tl.broadcast_to(nothing, [BLOCKS, 8, UNITS]), [TOKENS // 2, UNITS])
            page = page.to(tl.int64)
            within = index % PAGE_BLOCKS
            base = page * page_stride
            if PLANES:
                base += head * head_stride + within * (16 * SLOT)
            words_at = words + (base // 4)[:, None]
            halves_at = half_words + (base // 2)[:, None]
            if PLANES:
                key_at = (r16 * (KEY // 4))[None, :]
                value_at = (even * (VALUE // 4) + 4 * KEY)[None, :]
                odd_at = (even * (VALUE // 4) + (4 * KEY + VALUE // 4))[None, :]
                norm_at = (r16 + 8 * (KEY + VALUE))[None, :]
            else:
                token_at = ((within * (16 * heads) + head) * SLOT)[:, None]
                key_at = token_at + (r16 * (heads * SLOT))[None, :]
                value_at = token_at + (even * (heads * SLOT) + (KEY + NORM))[None, :]
                odd_at = value_at + heads * SLOT
                norm_at = (key_at + KEY) // 2
            if KEY_DEPTH == 0:
                x = load_units(words_at[:, :, None], key_at[:, :, None], KEY_UNITS, KEY_STEP, PLANES)
            v0 = load_units(words_at[:, :, None], value_at[:, :, None], UNITS, VALUE_STEP, PLANES)
            v1 = load_units(words_at[:, :, None], odd_at[:, :, None], UNITS, VALUE_STEP, PLANES)
            if PLANES:
                pair = tl.reshape(tl.load(words_at + (r16 + 4 * (KEY + VALUE + NORM))[None, :]), [TOKENS])
                vs = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                vz = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            else:
                pair_at = halves_at + (key_at + (KEY + NORM + VALUE)) // 2
                vs = tl.reshape(tl.load(pair_at), [TOKENS]).to(tl.float32)
                vz = tl.reshape(tl.load(pair_at + 1), [TOKENS]).to(tl.float32)

            if KEY_DEPTH:
                s = shallow_scores(queries, query, query_h, group, top, words_at, key_at, D, ELEMENT, PLANES, TOKENS, ROWS, KEY_DEPTH)
            else:
                x = tl.reshape(x, [TOKENS, KEY_UNITS])
                k0 = key_pairs(x, key_nothing, 0, KEY_BITS, K0, K1, K2, K3, K4)
                k1 = key_pairs(x, key_nothing, 1, KEY_BITS, K0, K1, K2, K3, K4)
                s = tl.dot(k0, q0)
                s = tl.dot(k1, q1, s)
            if KEY_BITS != 8:
                k2 = key_pairs(x, key_nothing, 2, KEY_BITS, K0, K1, K2, K3, K4)
                k3 = key_pairs(x, key_nothing, 3, KEY_BITS, K0, K1, K2, K3, K4)
                s = tl.dot(k2, q2, s)
                s = tl.dot(k3, q3, s)
                norm = tl.reshape(tl.load(halves_at + norm_at), [TOKENS]).to(tl.float32)
                if FOLDED:
                    s = s * norm[:, None]
                else:
                    squares = k0 * k0 + k1 * k1 + k2 * k2 + k3 * k3
                    s = s * tl.rsqrt(tl.dot(squares, ones)) * norm[:, None]
            s = s * gain[None, :]
            if SOFTCAP:
                # tanh(x) = 1 - 2 / (exp(2 x) + 1); softcap is in units of log2, as s is
                s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.8853900817779268 / softcap)) + 1.0))

            token = tile * TOKENS + tl.arange(0, TOKENS)
            seen = (token < n) & (token >= floor)
            # What lies in rows that no token owns may be anything, NaN too.
            s = tl.where(seen[:, None], s, -float("inf"))
            vs = tl.where(seen, vs, 0.0)
            vz = tl.where(seen, vz, 0.0) + MIDDLE * vs
            # At least log2 of the value's scale, at most 1 more: its exponent; 2^-24 for 0.
            reach = ((tl.maximum(vs, 5.9604645e-8).to(tl.int32, bitcast=True) >> 23) - 126).to(tl.float32)
            high = s + reach[:, None]
            m_new = tl.maximum(m, tl.max(high, 0) - HEADROOM)
            down = tl.exp2(m - m_new)
            m = m_new
            e = tl.exp2(s - m[None, :])
            w = (e * vs[:, None]).to(tl.float16)
            weights = weights * down + tl.sum(e, 0)
            z = z * down + tl.sum(e * vz[:, None], 0)
            # Codes about their middle: else long sums lose digits.
            mean = tl.sum(w.to(tl.float32), 0) * (MIDDLE * CODE)
            codes = value_codes(
                tl.reshape(v0, [TOKENS // 2, UNITS]), tl.reshape(v1, [TOKENS // 2, UNITS]), nothing, TOKENS, UNITS, VALUE_BITS
            )
            acc = tl.dot(codes, w, acc * down[None, :] - unit[:, None] * mean[None, :])

        place = ((program + b).to(tl.int64) * heads + head) * group + tl.arange(0, ROWS)
        there = tl.arange(0, ROWS) < group
        made = acc * (1.0 / CODE / unit)[:, None] + z[None, :]
        tl.store(part + (place[None, :] * D + tl.arange(0, D)[:, None]), made, mask=there[None, :])
        tl.store(ml + place * 2, m, mask=there)
        tl.store(ml + (place * 2 + 1), weights, mask=there)
        at = tl.minimum(start + last - first, end)
        start += last - first
        b += 1


@triton.jit
def merge_kernel(
    part, ml, lengths, sinks, out, lse,
    out_b, out_h, batch, heads, group, window, programs, least,
    D: tl.constexpr, ELEMENT: tl.constexpr, INTEGER_CAST: tl.constexpr, SINKS: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr,
    TAKEN: tl.constexpr,
):  # fmt: skip
    """One program a sequence and query head. TAKEN: partial results of one step."""
    query_head = tl.program_id(0) % (heads * group)
    b = tl.program_id(0) // (heads * group)
    tiles, share = shares(lengths, batch, window, programs, least, TOKENS, BATCH)
    i = tl.arange(0, BATCH)
    start = tl.sum(tl.where(i < b, tiles, 0), 0)
    mine = tl.sum(tl.where(i == b, tiles, 0), 0)
    first = start // share
    count = tl.where(mine > 0, (start + mine - 1) // share - first + 1, 0)

    d = tl.arange(0, D)
    m = tl.full([], LOWEST, tl.float32)
    weights = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([D], tl.float32)
    for step in range(0, count, TAKEN):
        c = step + tl.arange(0, TAKEN)
        place = (first + b + c).to(tl.int64) * (heads * group) + query_head
        m_c = tl.load(ml + place * 2, mask=c < count, other=LOWEST)
        l_c = tl.load(ml + (place * 2 + 1), mask=c < count, other=0.0)
        rows = tl.load(part + (place[:, None] * D + d[None, :]), mask=(c < count)[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(m_c, 0))
        down = tl.exp2(m - m_new)
        weight = tl.exp2(m_c - m_new)
        acc = acc * down + tl.sum(rows * weight[:, None], 0)
        weights = weights * down + tl.sum(l_c * weight, 0)
        m = m_new
    if SINKS:
        sink = tl.load(sinks + query_head) * 1.4426950408889634
        m_new = tl.maximum(m, sink)
        down = tl.exp2(m - m_new)
        acc = acc * down
        weights = weights * down + tl.exp2(sink - m_new)
        m = m_new
    made = acc / tl.where(weights > 0.0, weights, 1.0)
    at = b.to(tl.int64) * out_b + query_head.to(tl.int64) * out_h + value_dims(D)
    tl.store(out + at, from_float(made, ELEMENT, INTEGER_CAST))
    tl.store(lse + (b * (heads * group) + query_head), tl.where(weights > 0.0, (m + tl.log2(weights)) * 0.6931471805599453, -float("inf")))
