// One tile of 16 tokens: scores, probabilities against a stale reference, and their product with the values, added up.
// The codes' mean is taken off once a round of STAGES tiles, from the sum of the rounded probabilities that one more mma keeps
#pragma once
#include "codes.cuh"

struct Accumulators {
    float o[NT][MM][4];
    float ps[NT][4];  // sum of the rounded probabilities since the last flush (columns 0 and 1)
    float m[NT][2], l[NT][2], z[NT][2];
};

__device__ __forceinline__ void flush(Accumulators &s) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
#pragma unroll
        for (int m = 0; m < MM; m++) {
            float lo = -MID * 5.9604644775390625e-8f * (1 << place(2 * m)), hi = -MID * 5.9604644775390625e-8f * (1 << place(2 * m + 1));
            s.o[t][m][0] = fmaf(lo, s.ps[t][0], s.o[t][m][0]);
            s.o[t][m][1] = fmaf(lo, s.ps[t][1], s.o[t][m][1]);
            s.o[t][m][2] = fmaf(hi, s.ps[t][0], s.o[t][m][2]);
            s.o[t][m][3] = fmaf(hi, s.ps[t][1], s.o[t][m][3]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) s.ps[t][j] = 0.f;
    }
}

// Where a lane reads in stage 0 (key codes, value codes of two tokens, scalars), and how many bytes a token is from the next.
struct Lane {
    const unsigned char *pk, *pv0, *pv1, *pks, *pvs;
    int kt, vt, kst, vst;
    int row;  // its first token of K
    uint32_t lane4;
};

// at: bytes from stage 0. n, floor_token: the sequence's tokens and the first that is seen; tiles in [whole0, whole1) have no invalid one.
__device__ __forceinline__ void attend_tile(
    const Params &p, const Lane &lane, int at, int tile, int n, int floor_token, int whole0, int whole1,
    const uint32_t (&q)[NT][QD / 2], const float (&fc)[NT][2], Accumulators &s) {
    // scores
    uint32_t k0[K_WORDS], k1[K_WORDS];
    load_bits<K_CHUNK, K_ALIGN>(lane.pk + at, k0);
    load_bits<K_CHUNK, K_ALIGN>(lane.pk + at + 8 * lane.kt, k1);
    float x[NT][4], y[NT][4], norm[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) x[t][j] = y[t][j] = 0.f;
    __half2 sq0 = __float2half2_rn(0.f), sq1 = sq0;
#pragma unroll
    for (int j = 0; j < QD / 2; j += 2) {
        const uint32_t a0 = key_pair(k0, j, lane.lane4), a1 = key_pair(k1, j, lane.lane4), a2 = key_pair(k0, j + 1, lane.lane4), a3 = key_pair(k1, j + 1, lane.lane4);
        if constexpr (ROTATED && !FOLDED) {
            sq0 = __hfma2(*(const __half2 *)&a0, *(const __half2 *)&a0, sq0);
            sq1 = __hfma2(*(const __half2 *)&a1, *(const __half2 *)&a1, sq1);
            sq0 = __hfma2(*(const __half2 *)&a2, *(const __half2 *)&a2, sq0);
            sq1 = __hfma2(*(const __half2 *)&a3, *(const __half2 *)&a3, sq1);
        }
#pragma unroll
        for (int t = 0; t < NT; t++) mma16((j & 2) ? y[t] : x[t], a0, a1, a2, a3, q[t][j], q[t][j + 1]);
    }
    float rs0 = 1.f, rs1 = 1.f;
    if constexpr (ROTATED) {
        rs0 = __half2float(*reinterpret_cast<const __half *>(lane.pks + at));
        rs1 = __half2float(*reinterpret_cast<const __half *>(lane.pks + at + 8 * lane.kst));
        if constexpr (!FOLDED) {
            mma8(norm, *(uint32_t *)&sq0, *(uint32_t *)&sq1, 0x3c003c00u);  // lane.row sums over the four lanes, in fp32
            rs0 *= rsqrt_fast(norm[0]);
            rs1 *= rsqrt_fast(norm[2]);
        }
    }
    // value scalars; a slot is only 2-byte aligned
    float vs0, vs1, vz0, vz1;
    {
        const __half *a = reinterpret_cast<const __half *>(lane.pvs + at), *e = reinterpret_cast<const __half *>(lane.pvs + at + 8 * lane.vst);
        if constexpr (SLOTS) {
            vs0 = __half2float(a[0]); vz0 = __half2float(a[1]); vs1 = __half2float(e[0]); vz1 = __half2float(e[1]);
        } else {
            float2 u = __half22float2(*reinterpret_cast<const __half2 *>(a)), v = __half22float2(*reinterpret_cast<const __half2 *>(e));
            vs0 = u.x; vz0 = u.y; vs1 = v.x; vz1 = v.y;
        }
    }
    vz0 = fmaf(MID, vs0, vz0);
    vz1 = fmaf(MID, vs1, vz1);
    const bool edge = tile >= whole1 || tile < whole0;
    bool bad0 = false, bad1 = false;
    if (edge) {  // what lies in invalid rows may be anything, NaN too
        const int t = tile * TILE + lane.row;
        bad0 = t >= n || t < floor_token;
        bad1 = t + 8 >= n || t + 8 < floor_token;
        if (bad0) vs0 = vz0 = rs0 = 0.f;
        if (bad1) vs1 = vz1 = rs1 = 0.f;
    }
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[t][j] = (x[t][j] + y[t][j]) * (j < 2 ? rs0 : rs1);
            if constexpr (SOFTCAP) x[t][j] = p.softcap * 1.4426950408889634f * tanhf(x[t][j] * fc[t][j & 1] / p.softcap);
        }
    // the logits in units of log2 are x * gain: probabilities against a stale reference, renewed only when they would leave fp16's
    // comfortable range
    float e[NT][4], w[NT][4];
    bool fine = true;
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float gain = SOFTCAP ? 1.f : fc[t][j & 1];
            e[t][j] = exp2_fast(fmaf(x[t][j], gain, -s.m[t][j & 1]));
            w[t][j] = e[t][j] * (j < 2 ? vs0 : vs1);
            fine = fine && fmaf(e[t][j], 8.6736174e-19f, w[t][j]) <= CEILING;  // 2^-60: keeps e finite where the scale is 0
        }
    if (!__all_sync(~0u, fine)) {
        const float g0 = bad0 ? -INFINITY : log2_fast(fmaxf(vs0, 5.9604645e-8f)), g1 = bad1 ? -INFINITY : log2_fast(fmaxf(vs1, 5.9604645e-8f));
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float gain = SOFTCAP ? 1.f : fc[t][j];
                float top = fmaxf(fmaf(x[t][j], gain, g0), fmaf(x[t][j + 2], gain, g1)) - HEADROOM;
#pragma unroll
                for (int o = 4; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
                top = fmaxf(fmaxf(top, s.m[t][j]), -1e30f);
                const float down = exp2_fast(s.m[t][j] - top);
                s.m[t][j] = top;
                s.l[t][j] *= down;
                s.z[t][j] *= down;
                s.ps[t][j] *= down;
#pragma unroll
                for (int m = 0; m < MM; m++) { s.o[t][m][j] *= down; s.o[t][m][j + 2] *= down; }
                e[t][j] = exp2_fast(fmaf(x[t][j], gain, -top));
                e[t][j + 2] = exp2_fast(fmaf(x[t][j + 2], gain, -top));
                w[t][j] = e[t][j] * vs0;
                w[t][j + 2] = e[t][j + 2] * vs1;
            }
    }
    if (edge) {
#pragma unroll
        for (int t = 0; t < NT; t++) {
            if (bad0) e[t][0] = e[t][1] = 0.f;
            if (bad1) e[t][2] = e[t][3] = 0.f;
            if (bad0) w[t][0] = w[t][1] = 0.f;
            if (bad1) w[t][2] = w[t][3] = 0.f;
        }
    }
    uint32_t pb[NT][2];
