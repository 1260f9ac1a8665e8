// One kv head's queries of a sequence: rotated, scaled a head into fp16's range, in the order in which the keys' lanes have them.
#pragma once
#include "ptx.cuh"

// q: fp16 pairs of query head t * 8 + r, the lane's quarter of the dimensions. fc: what a score of heads 2c and 2c + 1 is multiplied with.
__device__ __forceinline__ void load_queries(const Params &p, int b, int head, int r, int c, uint32_t (&q)[NT][QD / 2], float (&fc)[NT][2]) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
        float x[QD];
        const int g = t * 8 + r;
        const long long at = (long long)b * p.q_b + (long long)(head * p.group + g) * p.q_h + c * QD;
#pragma unroll
        for (int i = 0; i < QD; i += 2) {
            float2 v = make_float2(0.f, 0.f);
            if (g < p.group) {
                if (p.q_bf16) v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(reinterpret_cast<const __nv_bfloat16 *>(p.q) + at + i));
                else v = __half22float2(*reinterpret_cast<const __half2 *>(reinterpret_cast<const __half *>(p.q) + at + i));
            }
            x[i] = v.x; x[i + 1] = v.y;
        }
        if constexpr (ROTATED) {
#pragma unroll
            for (int h = 1; h < QD; h <<= 1)
#pragma unroll
                for (int i = 0; i < QD; i++)
                    if (!(i & h)) { float u = x[i], v = x[i + h]; x[i] = u + v; x[i + h] = u - v; }
#pragma unroll
            for (int i = 0; i < QD; i++) { float y = __shfl_xor_sync(~0u, x[i], 1); x[i] = (c & 1) ? y - x[i] : x[i] + y; }
#pragma unroll
            for (int i = 0; i < QD; i++) { float y = __shfl_xor_sync(~0u, x[i], 2); x[i] = (c & 2) ? y - x[i] : x[i] + y; }
        }
        float top = 0.f;
#pragma unroll
        for (int i = 0; i < QD; i++) top = fmaxf(top, fabsf(x[i]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(top, 1e-30f);
        const float up = 256.f / top;
#pragma unroll
        for (int i = 0; i < QD / 2; i++) q[t][i] = pack_half2(x[2 * i] * up, x[2 * i + 1] * up);
        const float f = top * (1.f / 256.f) * p.scale_log2 * UNIT;
        fc[t][0] = __shfl_sync(~0u, f, 8 * c);
        fc[t][1] = __shfl_sync(~0u, f, 8 * c + 4);
    }
}
