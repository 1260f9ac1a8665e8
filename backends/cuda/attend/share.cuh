// Whose tiles are whose: all sequences' tiles laid end to end, an equal piece for each group of warps.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ int first_tile(const Params &p, int n) { return p.window > 0 && n > p.window ? (n - p.window) / TILE : 0; }
__device__ __forceinline__ int tiles_of(const Params &p, int n) { return n > 0 ? (n + TILE - 1) / TILE - first_tile(p, n) : 0; }
// Groups that share `tiles` tiles: never an empty one; as many in every block once each block has one.
__device__ __forceinline__ int groups_used(const Params &p, int tiles) {
    int g = tiles / p.min_tiles;
    g = g < 1 ? 1 : g < p.groups ? g : p.groups;
    return g > p.blocks ? g / p.blocks * p.blocks : g;
}

// Running sums of the sequences' tiles, for every thread of the block to read; they stand where the rings will. Returns the last.
__device__ __forceinline__ int sum_tiles(const Params &p, int lane, int warp, int *sums, int *of_warp) {
    int total = 0;
    for (int base = 0; base < p.batch; base += WARPS * 32) {
        const int i = base + threadIdx.x;
        int n = i < p.batch ? tiles_of(p, p.lens[i]) : 0;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int x = __shfl_up_sync(~0u, n, o);
            if (lane >= o) n += x;
        }
        __syncthreads();
        if (lane == 31) of_warp[warp] = n;
        __syncthreads();
        int all = 0;
        for (int w = 0; w < WARPS; w++) {
            const int x = of_warp[w];
            n += w < warp ? x : 0;
            all += x;
        }
        if (i < p.batch) sums[i] = total + n;
        total += all;
    }
    __syncthreads();
    return total;
}
