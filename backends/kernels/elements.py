"""Elements of pages as integers in memory: bf16, fp16 and fp32 to and from fp32 registers. ELEMENT numbers are those of wire Element."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
FP32 = tl.constexpr(3)
E4M3 = tl.constexpr(4)


@triton.jit
def to_float(raw, ELEMENT: tl.constexpr):
    """int16 (bf16, fp16) or int32 (fp32) -> fp32, exact."""
    if ELEMENT == BF16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif ELEMENT == FP16:
        return raw.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return raw.to(tl.float32, bitcast=True)


@triton.jit
def from_float(x, ELEMENT: tl.constexpr, INTEGER_CAST: tl.constexpr):
    """fp32 -> int16 (bf16, fp16) or int32 (fp32), nearest even; NaN stays NaN.

    INTEGER_CAST: round to bf16 by integer arithmetic, for devices (and the interpreter) whose cast is not exact.
    """
    if ELEMENT == BF16:
        if INTEGER_CAST:
            bits = x.to(tl.int32, bitcast=True)
            rounded = bits + 0x7FFF + ((bits >> 16) & 1)
            rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x00400000, rounded)
            return (rounded >> 16).to(tl.int16)
        else:
            return x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    elif ELEMENT == FP16:
        return x.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def dot_operand(raw, ELEMENT: tl.constexpr, WIDE: tl.constexpr):
    """int16 -> what tl.dot takes: the element's own type, or fp32 where the interpreter multiplies bf16 words as integers (WIDE)."""
    if WIDE:
        return to_float(raw, ELEMENT)
    elif ELEMENT == BF16:
        return raw.to(tl.bfloat16, bitcast=True)
    else:
        return raw.to(tl.float16, bitcast=True)
