# mypy: allow-untyped-defs, allow-untyped-calls
"""The compiled kernels of the CPU device: whole shares, one wire block at a time, by Numba.

A block goes through small row-major buffers [16, head_dim], so that the inner loops run over contiguous elements and LLVM vectorises
them. No fast-math and no fused multiply-add: operations, their order and their roundings are those of bridge/codecs/reference.py.
Nothing here checks a bound; compiled.py does, once a share.

All of it is one file because Numba's cache on disk looks at the file of the function that is called, and at no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic as _numba_intrinsic

from bridge.wire import BLOCK_TOKENS, CodingKind, Element

intrinsic: Any = _numba_intrinsic
"""Numba's annotations describe the builder, not the intrinsic that it makes."""


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled on first use, run without the GIL, kept on disk where there is a folder for it that can be written."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba found no such folder
        return njit(nogil=True, error_model="numpy")(function)


# Numba widens integers that are narrower than a pointer; casting each step back keeps vectors full.
U8, U16, U32, U64, I32, F32 = np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.float32

_T = BLOCK_TOKENS
_RAW, _FP8, _INT8, _CODEBOOK = (int(kind) for kind in (CodingKind.RAW, CodingKind.FP8, CodingKind.INT8, CodingKind.CODEBOOK))
_BF16, _FP16 = int(Element.BF16), int(Element.FP16)
_NORM_EPSILON, _SCALE_FLOOR, _CENTROID_EPSILON = F32(1e-8), F32(1e-8), F32(1e-16)
_ZERO, _HALF, _ONE, _NAN = F32(0), F32(0.5), F32(1), F32(np.nan)


SIDE = np.dtype(
    [
        ("pages", "i8"),
        ("width", "i8"),
        ("page_step", "i8"),
        ("token_step", "i8"),
        ("head_step", "i8"),
        ("element_step", "i8"),
        ("source", "i8"),
        ("kind", "i8"),
        ("bits", "i8"),
        ("element", "i8"),
        ("table", "i8"),
        ("codes", "i8"),
        ("scalars", "i8"),
        ("row", "i8"),
        ("scalar_row", "i8"),
        ("root", "f4"),
        ("scale", "f4"),
    ]
)
"""K or V as the kernels see it. Memory is given by its address.

pages: the pages, elements of type `source` and `width` bytes. The vector of a token begins at page * page_step + position *
token_step + head * head_step, its elements lie element_step apart (all in bytes).
kind, bits, element, scale: the coding. root: 1 / sqrt(D). table: f32 [16], midpoints of the code book to pack, its entries to land.
codes, scalars: where the planes begin in a block. row, scalar_row: bytes of one row of theirs.
"""

WIRE = np.dtype([(name, "i8") for name in ("data", "heads", "blocks", "block_bytes", "run_bytes", "head_dim", "x", "codes", "s", "row")])
"""A share's bytes and where its blocks lie in them; then the buffers of a block: x f32 [16 * D], codes u8 [16 * D], s f32 [D], row u32 [D]
(one vector's elements)."""


# Memory. Plain pointers, so that neither reference counts nor wrap-around of indices stand in the inner loops. ------------------------


def _pointer_to(item: types.Type) -> Any:
    @intrinsic
    def pointer(context, address):
        def build(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(item)(types.intp), build

    return pointer


_u8, _i8, _u16 = _pointer_to(types.uint8), _pointer_to(types.int8), _pointer_to(types.uint16)
_u32, _u64, _f32 = _pointer_to(types.uint32), _pointer_to(types.uint64), _pointer_to(types.float32)


@intrinsic
def _stages_1_2_4(context, address):
    """Three stages of the butterfly on eight fp32 in one register: LLVM does not find these shuffles by itself."""

    def build(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], ir.VectorType(ir.FloatType(), 8).as_pointer())
        value = builder.load(place, align=4)
        for stage in (1, 2, 4):
            partner = ir.Constant(ir.VectorType(ir.IntType(32), 8), [lane ^ stage for lane in range(8)])
            lower = ir.Constant(ir.VectorType(ir.IntType(1), 8), [int(lane & stage == 0) for lane in range(8)])
            other = builder.shuffle_vector(value, value, partner)
            value = builder.select(lower, builder.fadd(value, other), builder.fsub(other, value))
        builder.store(value, place, align=4)
        return context.get_dummy_value()

    return types.void(types.intp), build


