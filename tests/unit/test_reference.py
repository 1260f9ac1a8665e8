"""The reference against an oracle that is written another way: float64, a dense Hadamard matrix, Python's integers, math.frexp."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import numpy as np
import pytest

from bridge.codecs import CODECS, tables
from bridge.codecs.fp8 import decode_e4m3, encode_e4m3
from bridge.codecs.reference import butterfly, decode, encode, from_float, pack_bits, sum_of_squares, to_float, unpack_bits
from bridge.wire import Coding, CodingKind, Element, LayerSpan, TagKeys, errors, verify_tags, write_tags
from bridge.wire.tags import hash_blocks

# The oracle. ------------------------------------------------------------------------------------------------------------------------


def hadamard(n: int) -> np.ndarray:
    """f64 [n, n]: entry (i, j) is -1 to the number of ones that i and j have in common."""
    return np.array([[1.0 - 2.0 * (bin(i & j).count("1") % 2) for j in range(n)] for i in range(n)])


def stream_of(codes: list[int], bits: int) -> bytes:
    """The codes as one big integer, the first in its lowest bits."""
    number = sum(code << bits * place for place, code in enumerate(codes))
    return number.to_bytes(len(codes) * bits // 8, "little")


def e4m3_of(x: float) -> int:
    """Nearest E4M3FN, ties to even, in exact arithmetic of Python's floats."""
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    if math.isnan(x):
        return sign | 0x7F
    x = abs(x)
    if math.isinf(x):
        return sign | 0x7E
    exponent = max(math.frexp(x)[1] - 1, -6) if x else -6
    steps = round(math.ldexp(x, 3 - exponent))  # Python rounds to even
    code = steps if exponent == -6 else steps - 8 + (exponent + 7 << 3)
    return sign | min(code, 0x7E)


def e4m3_value(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    value = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return -value if code & 0x80 else value


def quarter_round(s: list[int], a: int, b: int, c: int, d: int) -> None:
    for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        s[x] = (s[x] + s[y]) & 0xFFFFFFFF
        mixed = s[z] ^ s[x]
        s[z] = (mixed << turn | mixed >> 32 - turn) & 0xFFFFFFFF


def chacha20_block(key: bytes, counter: int, nonce: bytes) -> bytes:
    """RFC 8439, section 2.3."""
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter, *struct.unpack("<3I", nonce)]
    s = list(start)
    for _ in range(10):
        for column in range(4):
            quarter_round(s, column, 4 + column, 8 + column, 12 + column)
        for column in range(4):
            quarter_round(s, column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4)
    return struct.pack("<16I", *[(x + y) % 2**32 for x, y in zip(s, start, strict=True)])


