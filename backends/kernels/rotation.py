"""The Hadamard rotation of keys: a butterfly in the reference's order, or +-1 products on the matrix units; and bucketising after it."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def butterfly(x, T: tl.constexpr, D: tl.constexpr):
    """fp32 [T, D] times Sylvester's matrix of +-1: pairs (i, i + h) -> (a + b, a - b) for h = 1, 2, 4, ... D / 2, in this order."""
    for level in tl.static_range(10):
        if (1 << level) < D:
            pairs = tl.permute(tl.reshape(x, [T, D // (2 << level), 2, 1 << level]), [0, 1, 3, 2])
            a, b = tl.split(pairs)
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 1, 3, 2]), [T, D])
    return x


@triton.jit
def sum_of_squares(x, T: tl.constexpr, D: tl.constexpr):
    """fp32 [T, D] -> fp32 [T]: squares, then their sum by halving, s[:h] + s[h:]."""
    s = x * x
    for level in tl.static_range(10):
        if (2 << level) <= D:
            # A sum of two has one order; a split would make Intel's compiler bring whole rows to every thread.
            s = tl.sum(tl.reshape(s, [T, 2, D >> (level + 1)]), 1)
    return tl.reshape(s, [T])


@triton.jit
def neighbours(x):
    """The next fp32 numbers above and below positive x."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 1).to(tl.float32, bitcast=True), (bits - 1).to(tl.float32, bitcast=True)


@triton.jit
def corrected_root(x, r):
    """The square roots, correctly rounded, of fp32 x from 2**-60 on; r: roots that may be some units off.

    One correction, then the exact rest says whether the root lies past the middle to a neighbour. Needs fma with a single rounding.
    """
    r = tl.fma(tl.fma(-r, r, x), 0.5 / r, r)
    above, below = neighbours(r)
    rest = tl.fma(-r, r, x)
    return tl.where(rest > r * (above - r), above, tl.where(rest <= r * (below - r), below, r))


@triton.jit
def corrected_reciprocal(x, q):
    """1 / x, correctly rounded, of fp32 x from 1e-20 to 1e20; q: quotients that may be some units off. As corrected_root."""
    q = tl.fma(tl.fma(-q, x, 1.0), q, q)
    above, below = neighbours(q)
    rest = tl.fma(-q, x, 1.0)
    return tl.where(rest > x * ((above - q) * 0.5), above, tl.where(rest < x * ((below - q) * 0.5), below, q))


@triton.jit
def root(x, SOFT: tl.constexpr):
    """fp32 [T], not negative -> the square roots, correctly rounded.

    SOFT: from the device's own, corrected: Intel's sqrt_rn goes through fp64, which Arc cards do not have.
    """
    if SOFT:
        small = x < 2.0**-60
        y = tl.where(small, x * 2.0**64, x)
        r = tl.where(y == 0, 0.0, corrected_root(y, tl.sqrt(y)))
        return tl.where(small, r * 2.0**-32, r)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def reciprocal(x, SOFT: tl.constexpr):
    """fp32 [T], from 1e-20 to 1e20 -> 1 / x, correctly rounded. SOFT: as for root."""
    if SOFT:
        return corrected_reciprocal(x, 1.0 / x)
    else:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def quotient(x, scale, SOFT: tl.constexpr):
    """fp32 [T, D] / one fp32 scale, correctly rounded.

    SOFT: from a product with the scale's correctly rounded reciprocal by one correction, exact by Markstein's theorem; Intel's div_rn
    takes some hundred instructions for an element. What is past all codings (2**100), and a zero, stay as the product has them.
    """
    if SOFT:
        inverse = reciprocal(scale, SOFT)
        q = x * inverse
        return tl.where((tl.abs(q) < 2.0**100) & (q != 0.0), tl.fma(tl.fma(-q, scale, x), inverse, q), q)
    else:
        return tl.div_rn(x, scale + tl.zeros_like(x))


@triton.jit
def bucketise(unit, midpoints, BITS: tl.constexpr):
    """fp32 [T, D] -> int32 [T, D]: how many of the 2**BITS - 1 midpoints (fp32 in memory) each element reaches."""
    code = tl.zeros(unit.shape, tl.int32)
    for i in tl.static_range((1 << BITS) - 1):
        code += (unit >= tl.load(midpoints + i)).to(tl.int32)
    return code


@triton.jit
def bucketise_smooth(y, inverse, p0, p1, p2, p3, p4, p5, p6, LIMIT: tl.constexpr, BITS: tl.constexpr):
    """The same for y * inverse in units of sigma, by an odd polynomial f with f(m_i) = i at every midpoint, on the FMA units.

    Twelve float operations where comparisons need twice as many slots on the half-rate units. f is increasing, so only elements within
    its rounding error of a midpoint can get the neighbouring code. Returns int32 whose low bits are the code, above 0x4b400000.
    """
    u = tl.clamp(y * inverse, -LIMIT, LIMIT)
    s = u * u
    if BITS == 4:
        q = tl.fma(s, p6, p5)
        q = tl.fma(s, q, p4)
        q = tl.fma(s, q, p3)
        q = tl.fma(s, q, p2)
    else:
        q = p2 + tl.zeros_like(s)
    q = tl.fma(s, q, p1)
    q = tl.fma(s, q, p0)
    # Nearest integer of f - 1/2, upwards at f = 0 because 2**(BITS - 1) is even.
    f = tl.fma(u, q, -0.5) + (12582912.0 + (1 << (BITS - 1)))
    return f.to(tl.int32, bitcast=True)


@triton.jit
def butterfly_parts(y0, y1, y2, y3, PARTS: tl.constexpr):
    """The last levels of the butterfly: products of 2 or 4 parts of a vector -> the parts of the rotated vector."""
    if PARTS == 2:
        return y0 + y1, y0 - y1, y2, y3
    else:
        s0 = y0 + y1
        s1 = y0 - y1
        s2 = y2 + y3
        s3 = y2 - y3
        return s0 + s2, s1 + s3, s0 - s2, s1 - s3


@triton.jit
def parts_squared(y0, y1, y2, y3, PARTS: tl.constexpr):
    """Sum of squares of a vector in parts, fp32 [T]."""
    if PARTS == 2:
        return tl.sum(y0 * y0 + y1 * y1, 1)
    else:
        return tl.sum((y0 * y0 + y1 * y1) + (y2 * y2 + y3 * y3), 1)


@triton.jit
def join_quarters(a, b, c, d, T: tl.constexpr, N: tl.constexpr):
    """Four tiles [T, N] side by side: [T, 4 * N]."""
    return tl.reshape(tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), [0, 2, 3, 1]), [T, 4 * N])


@triton.jit
def join_halves(a, b, T: tl.constexpr, N: tl.constexpr):
    """Two tiles [T, N] side by side: [T, 2 * N]."""
    return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [T, 2 * N])