@intrinsic
def _prefetch(context, address):
    """Asks for the cache line at an address."""

    def build(context, builder, signature, arguments):
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [byte, word, word, word]), "llvm.prefetch.p0")
        to_read, keep, data = ir.Constant(word, 0), ir.Constant(word, 3), ir.Constant(word, 1)
        builder.call(function, [builder.inttoptr(arguments[0], byte), to_read, keep, data])
        return context.get_dummy_value()

    return types.void(types.intp), build


@_jit
def _copy(source, target, nbytes):
    """Multiples of two bytes."""
    p, q = _u16(source), _u16(target)
    for i in range(nbytes // 2):
        q[i] = p[i]


@_jit
def _fill_zero(target, nbytes):
    p = _u8(target)
    for i in range(nbytes):
        p[i] = U8(0)


# Element types. ---------------------------------------------------------------------------------------------------------------------


@_jit
def _bits(x):
    return F32(x).view(U32)


@_jit
def _float(word):
    return U32(word).view(F32)


@_jit
def _from_bf16(word):
    return _float(U32(word) << U32(16))


@_jit
def _from_fp16(word):
    magnitude = U32(word) & U32(0x7FFF)
    normal = U32(U32(magnitude << U32(13)) + U32(0x38000000))
    special = U32(normal + U32(0x38000000))
    subnormal = _bits(_float(U32(normal + U32(0x00800000))) - _float(U32(0x38800000)))
    result = special if magnitude >= U32(0x7C00) else normal
    result = subnormal if magnitude < U32(0x0400) else result
    return _float(U32(U32(result) | U32(U32(U32(word) & U32(0x8000)) << U32(16))))


@_jit
def _to_bf16(x):
    word = _bits(x)
    rounded = U32(U32(word + U32(0x7FFF)) + U32(U32(word >> U32(16)) & U32(1)))
    quiet_nan = U32(word | U32(0x00400000))
    result = quiet_nan if U32(word & U32(0x7FFFFFFF)) > U32(0x7F800000) else rounded
    return U16(U32(result) >> U32(16))


@_jit
def _to_fp16(x):
    """As NumPy casts: nearest even, the upper bits of a NaN kept."""
    word = _bits(x)
    magnitude = U32(word & U32(0x7FFFFFFF))
    odd = U32(U32(magnitude >> U32(13)) & U32(1))
    normal = U32(U32(U32(U32(magnitude + U32(0xFFF)) + odd) - U32(0x38000000)) >> U32(13))
    # 0.5 has the place value of a subnormal fp16 in its last bit, so the sum rounds there.
    subnormal = U32(_bits(_float(magnitude) + _HALF) - U32(0x3F000000))
    nan = U32(U32(0x7C00) + U32(U32(magnitude & U32(0x007FFFFF)) >> U32(13)))
    nan = U32(0x7C01) if nan == U32(0x7C00) else nan
    result = U32(0x7C00) if magnitude >= U32(0x477FF000) else normal
    result = subnormal if magnitude < U32(0x38800000) else result
    result = nan if magnitude > U32(0x7F800000) else result
    return U16(U32(result) | U32(U32(word >> U32(16)) & U32(0x8000)))


@_jit
def _to_e4m3(x):
    """See bridge/codecs/fp8.py."""
    word = _bits(x)
    sign = U32(U32(word >> U32(24)) & U32(0x80))
    magnitude = U32(word & U32(0x7FFFFFFF))
    odd = U32(U32(magnitude >> U32(20)) & U32(1))
    normal = U32(U32(U32(U32(magnitude + U32(0x7FFFF)) + odd) >> U32(20)) - U32(960))
    subnormal = U32(_bits(_float(magnitude) + F32(16384)) - U32(0x46800000))
    result = U32(0x7E) if normal > U32(0x7E) else normal
    result = subnormal if magnitude < U32(0x3C800000) else result
    result = U32(0x7F) if magnitude > U32(0x7F800000) else result
    return U8(U32(result) | sign)


@_jit
def _from_e4m3(code):
    magnitude = U32(code) & U32(0x7F)
    normal = U32(U32(magnitude << U32(20)) + U32(0x3C000000))
    subnormal = _bits(F32(I32(magnitude)) * F32(0.001953125))
    result = subnormal if magnitude < U32(8) else normal
    result = U32(0x7FC00000) if magnitude == U32(0x7F) else result
    return _float(U32(U32(result) | U32(U32(U32(code) & U32(0x80)) << U32(24))))


@_jit
def _to_fp16_scalar(x):
    return _to_fp16(x) if x == x else U16(0x7E00)


@_jit
def _read(source, element, x, count):
    """x f32 [count] = the elements at `source`."""
    x = _f32(x)
    if element == _BF16:
        halves = _u16(source)
        for i in range(count):
            x[i] = _from_bf16(halves[i])
    elif element == _FP16:
        halves = _u16(source)
        for i in range(count):
            x[i] = _from_fp16(halves[i])
    else:
        words = _f32(source)
        for i in range(count):
            x[i] = words[i]


@_jit
def _write(x, element, target, count):
    """The elements at `target` = x f32 [count]."""
    x = _f32(x)
    if element == _BF16:
        halves = _u16(target)
        for i in range(count):
            halves[i] = _to_bf16(x[i])
    elif element == _FP16:
        halves = _u16(target)
        for i in range(count):
            halves[i] = _to_fp16(x[i])
    else:
        words = _f32(target)
        for i in range(count):
            words[i] = x[i]


# Steps of the codecs. ---------------------------------------------------------------------------------------------------------------


@_jit
def _sum_of_squares(x, s, dim):
    """The sum by halving: s[:h] + s[h:]."""
    x, s = _f32(x), _f32(s)
    h = dim // 2
    for i in range(h):
        s[i] = x[i] * x[i] + x[h + i] * x[h + i]
    while h > 1:
        h //= 2
        for i in range(h):
            s[i] = s[i] + s[h + i]
    return s[0]


@_jit
def _butterfly(x, dim):
    """Stages 1, 2 and 4 in registers, then two stages a pass over contiguous parts."""
    for i in range(0, dim, 8):
        _stages_1_2_4(x + 4 * i)
    h = 8
    while 4 * h <= dim:
        for i in range(0, dim, 4 * h):
            p, q, r, s = _f32(x + 4 * i), _f32(x + 4 * (i + h)), _f32(x + 4 * (i + 2 * h)), _f32(x + 4 * (i + 3 * h))
            for j in range(h):
                a, b, c, d = p[j] + q[j], p[j] - q[j], r[j] + s[j], r[j] - s[j]
                p[j], q[j], r[j], s[j] = a + c, b + d, a - c, b - d
        h *= 4
    if h < dim:
        p, q = _f32(x), _f32(x + 4 * h)
        for j in range(h):
            a, b = p[j], q[j]
            p[j], q[j] = a + b, a - b


@_jit
def _reached_7(address, inverse, root, midpoints, count):
    """x f32 [count] at `address` becomes u32 [count]: how many of the 7 midpoints each coordinate reaches.

    Codes as wide as the coordinates, because narrower ones cost a conversion for each comparison.
    """
    x, m, codes = _f32(address), _f32(midpoints), _u32(address)
    m0, m1, m2, m3, m4, m5, m6 = m[0], m[1], m[2], m[3], m[4], m[5], m[6]
    for i in range(count):
        u = x[i] * inverse * root
        low = I32(u >= m0) + I32(u >= m1) + I32(u >= m2) + I32(u >= m3)
        codes[i] = U32(low + I32(u >= m4) + I32(u >= m5) + I32(u >= m6))


@_jit
def _reached_15(address, inverse, root, midpoints, count):
    x, m, codes = _f32(address), _f32(midpoints), _u32(address)
    m0, m1, m2, m3, m4, m5, m6, m7 = m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7]
    m8, m9, m10, m11, m12, m13, m14 = m[8], m[9], m[10], m[11], m[12], m[13], m[14]
    for i in range(count):
        u = x[i] * inverse * root
        low = I32(u >= m0) + I32(u >= m1) + I32(u >= m2) + I32(u >= m3) + I32(u >= m4) + I32(u >= m5) + I32(u >= m6) + I32(u >= m7)
        high = I32(u >= m8) + I32(u >= m9) + I32(u >= m10) + I32(u >= m11) + I32(u >= m12) + I32(u >= m13) + I32(u >= m14)
        codes[i] = U32(low + high)


