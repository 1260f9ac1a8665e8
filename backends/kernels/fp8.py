"""OCP E4M3FN by 32-bit integer operations and float additions, since hardware and interpreter casts differ between devices."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x, CANONICAL_NAN: tl.constexpr):
    """fp32 -> int32 codes 0..255: nearest even, saturating at 448, NaN -> 0x7f with its sign.

    With E = max(exponent of |x|, -6), |x| + 2**(E + 20) has an ulp of 2**(E - 3), the step of e4m3 there: the float addition rounds,
    and its low mantissa bits hold |x| in steps (0..16). The code is that plus 8 * (E + 6), subnormals included.
    CANONICAL_NAN: the device's additions give NaN as 0x7fffffff, whose low bits are then the code of NaN without more work.
    """
    bits = x.to(tl.int32, bitcast=True)
    if CANONICAL_NAN:  # noqa: SIM108 (a conditional expression would compile both)
        clamped = tl.minimum(tl.abs(x), 448.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        clamped = tl.minimum(tl.abs(x), 448.0)
    magic = (tl.maximum(clamped, 0.015625) * 1048576.0).to(tl.int32, bitcast=True) & 0x7F800000
    rounded = (clamped + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    # magic >> 20 is 8 * (E + 147); bits above the lowest seven are those of the magic number.
    code = (rounded + ((magic >> 20) - 1128)) & 0x7F
    if not CANONICAL_NAN:
        code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def decode_e4m3(code):
    """int32 codes 0..255 -> fp32, exact; 0x7f and 0xff are NaN.

    Without float subnormals: below the least normal number, (1 + m / 8) * 2**-6 - 2**-6 is exact.
    """
    magnitude = code & 0x7F
    small = magnitude < 8
    x = ((magnitude << 20) + tl.where(small, 121 << 23, 120 << 23)).to(tl.float32, bitcast=True)
    x = x - tl.where(small, 0.015625, 0.0)
    x = tl.where(magnitude == 0x7F, float("nan"), x)
    return (x.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