#pragma unroll
    for (int t = 0; t < NT; t++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            s.l[t][j] += e[t][j] + e[t][j + 2];
            s.z[t][j] = fmaf(e[t][j], vz0, fmaf(e[t][j + 2], vz1, s.z[t][j]));
        }
        pb[t][0] = transpose8x8(pack_half2(w[t][0], w[t][1]));
        pb[t][1] = transpose8x8(pack_half2(w[t][2], w[t][3]));
        mma16(s.ps[t], 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, pb[t][0], pb[t][1]);
    }
    // output
    uint32_t va[V_WORDS], vb[V_WORDS], vc[V_WORDS], vd[V_WORDS];
    load_bits<V_CHUNK, V_ALIGN>(lane.pv0 + at, va);
    load_bits<V_CHUNK, V_ALIGN>(lane.pv1 + at, vb);
    load_bits<V_CHUNK, V_ALIGN>(lane.pv0 + at + 8 * lane.vt, vc);
    load_bits<V_CHUNK, V_ALIGN>(lane.pv1 + at + 8 * lane.vt, vd);
#pragma unroll
    for (int m = 0; m < MM; m++) {
        const uint32_t a0 = value_pair(va, vb, 2 * m), a1 = value_pair(va, vb, 2 * m + 1);
        const uint32_t a2 = value_pair(vc, vd, 2 * m), a3 = value_pair(vc, vd, 2 * m + 1);
#pragma unroll
        for (int t = 0; t < NT; t++) mma16(s.o[t][m], a0, a1, a2, a3, pb[t][0], pb[t][1]);
    }
}