@_jit
def _ordered(word):
    """An i32 that orders as the float with these bits does; NaN lies beyond the infinities. Its own inverse."""
    return I32(I32(word) ^ I32(I32(I32(word) >> I32(31)) & I32(0x7FFFFFFF)))


@_jit
def _extremes(x, dim):
    """(least, greatest) element; NaN for both where there is one. In integers, because LLVM vectorises their reductions."""
    words = _u32(x)
    low, high = I32(0x7FFFFFFF), I32(-0x80000000)
    for i in range(dim):
        key = _ordered(words[i])
        low = min(low, key)
        high = max(high, key)
    if high > I32(0x7F800000) or low < _ordered(U32(0xFF800000)):
        return _NAN, _NAN
    return _float(U32(_ordered(low))), _float(U32(_ordered(high)))


@_jit
def _greatest_magnitude(x, dim):
    words = _u32(x)
    high = I32(0)
    for i in range(dim):
        high = max(high, I32(words[i] & U32(0x7FFFFFFF)))
    return _float(U32(high))


@_jit
def _at_least(x, floor):
    """As np.maximum: NaN stays."""
    return floor if x < floor else x


@_jit
def _affine_codes(x, zero, scale, levels, codes, count):
    x, codes = _f32(x), _u8(codes)
    for i in range(count):
        step = (x[i] - zero) / scale + _HALF
        step = step if step >= _ZERO else _ZERO  # NaN, too
        step = step if step <= levels else levels
        codes[i] = U8(I32(step))