def stream_word(key: bytes, nonce: bytes, byte: int) -> int:
    """The u64 at this byte of the key stream."""
    block = chacha20_block(key, byte // 64, nonce)
    return int.from_bytes(block[byte % 64 : byte % 64 + 8], "little")


def tag_of(key: bytes, lease: int, generation: int, ordinal: int, block: bytes, first: int, end: int) -> int:
    nonce = lease.to_bytes(8, "little") + generation.to_bytes(4, "little")
    words = [int.from_bytes(block[i : i + 4], "little") for i in range(0, len(block), 4)]
    total = stream_word(key, nonce, 8 * ordinal) + stream_word(key, nonce, 2**37) * (first | end << 8)
    for j, word in enumerate(words):
        total += stream_word(key, nonce, 2**37 + 8 * (j + 1)) * word
    return total % 2**64


# Tags. ------------------------------------------------------------------------------------------------------------------------------

RFC_KEY = bytes(range(32))
RFC_BLOCK = (
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
)


def test_the_oracles_chacha20_gives_the_rfcs_block() -> None:
    """RFC 8439, section 2.3.2."""
    assert chacha20_block(RFC_KEY, 1, bytes.fromhex("000000090000004a00000000")).hex() == RFC_BLOCK


def test_masks_are_the_rfcs_key_stream() -> None:
    """The same vector through TagKeys: its nonce is a lease and a generation, its block number 1 holds masks 8 to 15."""
    keys = TagKeys(RFC_KEY, int.from_bytes(bytes.fromhex("000000090000004a"), "little"), 0)
    assert keys.masks(8, 8).astype("<u8").tobytes().hex() == RFC_BLOCK
    assert keys.masks(11, 2).astype("<u8").tobytes().hex() == RFC_BLOCK[48:80]


@pytest.mark.parametrize("ordinal", [0, 7, 8, 123_456_789, 2**34 - 1])
def test_masks_and_hash_keys_lie_where_the_format_says(ordinal: int) -> None:
    lease, generation = 0xFEDCBA9876543210, 0x89ABCDEF
    nonce = lease.to_bytes(8, "little") + generation.to_bytes(4, "little")
    keys = TagKeys(RFC_KEY, lease, generation)
    assert int(keys.masks(ordinal, 1)[0]) == stream_word(RFC_KEY, nonce, 8 * ordinal)
    assert [int(k) for k in keys.hash_keys(64)] == [stream_word(RFC_KEY, nonce, 2**37 + 8 * j) for j in range(17)]


@pytest.mark.parametrize("words", [4, 256, 257, 300])
def test_tags_equal_the_formula_in_integers(words: int) -> None:
    random = np.random.default_rng(words)
    span = LayerSpan(0, 0, 0, 2, 3, 4 * words, first_block=5, first_ordinal=77, first_token=5 * 16 + 3, end_token=7 * 16 + 9)
    data = random.integers(0, 256, span.nbytes).astype(np.uint8)
    write_tags(data, span, TagKeys(RFC_KEY, 3, 4))
    for head in range(2):
        run = data[head * span.run_bytes :][: span.run_bytes].tobytes()
        assert run[3 * span.block_bytes + 24 :] == bytes(8)
        for block, (first, end) in enumerate([(3, 16), (0, 16), (0, 9)]):
            content = run[block * span.block_bytes :][: span.block_bytes]
            tag = int.from_bytes(run[3 * span.block_bytes + 8 * block :][:8], "little")
            assert tag == tag_of(RFC_KEY, 3, 4, 77 + 3 * head + block, content, first, end)


def test_the_largest_words_and_keys_wrap() -> None:
    blocks, keys = np.full((1, 64), 255, np.uint8), np.full(17, 2**64 - 1, np.uint64)
    expected = ((2**64 - 1) * (16 << 8) + 16 * (2**32 - 1) * (2**64 - 1)) % 2**64
    assert int(hash_blocks(blocks, np.array([16 << 8], np.uint64), keys)[0]) == expected


def test_a_tag_is_refused_for_each_word_that_changes() -> None:
    keys = TagKeys(RFC_KEY, 1, 1)
    span = LayerSpan(0, 0, 0, 1, 1, 64, 0, 0, 0, 16)
    data = np.zeros(span.nbytes, np.uint8)
    write_tags(data, span, keys)
    verify_tags(data, span, keys)
    for place in range(72):
        data[place] ^= 0x80
        with pytest.raises(errors.BadTag):
            verify_tags(data, span, keys)
        data[place] ^= 0x80
    data[75] = 1
    with pytest.raises(errors.DirtyPadding):
        verify_tags(data, span, keys)


# Element types. ---------------------------------------------------------------------------------------------------------------------


def interesting_floats() -> np.ndarray:
    """fp32 of every exponent and both signs: random mantissas, and those around each tie of a narrower type; zeros, infinities, NaN."""
    random = np.random.default_rng(8)
    mantissas = [0, 1, 0x7FFFFF, 0x400000]
    for kept in (2, 3, 4, 7, 10):
        half = 1 << 22 - kept
        mantissas += [m for top in (0, 1, 2, 3) for m in (top * 2 * half + half - 1, top * 2 * half + half, top * 2 * half + half + 1)]
    mantissas += random.integers(0, 1 << 23, 40).tolist()
    words = [sign << 31 | exponent << 23 | m & 0x7FFFFF for sign in (0, 1) for exponent in range(256) for m in mantissas]
    return np.array(words, np.uint32).view(np.float32)


def test_fp8_rounds_as_exact_arithmetic_does() -> None:
    x = interesting_floats()
    # Every E4M3 value, the middles between neighbours, and the floats next to both.
    grid = [e4m3_value(code) for code in range(0x7F)]
    near = np.array(grid + [(a + b) / 2 for a, b in pairwise(grid)] + [464.0, 480.0], np.float32)
    near = np.concatenate([near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))])
    x = np.concatenate([x, near, -near])
    got = encode_e4m3(x)
    expected = np.array([e4m3_of(float(v)) for v in x], np.uint8)
    # NumPy keeps the sign of a NaN, Python's float too.
    np.testing.assert_array_equal(got, expected)


def test_fp8_values_are_exact() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = decode_e4m3(codes)
    for code, value in zip(codes.tolist(), values.tolist(), strict=True):
        if code & 0x7F == 0x7F:
            assert math.isnan(value)
        else:
            assert value == e4m3_value(code)
            assert math.copysign(1, value) == (-1 if code & 0x80 else 1)
    np.testing.assert_array_equal(encode_e4m3(values), codes)


