// A lane's share of a token's packed codes, in shared memory -> fp16 pairs in registers.
//   key codes   -> fp16 pairs by a table in shared memory, one copy per lane (bank = lane, never a conflict): one PRMT makes the address
//                  (byte * 256 + lane * 4), one LDS gives the pair of centroids
//   value codes -> fp16 subnormals: code << s as it stands is code * 2^(s-24), exact in the tensor core; one LOP3 for two codes.
#pragma once
#include "ptx.cuh"

// BYTES bytes at a shared address that is a multiple of ALIGN, as little-endian words (bytes past the end are whatever follows).
template <int BYTES, int ALIGN>
__device__ __forceinline__ void load_bits(const unsigned char *p, uint32_t (&out)[(BYTES + 3) / 4]) {
    constexpr int W = (BYTES + 3) / 4;
    if constexpr (ALIGN >= 16) {
#pragma unroll
        for (int i = 0; i < W; i += 4) {
            uint4 x = *reinterpret_cast<const uint4 *>(p + 4 * i);
            out[i] = x.x; out[i + 1] = x.y; out[i + 2] = x.z; out[i + 3] = x.w;
        }
    } else if constexpr (ALIGN == 8) {
#pragma unroll
        for (int i = 0; i < W; i += 2) {
            uint2 x = *reinterpret_cast<const uint2 *>(p + 4 * i);
            out[i] = x.x; out[i + 1] = x.y;
        }
    } else if constexpr (ALIGN == 4) {
#pragma unroll
        for (int i = 0; i < W; i++) out[i] = *reinterpret_cast<const uint32_t *>(p + 4 * i);
    } else {
        constexpr int L = (BYTES + 4 - ALIGN + 3) / 4;  // aligned words that can hold part of it
        uint32_t a = shared_address(p), shift = (a & 3) * 8, w[L];
        const uint32_t *base = reinterpret_cast<const uint32_t *>(p - (a & 3));
#pragma unroll
        for (int i = 0; i < L; i++) w[i] = base[i];
#pragma unroll
        for (int i = 0; i < W; i++) out[i] = __funnelshift_r(w[i], i + 1 < L ? w[i + 1] : 0u, shift);
    }
}

// Bits [bit, bit + 16) or more of a lane's words; bit is a constant after unrolling.
template <int W>
__device__ __forceinline__ uint32_t bits_at(const uint32_t (&w)[W], int bit) {
    int i = bit >> 5, s = bit & 31;
    if (s == 0) return w[i];
    return i + 1 < W ? __funnelshift_r(w[i], w[i + 1], s) : w[i] >> s;
}

// The j-th pair of keys (dimensions 2j, 2j + 1 of the lane's quarter) as fp16.
__device__ __forceinline__ uint32_t key_pair(const uint32_t (&w)[K_WORDS], int j, uint32_t lane4) {
    if constexpr (KB == 4) {
        return table(__byte_perm(w[j >> 2], lane4, 0x5504 | ((j & 3) << 4)));
    } else if constexpr (KB == 3) {
        int bit = 6 * j, i = bit >> 5, s = bit & 31;
        uint32_t x;  // the six bits at bit 8
        if (s + 6 > 32) x = __funnelshift_r(w[i], w[i + 1 < K_WORDS ? i + 1 : i], s - 8);
        else if (s >= 8) x = w[i] >> (s - 8);
        else x = w[i] << (8 - s);
        return table((x & 0x3f00u) | lane4);
    } else {
        uint32_t h;
        uint16_t b = (uint16_t)(w[j >> 1] >> (16 * (j & 1)));
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(b));
        return h;
    }
}

// Codes of value dimension i (of the lane's eighth) for two tokens, in fp16 units of 2^(place(i) - 24).
__device__ __forceinline__ uint32_t value_pair(const uint32_t (&a)[V_WORDS], const uint32_t (&b)[V_WORDS], int i) {
    if constexpr (VB == 4) {
        uint32_t u = __byte_perm(a[i >> 3], b[i >> 3], (i & 4) ? 0x7632 : 0x5410);
        if (i & 2) u >>= 8;
        return u & ((i & 1) ? 0x00f000f0u : 0x000f000fu);
    } else {
        int bit = 9 * (i / 3);
        uint32_t u = __byte_perm(bits_at(a, bit), bits_at(b, bit), 0x5410);
        return u & (0x00070007u << place(i));
    }
}