@_jit
def _int8_codes(x, scale, codes, count):
    x, codes = _f32(x), _i8(codes)
    for i in range(count):
        step = np.rint(x[i] / scale)
        step = step if step == step else _ZERO
        step = step if step >= F32(-127) else F32(-127)
        step = step if step <= F32(127) else F32(127)
        codes[i] = np.int8(I32(step))


@_jit
def _pack_bits(codes, count, bits, target):
    """target = `count` codes, a multiple of 16, as a bit stream, least significant bit first."""
    out = _u8(target)
    if bits == 4:
        pairs = _u16(codes)
        for i in range(count // 2):
            pair = pairs[i]
            out[i] = U8(pair | U16(pair >> U16(4)))
    else:
        eights = _u64(codes)
        for i in range(count // 8):
            v = eights[i]
            v = (v | (v >> U64(5))) & U64(0x003F003F003F003F)
            v = (v | (v >> U64(10))) & U64(0x00000FFF00000FFF)
            v = v | (v >> U64(20))
            out[3 * i], out[3 * i + 1], out[3 * i + 2] = U8(v), U8(v >> U64(8)), U8(v >> U64(16))


@_jit
def _unpack_bits(source, count, bits, codes):
    """The inverse."""
    data = _u8(source)
    if bits == 4:
        pairs = _u16(codes)
        for i in range(count // 2):
            byte = U16(data[i])
            pairs[i] = U16(U16(byte | U16(byte << U16(4))) & U16(0x0F0F))
    else:
        eights = _u64(codes)
        for i in range(count // 8):
            v = U64(data[3 * i]) | (U64(data[3 * i + 1]) << U64(8)) | (U64(data[3 * i + 2]) << U64(16))
            v = (v | (v << U64(20))) & U64(0x00000FFF00000FFF)
            v = (v | (v << U64(10))) & U64(0x003F003F003F003F)
            eights[i] = (v | (v << U64(5))) & U64(0x0707070707070707)


# Sides: rows of vectors in wire.x to and from rows of codes and scalars. --------------------------------------------------------------


@_jit
def _encode_rows(side, wire, rows, dim, codes, scalars):
    """codes, scalars: addresses of the first row of each plane."""
    count = rows * dim
    if side.kind == _RAW:
        _write(wire.x, side.element, codes, count)
    elif side.kind == _FP8:
        x, out, scale = _f32(wire.x), _u8(codes), side.scale
        if scale != _ONE:
            for i in range(count):
                x[i] = x[i] / scale
        for i in range(count):
            out[i] = _to_e4m3(x[i])
    elif side.kind == _INT8:
        for t in range(rows):
            row = wire.x + 4 * t * dim
            scale = _at_least(_greatest_magnitude(row, dim) / F32(127), _SCALE_FLOOR)
            _f32(scalars)[t] = scale if scale == scale else _NAN
            _int8_codes(row, scale, codes + t * dim, dim)
    else:
        halves = _u16(scalars)
        for t in range(rows):
            row, row_codes = wire.x + 4 * t * dim, wire.codes + t * dim
            if side.kind == _CODEBOOK:
                norm = np.sqrt(_sum_of_squares(row, wire.s, dim))
                halves[t] = _to_fp16_scalar(norm)
                inverse = _ONE / (norm + _NORM_EPSILON)
                _butterfly(row, dim)
                if side.bits == 4:
                    _reached_15(row, inverse, side.root, side.table, dim)
                else:
                    _reached_7(row, inverse, side.root, side.table, dim)
                wide, narrow = _u32(row), _u8(row_codes)
                for i in range(dim):
                    narrow[i] = U8(wide[i])
            else:
                zero, greatest = _extremes(row, dim)
                zero = zero + _ZERO  # a negative zero becomes positive
                levels = F32(15) if side.bits == 4 else F32(7)
                scale = _at_least((greatest - zero) / levels, _SCALE_FLOOR)
                halves[2 * t], halves[2 * t + 1] = _to_fp16_scalar(scale), _to_fp16_scalar(zero)
                _affine_codes(row, zero, scale, levels, row_codes, dim)
        _pack_bits(wire.codes, count, side.bits, codes)


@_jit
def _decode_rows(side, wire, rows, dim, codes, scalars):
    """The inverse, into wire.x."""
    count = rows * dim
    x = _f32(wire.x)
    if side.kind == _RAW:
        _read(codes, side.element, wire.x, count)
    elif side.kind == _FP8:
        data, scale = _u8(codes), side.scale
        for i in range(count):
            x[i] = _from_e4m3(data[i])
        if scale != _ONE:
            for i in range(count):
                x[i] = x[i] * scale
    elif side.kind == _INT8:
        for t in range(rows):
            row, data, scale = _f32(wire.x + 4 * t * dim), _i8(codes + t * dim), _f32(scalars)[t]
            for i in range(dim):
                row[i] = F32(I32(data[i])) * scale
    else:
        halves = _u16(scalars)
        _unpack_bits(codes, count, side.bits, wire.codes)
        for t in range(rows):
            row, data = _f32(wire.x + 4 * t * dim), _u8(wire.codes + t * dim)
            if side.kind == _CODEBOOK:
                entries = _f32(side.table)
                for i in range(dim):
                    row[i] = entries[data[i]]
                correction = _ONE / np.sqrt(_sum_of_squares(wire.x + 4 * t * dim, wire.s, dim) + _CENTROID_EPSILON)
                factor = _from_fp16(halves[t]) * correction * side.root
                _butterfly(wire.x + 4 * t * dim, dim)
                for i in range(dim):
                    row[i] = row[i] * factor
            else:
                scale, zero = _from_fp16(halves[2 * t]), _from_fp16(halves[2 * t + 1])
                for i in range(dim):
                    row[i] = F32(I32(data[i])) * scale + zero


# Blocks. ----------------------------------------------------------------------------------------------------------------------------


@_jit
def _vector(side, page, position, head):
    return side.pages + page * side.page_step + position * side.token_step + head * side.head_step


@_jit
def _gather(side, vector, dim, target):
    """The elements of a vector, which lie apart, one behind another."""
    for i in range(dim):
        _copy(vector + i * side.element_step, target + i * side.width, side.width)


@_jit
def _scatter(side, source, vector, dim):
    for i in range(dim):
        _copy(source + i * side.width, vector + i * side.element_step, side.width)


@_jit
def _prefetch_span(address, nbytes):
    for offset in range(0, nbytes, 64):
        _prefetch(address + offset)


@_jit
def _prefetch_next(side, wire, pages, positions, head, last, token, rows):
    """Asks for the vectors that come next: the next head's, or the next block's. The processor does not foresee these short rows."""
    if head + 1 < last:
        head += 1
    else:
        head = last - wire.heads
        token += rows
        rows = min(_T, pages.size - token)
    for t in range(rows):
        _prefetch_span(_vector(side, pages[token + t], positions[token + t], head), wire.head_dim * side.width)


@_jit
def _encode_side(side, wire, pages, positions, head, last, token, rows, block, first):
    """Writes rows [first, first + rows) of one side of a block, the share's tokens from `token` on, and zeros into its other rows."""
    dim = wire.head_dim
    codes, scalars = block + side.codes, block + side.scalars
    if rows < _T:
        _fill_zero(codes, _T * side.row)
        _fill_zero(scalars, _T * side.scalar_row)
    codes += first * side.row
    scalars += first * side.scalar_row
    same = side.kind == _RAW and side.element == side.source
    for t in range(rows):
        vector = _vector(side, pages[token + t], positions[token + t], head)
        if side.element_step != side.width:
            _gather(side, vector, dim, wire.row)
            vector = wire.row
        if same:
            _copy(vector, codes + t * side.row, side.row)
        else:
            _read(vector, side.source, wire.x + 4 * t * dim, dim)
    _prefetch_next(side, wire, pages, positions, head, last, token, rows)
    if not same:
        _encode_rows(side, wire, rows, dim, codes, scalars)


@_jit
def _decode_side(side, wire, pages, positions, head, last, token, rows, block, first):
    """The inverse: rows [first, first + rows) of one side of a block into the pages of the tokens from `token` on."""
    dim = wire.head_dim
    codes, scalars = block + side.codes + first * side.row, block + side.scalars + first * side.scalar_row
    same = side.kind == _RAW and side.element == side.source
    if not same:
        _decode_rows(side, wire, rows, dim, codes, scalars)
    _prefetch_next(side, wire, pages, positions, head, last, token, rows)
    for t in range(rows):
        vector = _vector(side, pages[token + t], positions[token + t], head)
        apart = side.element_step != side.width
        target = wire.row if apart else vector
        if same:
            _copy(codes + t * side.row, target, side.row)
        else:
            _write(wire.x + 4 * t * dim, side.source, target, dim)
        if apart:
            _scatter(side, target, vector, dim)


@_jit
def _hash(block, words, keys, valid):
    """The tag of a block without its mask. keys: u64 [1 + words]."""
    w = _u32(block)
    total = valid * keys[0]
    rest = keys[1:]
    for i in range(words):
        total += U64(w[i]) * rest[i]
    return total


@_jit
def pack(sides, wires, hash_keys, ranges, masks, pages, positions, local, start):
    """start: the row of the first block that holds the share's first token. local: the pages' head that is the share's first.

    sides: SIDE [2], K and V. wires: WIRE [1]. hash_keys u64 [1 + block_bytes / 4]; ranges u64 [blocks], first | end << 8;
    masks u64 [heads, blocks]. pages, positions i64 [tokens].
    """
    key, value, wire = sides[0], sides[1], wires[0]
    # Blocks outside heads: the heads of a token, or of a page, are neighbours in the engine's memory.
    for index in range(wire.blocks):
        first = max(start - index * _T, 0)
        token = index * _T + first - start
        rows = min(_T - first, pages.size - token)
        for head in range(wire.heads):
            run = wire.data + head * wire.run_bytes
            block = run + index * wire.block_bytes
            if head + 1 < wire.heads:
                _prefetch_span(block + wire.run_bytes, wire.block_bytes)
            _encode_side(key, wire, pages, positions, local + head, local + wire.heads, token, rows, block, first)
            _encode_side(value, wire, pages, positions, local + head, local + wire.heads, token, rows, block, first)
            plane = _u64(run + wire.blocks * wire.block_bytes)
            plane[index] = _hash(block, wire.block_bytes // 4, hash_keys, ranges[index]) + masks[head, index]
            if wire.blocks % 2:
                plane[wire.blocks] = U64(0)


@_jit
def verify(wires, hash_keys, ranges, masks, bad):
    """Sets bad[head, block] (bool); returns whether a tag plane's padding is not zero."""
    wire = wires[0]
    dirty = False
    for head in range(wire.heads):
        run = wire.data + head * wire.run_bytes
        plane = _u64(run + wire.blocks * wire.block_bytes)
        for index in range(wire.blocks):
            block = run + index * wire.block_bytes
            tag = _hash(block, wire.block_bytes // 4, hash_keys, ranges[index])
            bad[head, index] = tag + masks[head, index] != plane[index]
        if wire.blocks % 2:
            dirty |= plane[wire.blocks] != U64(0)
    return dirty


@_jit
def land(sides, wires, pages, positions, local, start):
    """start: row, counted from the first block's first on, of the first token to write."""
    key, value, wire = sides[0], sides[1], wires[0]
    for index in range(start // _T, wire.blocks):
        first = max(start - index * _T, 0)
        token = index * _T + first - start
        rows = min(_T - first, pages.size - token)
        if rows <= 0:
            break
        for head in range(wire.heads):
            block = wire.data + head * wire.run_bytes + index * wire.block_bytes
            if head + 1 < wire.heads:
                _prefetch_span(block + wire.run_bytes, wire.block_bytes)
            _decode_side(key, wire, pages, positions, local + head, local + wire.heads, token, rows, block, first)
            _decode_side(value, wire, pages, positions, local + head, local + wire.heads, token, rows, block, first)
