// What one build is: its macros, the sizes that follow from them, and a launch's parameters (build.py has both in Python).
//   HEAD_DIM 64|128|256   KEY_BITS 8|4|3   VALUE_BITS 4|3   SLOTS 0 (planes) | 1 (vLLM's slots)
//   N_TILES 1|2 (query heads of a kv head, in eights)   FOLDED 0|1 (key scalar is norm/|centroids| instead of norm)   SOFTCAP 0|1
//   WARPS, STAGES, UNROLL (tiles of the main loop written out), HINT 1 (pages leave the L2 first),
//   ARRIVE_ALL 1 (slots: every lane reports a stage as read, and not one of them after __syncwarp, which compute-sanitizer does not follow;
//   it costs nothing that can be measured)
#pragma once
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef KEY_BITS
#define KEY_BITS 4
#endif
#ifndef VALUE_BITS
#define VALUE_BITS 4
#endif
#ifndef SLOTS
#define SLOTS 0
#endif
#ifndef N_TILES
#define N_TILES 1
#endif
#ifndef FOLDED
#define FOLDED 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef WARPS
#define WARPS 16
#endif
#ifndef UNROLL
#define UNROLL 1
#endif
#ifndef ARRIVE_ALL
#define ARRIVE_ALL 0
#endif
#ifndef HINT
#define HINT 0
#endif
#ifndef STAGES
#define STAGES 4
#endif

constexpr int D = HEAD_DIM, KB = KEY_BITS, VB = VALUE_BITS, NT = N_TILES;
constexpr int TILES_AT_ONCE = UNROLL;
constexpr int TILE = 16;                             // tokens
constexpr int K_ROW = D * KB / 8, V_ROW = D * VB / 8;  // bytes of codes of a token
constexpr int K_SCALAR = KB == 8 ? 0 : 2, V_SCALAR = 4;
constexpr int SLOT = K_ROW + K_SCALAR + V_ROW + V_SCALAR;
constexpr int BLOCK_BYTES = TILE * SLOT;
constexpr int K_CHUNK = K_ROW / 4, V_CHUNK = V_ROW / 8;  // bytes that one lane owns of a token
constexpr int K_WORDS = (K_CHUNK + 3) / 4, V_WORDS = (V_CHUNK + 3) / 4;
constexpr int QD = D / 4;                            // dimensions of K that a lane owns
constexpr int MM = D / 16;                           // mma of the value product: each gives a lane dimensions 2m and 2m + 1 of its eighth
constexpr int TABLE_BYTES = KB == 8 ? 0 : (KB == 4 ? 256 : 64) * 256;
constexpr float MID = VB == 4 ? 7.5f : 3.5f;
constexpr float CEILING = 4096.f;                    // probabilities times value scale stay below this (fp16), and start at 2^HEADROOM
constexpr float HEADROOM = 4.f;
constexpr int PER_LANE = D / 32;                    // dimensions of an output that a lane merges
constexpr bool ROTATED = KB != 8;
constexpr float ROOT = D == 64 ? 8.f : D == 128 ? 11.313708498984761f : 16.f;
constexpr float UNIT = !ROTATED ? 1.f : FOLDED ? 1.f / D : 1.f / ROOT;  // of a score: the butterfly is not scaled, centroids are in 1/sqrt(D)
constexpr int TABLE_AT = 1024;                       // shared address of the table: where dynamic shared memory starts on sm_90

__host__ __device__ constexpr int low_power(int n) { return n & -n; }
__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int K_ALIGN = SLOTS ? least(low_power(K_CHUNK), 2) : least(low_power(K_CHUNK), 16);
constexpr int V_ALIGN = SLOTS ? least(low_power(V_CHUNK), 2) : least(low_power(V_CHUNK), 16);
// exponent that the place of value dimension i (within a lane's eighth) in its 16-bit window gives: code << place
__host__ __device__ constexpr int place(int i) { return VB == 4 ? 4 * (i & 1) : 3 * (i % 3); }

struct Params {
    const void *q;
    const uint8_t *kv;
    const int *table;
    const int *lens;
    float *part;   // [groups + batch, kv_heads, NT * 8, D] partial outputs, not divided by their sum
    float *ml;     // [groups + batch, kv_heads, NT * 8, 2] reference exponent (log2) and sum
    void *out;
    float *lse;    // natural logarithm
    const float *sinks;  // [Hq] or null
    long long q_b, q_h, o_b, o_h;  // elements
    long long page, head;          // bytes from page to page; planes: from kv head to kv head
    long long table_b;             // elements
    int batch, kv_heads, group, page_shift, window, q_bf16, groups, blocks, min_tiles;
    float scale_log2;              // softmax scale * log2(e) (SOFTCAP: softmax scale)
    float softcap;
    float centroids[16];           // in units of 1 / sqrt(D)
};