def bf16_of(x: float, word: int) -> int | None:
    """Nearest bf16 as its word, ties to even, or None for NaN."""
    if math.isnan(x):
        return None
    if math.isinf(x):
        return word >> 16
    exponent = max(math.frexp(x)[1] - 1, -126) if x else -126
    steps = round(math.ldexp(abs(x), 7 - exponent))
    code = steps if exponent == -126 else steps - 128 + (exponent + 127 << 7)
    return min(code, 0x7F80) | (0x8000 if word >> 31 else 0)


def test_bf16_rounds_as_exact_arithmetic_does() -> None:
    x = interesting_floats()
    words = x.view(np.uint32).tolist()
    got = from_float(x, Element.BF16).view("<u2")
    for value, word, code in zip(x.tolist(), words, got.tolist(), strict=True):
        expected = bf16_of(value, word)
        assert (code & 0x7FFF > 0x7F80) if expected is None else code == expected


def test_fp16_rounds_as_the_struct_module_does() -> None:
    x = interesting_floats()
    for value, code in zip(x.tolist(), from_float(x, Element.FP16).view("<u2").tolist(), strict=True):
        if math.isnan(value):
            assert code & 0x7FFF > 0x7C00
            continue
        try:
            expected = struct.pack("<e", value)
        except OverflowError:
            expected = struct.pack("<e", math.copysign(math.inf, value))
        assert code == int.from_bytes(expected, "little")


@pytest.mark.parametrize("element", [Element.BF16, Element.FP16])
def test_every_element_survives_the_way_through_fp32(element: Element) -> None:
    raw = np.arange(2**16, dtype="<u2").view(np.uint8)
    back = from_float(to_float(raw, element), element).view("<u2")
    nan = np.isnan(to_float(raw, element))
    np.testing.assert_array_equal(back[~nan], raw.view("<u2")[~nan])
    assert np.isnan(to_float(back[nan].view(np.uint8), element)).all()


# Codecs. ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 64, 128, 256])
def test_the_butterfly_is_sylvesters_matrix(n: int) -> None:
    np.testing.assert_array_equal(butterfly(np.eye(n, dtype=np.float32)), hadamard(n))
    x = np.random.default_rng(n).standard_normal((5, n)).astype(np.float32)
    np.testing.assert_allclose(butterfly(x), x.astype(np.float64) @ hadamard(n), atol=2e-5)


def test_squares_are_summed_by_halving() -> None:
    """An order that matters: 2**24 + 1 + 1 is 2**24 one after another, and 2**24 + 2 in halves."""
    x = np.sqrt(np.array([2**24, 1, 0, 1], np.float64)).astype(np.float32)
    assert sum_of_squares(x) == 2**24 + 2
    y = np.random.default_rng(1).standard_normal((7, 128)).astype(np.float32)
    np.testing.assert_allclose(sum_of_squares(y), (y.astype(np.float64) ** 2).sum(-1), rtol=1e-6)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("dim", [16, 48, 128])
def test_codes_are_one_little_endian_number(bits: int, dim: int) -> None:
    codes = np.random.default_rng(dim).integers(0, 2**bits, (3, dim)).astype(np.uint8)
    packed = pack_bits(codes, bits)
    assert [row.tobytes() for row in packed] == [stream_of(row.tolist(), bits) for row in codes]
    np.testing.assert_array_equal(unpack_bits(packed, bits), codes)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_take_the_nearest_entry(bits: int, dim: int) -> None:
    """Codes in float64 differ only where a coordinate lies within rounding of a midpoint; then the decoded key follows."""
    x = np.random.default_rng(bits * dim).standard_normal((400, dim)).astype(np.float32) * np.float32(3)
    codec = CODECS["turboquant_3bit_nc" if bits == 3 else "turboquant_4bit_nc"].for_layer(dim, Element.FP32)
    codes, scalars = encode(x, codec.key)
    norm = np.sqrt((x.astype(np.float64) ** 2).sum(-1))
    unit = x.astype(np.float64) @ hadamard(dim) / np.sqrt(dim) / norm[:, None]
    entries = tables.centroids(dim, bits).astype(np.float64)
    distance = np.abs(unit[..., None] - entries)
    expected = distance.argmin(-1)
    got = unpack_bits(codes, bits)
    close = np.sort(distance, axis=-1)
    border = close[..., 1] - close[..., 0] < 1e-6
    np.testing.assert_array_equal(got[~border], expected[~border])
    assert border.mean() < 1e-3
    stored = scalars.view("<f2").astype(np.float64)[:, 0]
    np.testing.assert_allclose(stored, norm, rtol=2**-11 + 1e-6)
    c = entries[got]
    value = c @ hadamard(dim) / np.sqrt(dim) * (stored / np.sqrt((c**2).sum(-1)))[:, None]
    np.testing.assert_allclose(decode(codes, scalars, codec.key, dim), value, atol=1e-5)


