"""OCP E4M3FN by integer arithmetic: round to nearest even, saturate at 448, NaN is 0x7f or 0xff. The oracle for every device's cast."""

from __future__ import annotations

import numpy as np


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """fp32 [...] -> u8 [...]. Infinities saturate to +-448; NaN becomes 0x7f with its sign. Source: OCP OFP8 specification, 5.2."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    sign = (bits >> np.uint32(24)) & np.uint32(0x80)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Normal results (exponent >= -6): rebias by 120, keep 3 mantissa bits, round half to even on the 20 bits that fall off.
    lowest_kept = (magnitude >> np.uint32(20)) & np.uint32(1)
    normal = (magnitude + np.uint32(0x7FFFF) + lowest_kept >> np.uint32(20)) - np.uint32(120 << 3)
    # Subnormal results are multiples of 2**-9: adding 2**14 leaves exactly the rounded multiple in the sum's low mantissa bits.
    magic = np.float32(2.0**14)
    with np.errstate(invalid="ignore", over="ignore"):
        subnormal = (magnitude.view(np.float32) + magic).view(np.uint32) - magic.view(np.uint32)
    code = np.where(magnitude < np.uint32(0x3C800000), subnormal, np.minimum(normal, np.uint32(0x7E)))
    code = np.where(magnitude > np.uint32(0x7F800000), np.uint32(0x7F), code)
    return (code | sign).astype(np.uint8)


def _decode_table() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -value, value).astype(np.float32)


_VALUES = _decode_table()


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """u8 [...] -> fp32 [...], exact."""
    return _VALUES[codes]
