// A sequence's partial result: written out, or merged with those of the other groups of its block.
#pragma once
#include "tile.cuh"

// part [NT * 8, D], ml [NT * 8, 2]: a kv head's place of one group.
__device__ __forceinline__ void write_result(const Params &p, const Accumulators &s, int r, int c, float *part, float *ml) {
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float l = s.l[t][j], z = s.z[t][j];
#pragma unroll
            for (int o = 4; o < 32; o <<= 1) {
                l += __shfl_xor_sync(~0u, l, o);
                z += __shfl_xor_sync(~0u, z, o);
            }
            const int g = t * 8 + 2 * c + j;
            if (g < p.group) {
                float *o = part + g * D + r * (D / 8);
#pragma unroll
                for (int m = 0; m < MM; m += 2) {
                    float4 v;
                    v.x = fmaf(s.o[t][m][j], 16777216.f / (1 << place(2 * m)), z);
                    v.y = fmaf(s.o[t][m][j + 2], 16777216.f / (1 << place(2 * m + 1)), z);
                    v.z = fmaf(s.o[t][m + 1][j], 16777216.f / (1 << place(2 * m + 2)), z);
                    v.w = fmaf(s.o[t][m + 1][j + 2], 16777216.f / (1 << place(2 * m + 3)), z);
                    *reinterpret_cast<float4 *>(o + 2 * m) = v;
                }
                if (r == 0) *reinterpret_cast<float2 *>(ml + g * 2) = make_float2(s.m[t][j], l);
            }
        }
}

// merging [active, kv heads, NT * 8, D] and merging_ml [.., 2] in shared memory: this warp's query heads, into p.part and p.ml from `place0` on.
__device__ __forceinline__ void merge_block(
    const Params &p, const float *merging, const float *merging_ml, int active, int mine, int head, int lane, long long place0) {
    const int hk = p.kv_heads;
    for (int g = mine; g < p.group; g += active) {  // this warp's query heads; the block's result stands in its first group's place
        float top = -INFINITY, l = 0.f, o[PER_LANE];
        for (int i = 0; i < active; i++) top = fmaxf(top, merging_ml[((i * hk + head) * NT * 8 + g) * 2]);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) o[k] = 0.f;
        for (int i = 0; i < active; i++) {
            const int at = (i * hk + head) * NT * 8 + g;
            const float w = exp2_fast(merging_ml[at * 2] - top);
            l = fmaf(w, merging_ml[at * 2 + 1], l);
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) o[k] = fmaf(w, merging[at * D + lane * PER_LANE + k], o[k]);
        }
        const long long at = place0 + g;
#pragma unroll
        for (int k = 0; k < PER_LANE; k += 2) *reinterpret_cast<float2 *>(p.part + at * D + lane * PER_LANE + k) = make_float2(o[k], o[k + 1]);
        if (lane == 0) *reinterpret_cast<float2 *>(p.ml + at * 2) = make_float2(top, l);
    }
}
