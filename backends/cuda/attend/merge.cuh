// The second launch: partial results of the groups that share a sequence, weighed and added.
#pragma once
#include "share.cuh"

constexpr int MERGE_WARPS = 16;

// `share` warps per (sequence, query head): the partial results of the groups that share the sequence, weighed and added.
// BATCH results are loaded at once: more hide latency where results are many, fewer leave room for more warps where sequences are many.
template <int BATCH>
__global__ void __launch_bounds__(MERGE_WARPS * 32, BATCH * D > 768 ? 1 : 2) attend_merge(const __grid_constant__ Params p, int share) {
    __shared__ float acc[MERGE_WARPS][D], sl[MERGE_WARPS], sm[MERGE_WARPS];
    __shared__ int2 pre[MERGE_WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, heads = p.kv_heads * p.group;
    const int item = (blockIdx.x * (blockDim.x >> 5) + warp) / share, part = warp % share;
    const bool some = item < p.batch * heads;
    const int b = some ? item / heads : 0, hq = item - b * heads, head = hq / p.group, g = hq - head * p.group;
    const int b0 = min(blockIdx.x * (int)(blockDim.x >> 5) / share / heads, p.batch - 1);  // of this block's first item
    int before = 0, total = 0;
    for (int i = threadIdx.x; i < p.batch; i += blockDim.x) {
        int n = tiles_of(p, p.lens[i]);
        total += n;
        if (i < b0) before += n;
    }
    before = __reduce_add_sync(~0u, before);
    total = __reduce_add_sync(~0u, total);
    if (lane == 0) pre[warp] = make_int2(before, total);
    __syncthreads();
    before = total = 0;
    for (int w = 0; w < (int)(blockDim.x >> 5); w++) {
        before += pre[w].x;
        total += pre[w].y;
    }
    for (int i = b0; i < b; i++) before += tiles_of(p, p.lens[i]);
    const int mine = some ? tiles_of(p, p.lens[b]) : 0;
    // Results of this sequence: those of the groups of a block that it shares with another sequence, at either end, and one of each block
    // between, in its first group's place.
    int g0 = 0, left = 0, block0 = 0, between = 0, right0 = 0, right = 0, active = 1;
    if (mine > 0) {
        const int groups = groups_used(p, total);
        active = (groups + p.blocks - 1) / p.blocks;
        g0 = (int)(((long long)(before + 1) * groups - 1) / total);
        const int g1 = (int)(((long long)(before + mine) * groups - 1) / total);
        if (active == 1) left = g1 - g0 + 1;
        else {
            const int c0 = g0 / active, c1 = g1 / active;
            const bool all0 = (int)((long long)total * (c0 * active) / groups) >= before && (int)((long long)total * ((c0 + 1) * active) / groups) <= before + mine;
            const bool all1 = (int)((long long)total * (c1 * active) / groups) >= before && (int)((long long)total * ((c1 + 1) * active) / groups) <= before + mine;
            if (!all0) left = min(g1, c0 * active + active - 1) - g0 + 1;
            block0 = c0 + !all0;
            between = c1 - block0 + 1;
            if (!all1 && c1 > c0) { right0 = c1 * active; right = g1 - right0 + 1; between--; }
            if (!all0 && c1 == c0) between = 0;
        }
    }
    const int count = left + between + right;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    float m = -INFINITY, l = 0.f, o[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) o[i] = 0.f;
    const long long step = (long long)p.kv_heads * (NT * 8), base = ((long long)b * p.kv_heads + head) * (NT * 8) + g;
    for (int i0 = part; i0 < count; i0 += BATCH * share) {
        float2 ml[BATCH];
        float v[BATCH][PER_LANE];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const int i = i0 + k * share;
            ml[k] = make_float2(-INFINITY, 0.f);
#pragma unroll
            for (int d = 0; d < PER_LANE; d++) v[k][d] = 0.f;
            if (i < count) {
                const int grp = i < left ? g0 + i : i < left + between ? (block0 + i - left) * active : right0 + i - left - between;
                const long long at = base + grp * step;
                ml[k] = *reinterpret_cast<const float2 *>(p.ml + at * 2);
#pragma unroll
                for (int d = 0; d < PER_LANE; d += 2) {
                    const float2 u = *reinterpret_cast<const float2 *>(p.part + at * D + lane * PER_LANE + d);
                    v[k][d] = u.x;
                    v[k][d + 1] = u.y;
                }
            }
        }
        float top = m;
#pragma unroll
        for (int k = 0; k < BATCH; k++) top = fmaxf(top, ml[k].x);
        const float down = exp2_fast(m - top);
        l *= down;
#pragma unroll
        for (int d = 0; d < PER_LANE; d++) o[d] *= down;
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const float w = exp2_fast(ml[k].x - top);
            l = fmaf(w, ml[k].y, l);
#pragma unroll
            for (int d = 0; d < PER_LANE; d++) o[d] = fmaf(w, v[k][d], o[d]);
        }
        m = top;
    }
    if (share > 1) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) acc[warp][lane * PER_LANE + i] = o[i];
        if (lane == 0) { sl[warp] = l; sm[warp] = m; }
        __syncthreads();
        if (part == 0) {
            float top = m;
            for (int w = 1; w < share; w++) top = fmaxf(top, sm[warp + w]);
            const float mine_down = m > -INFINITY ? exp2_fast(m - top) : 0.f;
            l *= mine_down;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) o[i] *= mine_down;
            for (int w = 1; w < share; w++) {
                const float down = sm[warp + w] > -INFINITY ? exp2_fast(sm[warp + w] - top) : 0.f;
                l = fmaf(down, sl[warp + w], l);
#pragma unroll
                for (int i = 0; i < PER_LANE; i++) o[i] = fmaf(down, acc[warp + w][lane * PER_LANE + i], o[i]);
            }
            m = top;
        }
    }
    if (!some || part) return;
    float scale = 1.f;
    if (p.sinks != nullptr) {  // one more logit, with no value
        const float k = p.sinks[hq] * 1.4426950408889634f, top = fmaxf(k, m);
        scale = exp2_fast(m - top);
        l = l * scale + exp2_fast(k - top);
        m = top;
    }
    scale = l > 0.f ? scale / l : 0.f;
    const long long at = (long long)b * p.o_b + (long long)hq * p.o_h + lane * PER_LANE;
#pragma unroll
    for (int i = 0; i < PER_LANE; i += 2) {
        if (p.q_bf16) *reinterpret_cast<__nv_bfloat162 *>(reinterpret_cast<__nv_bfloat16 *>(p.out) + at + i) = __floats2bfloat162_rn(o[i] * scale, o[i + 1] * scale);
        else *reinterpret_cast<__half2 *>(reinterpret_cast<__half *>(p.out) + at + i) = __floats2half2_rn(o[i] * scale, o[i + 1] * scale);
    }
    if (lane == 0 && p.lse != nullptr) p.lse[(long long)b * heads + hq] = l > 0.f ? (m + log2f(l)) * 0.6931471805599453f : -INFINITY;
}
