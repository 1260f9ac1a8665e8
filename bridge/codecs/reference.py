"""The reference encoder and decoder: what every device's kernels are compared with. Written for reading; NumPy, float32, no FMA.

One operation a line where the order of roundings matters; the order is part of the definition (docs/wire-format.md, section 4).
"""

from __future__ import annotations

import numpy as np

from bridge.codecs import tables
from bridge.codecs.errors import NotCarried
from bridge.codecs.fp8 import decode_e4m3, encode_e4m3
from bridge.wire.coding import Coding, CodingKind, Element

_ONE = np.float32(1)
_NORM_EPSILON = np.float32(1e-8)
_SCALE_FLOOR = np.float32(1e-8)
_CENTROID_EPSILON = np.float32(1e-16)


def to_float(raw: np.ndarray, element: Element) -> np.ndarray:
    """Elements as little-endian bytes u8 [..., D * size] -> fp32 [..., D], exact."""
    raw = np.ascontiguousarray(raw)
    if element is Element.BF16:
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view("<f2" if element is Element.FP16 else "<f4").astype(np.float32)


def from_float(x: np.ndarray, element: Element) -> np.ndarray:
    """fp32 [..., D] -> elements as little-endian bytes u8 [..., D * size]; rounds to nearest even, NaN stays NaN."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    if element is Element.BF16:
        bits = x.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        quiet_nan = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x00400000)
        bits = np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), quiet_nan, rounded)
        return (bits >> np.uint32(16)).astype("<u2").view(np.uint8)
    with np.errstate(over="ignore"):
        return x.astype("<f2" if element is Element.FP16 else "<f4").view(np.uint8)


def butterfly(x: np.ndarray) -> np.ndarray:
    """fp32 [..., D] times Sylvester's matrix of +-1, D a power of two: pairs (i, i + h) -> (a + b, a - b) for h = 1, 2, 4, ... D/2."""
    shape, h = x.shape, 1
    while h < shape[-1]:
        pairs = x.reshape(*shape[:-1], -1, 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(shape)
        h *= 2
    return x


def sum_of_squares(x: np.ndarray) -> np.ndarray:
    """fp32 [..., D] -> fp32 [...]: squares, then their sum by halving (s[:h] + s[h:]), so that every device can repeat it exactly."""
    with np.errstate(over="ignore"):
        s = x * x
        while s.shape[-1] > 1:
            half = s.shape[-1] // 2
            s = s[..., :half] + s[..., half:]
    return s[..., 0]


def pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """u8 [..., D], each below 2**bits -> u8 [..., D * bits / 8]: a bit stream, least significant bit first."""
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def unpack_bits(packed: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of pack_bits."""
    stream = np.unpackbits(packed, axis=-1, bitorder="little")
    return np.packbits(stream.reshape(*packed.shape[:-1], -1, bits), axis=-1, bitorder="little")[..., 0]


def to_fp16(x: np.ndarray) -> np.ndarray:
    """Scalars as little-endian fp16 bytes: nearest even, overflow is infinity, every NaN is 0x7e00."""
    with np.errstate(over="ignore", invalid="ignore"):
        half = x.astype("<f2")
    return np.where(np.isnan(half), np.uint16(0x7E00), half.view("<u2")).view(np.uint8)


def encode(x: np.ndarray, coding: Coding, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """One side's vectors -> codes and scalars.

    x: fp32 [..., D]. scale: what a decoded fp8 element is multiplied with.
    Returns codes u8 [..., code_bytes] and scalars u8 [..., scalar_bytes] (fp16, little-endian).
    Raises NotCarried for sides that hold no coded vectors (OPAQUE, NONE). Source of the formulas: vLLM 0.32, triton_turboquant_store.py.
    """
    x = np.ascontiguousarray(x, dtype=np.float32)
    none = np.zeros((*x.shape[:-1], 0), dtype=np.uint8)
    if coding.kind is CodingKind.RAW:
        return from_float(x, coding.element), none
    if coding.kind is CodingKind.FP8:
        with np.errstate(over="ignore"):
            return encode_e4m3(x if scale == 1.0 else x / np.float32(scale)), none
    if coding.kind is CodingKind.CODEBOOK:
        return _encode_codebook(x, coding.bits)
    if coding.kind is CodingKind.AFFINE:
        return _encode_affine(x, coding.bits)
    if coding.kind is CodingKind.INT8:
        return _encode_int8(x)
    raise _not_coded(coding)


def _not_coded(coding: Coding) -> NotCarried:
    return NotCarried(f"sides of kind {coding.kind.name} hold no coded vectors", remedy="describe pages that take them as they are")


def _encode_codebook(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    head_dim = x.shape[-1]
    with np.errstate(invalid="ignore", over="ignore"):
        norm = np.sqrt(sum_of_squares(x))
        inverse = _ONE / (norm + _NORM_EPSILON)
        rotated = butterfly(x)
        unit = rotated * inverse[..., None]
        unit = unit * np.float32(1 / np.sqrt(head_dim))
    # A coordinate that is NaN reaches no midpoint: code 0.
    codes = (unit[..., None] >= tables.midpoints(head_dim, bits)).sum(axis=-1, dtype=np.uint8)
    return pack_bits(codes, bits), to_fp16(norm[..., None])


def _encode_affine(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    levels = np.float32(2**bits - 1)
    with np.errstate(invalid="ignore", over="ignore"):
        # Adding zero makes a negative zero positive.
        zero = x.min(axis=-1, keepdims=True) + np.float32(0)
        scale = np.maximum((x.max(axis=-1, keepdims=True) - zero) / levels, _SCALE_FLOOR)
        steps = (x - zero) / scale
        codes = np.trunc(steps + np.float32(0.5))
    codes = np.clip(np.where(np.isnan(codes), np.float32(0), codes), 0, levels).astype(np.uint8)
    return pack_bits(codes, bits), to_fp16(np.concatenate([scale, zero], axis=-1))


def _encode_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(invalid="ignore", over="ignore"):
        scale = np.maximum(np.abs(x).max(axis=-1, keepdims=True) / np.float32(127), _SCALE_FLOOR)
        codes = np.rint(x / scale)
    codes = np.clip(np.where(np.isnan(codes), np.float32(0), codes), -127, 127).astype(np.int8)
    stored = np.where(np.isnan(scale), np.uint32(0x7FC00000), scale.view(np.uint32)).astype("<u4")
    return codes.view(np.uint8), stored.view(np.uint8)


def decode(codes: np.ndarray, scalars: np.ndarray, coding: Coding, head_dim: int, scale: float = 1.0) -> np.ndarray:
    """The inverse of encode: u8 [..., code_bytes] and u8 [..., scalar_bytes] -> fp32 [..., head_dim].

    Raises NotCarried as encode does. Source of the formulas: vLLM 0.32, triton_turboquant_decode.py (norm correction included).
    """
    if coding.kind is CodingKind.RAW:
        return to_float(codes, coding.element)
    with np.errstate(invalid="ignore", over="ignore"):
        if coding.kind is CodingKind.FP8:
            values = decode_e4m3(codes)
            return values if scale == 1.0 else values * np.float32(scale)
        if coding.kind is CodingKind.INT8:
            return codes.view(np.int8).astype(np.float32) * np.ascontiguousarray(scalars).view("<f4")
        if coding.kind not in (CodingKind.AFFINE, CodingKind.CODEBOOK):
            raise _not_coded(coding)
        halves = np.ascontiguousarray(scalars).view("<f2").astype(np.float32)
        if coding.kind is CodingKind.AFFINE:
            return unpack_bits(codes, coding.bits).astype(np.float32) * halves[..., :1] + halves[..., 1:]
        return _decode_codebook(codes, halves[..., 0], coding.bits, head_dim)


def _decode_codebook(codes: np.ndarray, norm: np.ndarray, bits: int, head_dim: int) -> np.ndarray:
    entries = tables.centroids(head_dim, bits)[unpack_bits(codes, bits)]
    correction = _ONE / np.sqrt(sum_of_squares(entries) + _CENTROID_EPSILON)
    factor = norm * correction
    factor = factor * np.float32(1 / np.sqrt(head_dim))
    return butterfly(entries) * factor[..., None]