@pytest.mark.parametrize(("bits", "expected"), [(3, 0.0338), (4, 0.0093)])
def test_relative_key_error_on_random_directions(bits: int, expected: float) -> None:
    x = np.random.default_rng(11).standard_normal((20_000, 128)).astype(np.float32)
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    codec = CODECS["turboquant_3bit_nc" if bits == 3 else "turboquant_4bit_nc"].for_layer(128, Element.FP32)
    y = decode(*encode(x, codec.key), codec.key, 128).astype(np.float64)
    error = ((y - x) ** 2).sum(-1).mean()
    assert abs(error / expected - 1) < 0.03


@pytest.mark.parametrize("bits", [3, 4])
def test_values_are_between_least_and_greatest(bits: int) -> None:
    x = np.random.default_rng(bits).standard_normal((500, 96)).astype(np.float32)
    coding = Coding(CodingKind.AFFINE, bits)
    codes, scalars = encode(x, coding)
    wide = x.astype(np.float64)
    zero, scale = wide.min(-1, keepdims=True), (wide.max(-1, keepdims=True) - wide.min(-1, keepdims=True)) / (2**bits - 1)
    steps = (wide - zero) / scale
    got = unpack_bits(codes, bits)
    border = np.abs(steps - np.floor(steps) - 0.5) < 1e-5
    np.testing.assert_array_equal(got[~border], np.floor(steps + 0.5)[~border])
    assert (got.min(-1) == 0).all()
    assert (got.max(-1) == 2**bits - 1).all()
    halves = scalars.view("<f2").astype(np.float64)
    np.testing.assert_allclose(halves, np.concatenate([scale, zero], -1), rtol=2**-11 + 1e-6)
    np.testing.assert_allclose(decode(codes, scalars, coding, 96), got * halves[:, :1] + halves[:, 1:], atol=1e-6)


def test_int8_is_a_127th_of_the_greatest_magnitude() -> None:
    x = np.random.default_rng(5).standard_normal((500, 80)).astype(np.float32)
    coding = Coding(CodingKind.INT8, 8)
    codes, scalars = encode(x, coding)
    scale = np.abs(x.astype(np.float64)).max(-1, keepdims=True) / 127
    np.testing.assert_allclose(scalars.view("<f4"), scale, rtol=1e-7)
    steps = x / scale
    border = np.abs(steps - np.floor(steps) - 0.5) < 1e-4
    np.testing.assert_array_equal(codes.view(np.int8)[~border], np.rint(steps)[~border])
    np.testing.assert_allclose(decode(codes, scalars, coding, 80), codes.view(np.int8) * scale, rtol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.37, 3.0])
def test_fp8_stores_the_element_over_its_scale(scale: float) -> None:
    x = np.random.default_rng(6).standard_normal((50, 64)).astype(np.float32) * np.float32(100)
    coding = Coding(CodingKind.FP8, 8, Element.E4M3FN)
    codes, none = encode(x, coding, scale)
    assert none.shape == (50, 0)
    quotient = (x / np.float32(scale)).ravel().tolist()
    np.testing.assert_array_equal(codes.ravel(), [e4m3_of(q) for q in quotient])
    expected = np.array([e4m3_value(int(c)) for c in codes.ravel()]).reshape(x.shape) * np.float32(scale)
    np.testing.assert_allclose(decode(codes, none, coding, 64, scale), expected, rtol=1e-7)


def test_corner_vectors_have_defined_results() -> None:
    """Zeros, a NaN and an infinity among others: defined codes, and NaN as 0x7e00."""
    x = np.zeros((4, 64), np.float32)
    x[1, 3], x[2, 3], x[3] = np.nan, np.inf, -0.0
    key = CODECS["turboquant_4bit_nc"].for_layer(64, Element.FP32).key
    codes, scalars = encode(x, key)
    assert scalars.view("<u2").ravel().tolist() == [0, 0x7E00, 0x7C00, 0]
    codes = unpack_bits(codes, 4)
    assert set(codes[0].tolist()) == {8}
    assert set(codes[1].tolist()) == {0}
    codes, scalars = encode(x, Coding(CodingKind.AFFINE, 4))
    assert not unpack_bits(codes, 4).any()
    tiny = int(np.float16(1e-8).view(np.uint16))
    assert scalars.view("<u2").tolist() == [[tiny, 0], [0x7E00, 0x7E00], [0x7C00, 0], [tiny, 0]]
