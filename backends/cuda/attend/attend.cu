// Paged decode attention directly over TurboQuant pages, for Hopper and later (mma.sync, cp.async.bulk, one warp = one stream of blocks).
//
// One build serves one configuration, chosen by macros (build.py gives them):
//   HEAD_DIM 64|128|256   KEY_BITS 8|4|3   VALUE_BITS 4|3   SLOTS 0 (planes) | 1 (vLLM's slots)
//   N_TILES 1|2 (query heads of a kv head, in eights)   FOLDED 0|1 (key scalar is norm/|centroids| instead of norm)   SOFTCAP 0|1
//   WARPS, STAGES, UNROLL (tiles of the main loop written out), HINT 1 (pages leave the L2 first),
//   ARRIVE_ALL 1 (every lane reports a stage as read: for compute-sanitizer, which does not follow __syncwarp)
//
// A tile is 16 tokens of one kv head. Both products put tokens or dimensions on the m = 16 side of mma.m16n8k16 and the query heads on the
// n = 8 side, so a group of 8 query heads wastes nothing:
//   scores  S[token, head] = K[token, dim] . q[dim, head]      k = dimensions, in any order that the query shares: no shuffle
//   output  O[dim, head]   = V^T[dim, token] . P[token, head]  k = tokens, in any order that P shares
// A lane is (r, c) = (lane / 4, lane % 4). For K it owns tokens rho(r), rho(r) + 8 and the quarter c of the dimensions; for V it owns the
// eighth r of the dimensions and tokens rho(2c), rho(2c + 1) and those + 8.
//   key codes   -> fp16 pairs by a table in shared memory, one copy per lane (bank = lane, never a conflict): one PRMT makes the address
//                  (byte * 256 + lane * 4), one LDS gives the pair of centroids
//   value codes -> fp16 subnormals: code << s as it stands is code * 2^(s-24), exact in the tensor core; one LOP3 for two codes.
//                  The codes' mean is taken off once a round of STAGES tiles, from the sum of the rounded probabilities that one more mma keeps
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

extern __shared__ __align__(1024) unsigned char smem[];

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float rsqrt_fast(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// A constant address in the load itself saves an addition for every look-up. Not volatile: the table never changes once it is written.
__device__ __forceinline__ uint32_t table(uint32_t at) { uint32_t y; asm("ld.shared.b32 %0, [%1 + %2];" : "=r"(y) : "r"(at), "n"(TABLE_AT)); return y; }
__device__ __forceinline__ uint32_t pack_half2(float a, float b) {
    __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<uint32_t *>(&h);
}
__device__ __forceinline__ uint32_t transpose8x8(uint32_t a) {
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}
__device__ __forceinline__ void mma16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}
__device__ __forceinline__ void barrier_init(uint32_t bar, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(n)); }
__device__ __forceinline__ void barrier_arrive(uint32_t bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void barrier_expect(uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
    asm volatile("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra.uni E;\nbra.uni W;\nE:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void *src, int bytes, uint32_t bar) {
#if HINT
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(dst), "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory");
    return;
#endif
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}

__device__ __forceinline__ bool elect() {
    uint32_t y;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(y));
    return y != 0;
}

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

__device__ __forceinline__ int first_tile(const Params &p, int n) { return p.window > 0 && n > p.window ? (n - p.window) / TILE : 0; }
__device__ __forceinline__ int tiles_of(const Params &p, int n) { return n > 0 ? (n + TILE - 1) / TILE - first_tile(p, n) : 0; }
// Groups that share `tiles` tiles: never an empty one; as many in every block once each block has one.
__device__ __forceinline__ int groups_used(const Params &p, int tiles) {
    int g = tiles / p.min_tiles;
    g = g < 1 ? 1 : g < p.groups ? g : p.groups;
    return g > p.blocks ? g / p.blocks * p.blocks : g;
}

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

__global__ void __launch_bounds__(WARPS * 32, 1) attend_pages(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), r = lane >> 2, c = lane & 3;
    const uint32_t lane4 = lane * 4;
    const int hk = p.kv_heads;
    asm volatile("griddepcontrol.launch_dependents;");

    if constexpr (ROTATED) {
        if (shared_address(smem) != TABLE_AT) __trap();
        for (int e = warp; e < TABLE_BYTES / 256; e += WARPS)
            *reinterpret_cast<uint32_t *>(smem + e * 256 + lane4) = pack_half2(p.centroids[e & ((1 << KB) - 1)], p.centroids[e >> KB]);
    }
    const int per_block = WARPS / hk, mine = warp / hk, head = warp - mine * hk;
    const int stage_bytes = SLOTS ? BLOCK_BYTES * hk : BLOCK_BYTES;
    const int ring_id = SLOTS ? mine : warp;
    unsigned char *ring = smem + TABLE_BYTES + (size_t)ring_id * STAGES * stage_bytes;
    // barriers stand after the rings: full and (slots) empty, STAGES each
    unsigned char *bars = smem + TABLE_BYTES + (SLOTS ? per_block : WARPS) * STAGES * stage_bytes;
    const uint32_t full = shared_address(bars) + ring_id * STAGES * 16, empty = full + STAGES * 8;
    if (mine < per_block && lane == 0 && (!SLOTS || head == 0)) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            if (SLOTS) barrier_init(empty + 8 * i, ARRIVE_ALL ? hk * 32 : hk);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // running sums of the sequences' tiles, in the rings' place until the first copy
    int *sums = reinterpret_cast<int *>(smem + TABLE_BYTES + 256);
    int *of_warp = reinterpret_cast<int *>(smem + TABLE_BYTES);
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
    // this group's share of all sequences' tiles, laid end to end
    const int groups = groups_used(p, total), active = (groups + p.blocks - 1) / p.blocks, grp0 = blockIdx.x * active, grp = grp0 + mine;
    const bool idle = mine >= per_block || mine >= active || grp >= groups || total == 0;
    const int lo = idle ? 0 : (int)((long long)total * grp / groups), hi = idle ? 0 : (int)((long long)total * (grp + 1) / groups);
    int b = 0, past = p.batch;  // the first sequence that ends after lo
    while (b < past) {
        const int mid = (b + past) >> 1;
        if (sums[mid] > lo) past = mid; else b = mid + 1;
    }
    b = __shfl_sync(~0u, b, 0);
    int before = b > 0 ? sums[b - 1] : 0;
    __syncthreads();
    if (lo >= hi) return;

    const int row = (r & 1) ? ((r >> 1) ^ 1) + 4 : r >> 1;  // rho(r): adjacent r differ in parity, rho(2c) = c, rho(2c + 1) = (c ^ 1) + 4
    const int vrow0 = c, vrow1 = (c ^ 1) + 4;
    const int token_bytes = SLOTS ? hk * SLOT : 0, head_at = SLOTS ? head * SLOT : 0;
    const int kt = SLOTS ? token_bytes : K_ROW, vt = SLOTS ? token_bytes : V_ROW, kst = SLOTS ? token_bytes : 2, vst = SLOTS ? token_bytes : 4;
    const int k_at = head_at, v_at = SLOTS ? head_at + K_ROW + K_SCALAR : TILE * K_ROW;
    const int ks_at = SLOTS ? head_at + K_ROW : TILE * (K_ROW + V_ROW);
    const int vs_at = SLOTS ? head_at + SLOT - 4 : TILE * (K_ROW + V_ROW + K_SCALAR);

    uint32_t full_bits = 0, empty_bits = ~0u;  // parity that each stage's barrier is waited for next
    // where this lane reads in stage 0
    const unsigned char *pk = ring + k_at + row * kt + c * K_CHUNK, *pv0 = ring + v_at + vrow0 * vt + r * V_CHUNK;
    const unsigned char *pv1 = ring + v_at + vrow1 * vt + r * V_CHUNK, *pks = ring + ks_at + row * kst, *pvs = ring + vs_at + row * vst;
    const uint8_t *kv = p.kv + (SLOTS ? 0 : head * p.head);
    const uint32_t page_bytes = (uint32_t)p.page;

    bool together = false;  // all groups of this block share one sequence: their results are merged here
    for (; b < p.batch && before < hi; b++) {
        const int n = __shfl_sync(~0u, p.lens[b], 0), f0 = first_tile(p, n), nt = tiles_of(p, n);
        const int t0 = f0 + (lo > before ? lo - before : 0);
        const int t1 = f0 + (hi - before < nt ? hi - before : nt);
        if (active > 1 && nt > 0) {
            const int all0 = (int)((long long)total * grp0 / groups), all1 = (int)((long long)total * (grp0 + active) / groups);
            together = all0 >= before && all1 <= before + nt;
        }
        before += nt;
        if (t0 >= t1) continue;
        const int floor_token = p.window > 0 && n > p.window ? n - p.window : 0;
        const int whole0 = (floor_token + TILE - 1) / TILE, whole1 = n / TILE;  // tiles in [whole0, whole1) have no invalid token

        // lane i of a round of STAGES tiles knows where the round's tile i lies; pages are looked up two rounds ahead
        const int *bt = p.table + (long long)b * p.table_b;
        const int last_entry = (t1 - 1) >> p.page_shift, sub_mask = (1 << p.page_shift) - 1;
        auto page_of = [&](int round) { return (uint32_t)bt[min((round + lane) >> p.page_shift, last_entry)]; };
        auto source = [&](uint32_t page, int round) {
            return (uint64_t)kv + (uint64_t)page * page_bytes + (uint32_t)(((round + lane) & sub_mask) * stage_bytes);
        };
        auto issue = [&](uint64_t sources, int i, int st) {  // asks for tile i of the round of `sources`
            const uint32_t a = __shfl_sync(~0u, (uint32_t)sources, i), h = __shfl_sync(~0u, (uint32_t)(sources >> 32), i);
            if (SLOTS) {
                barrier_wait(empty + 8 * st, (empty_bits >> st) & 1);
                empty_bits ^= 1u << st;
            }
            if (elect()) {
                barrier_expect(full + 8 * st, stage_bytes);
                bulk_copy(shared_address(ring) + st * stage_bytes, (const void *)((uint64_t)h << 32 | a), stage_bytes, full + 8 * st);
            }
        };
        // slots: one stage of slack among the warps that share the ring
        constexpr int FIRST = SLOTS ? STAGES - 1 : STAGES, AHEAD = SLOTS ? STAGES - 2 : STAGES;
        uint64_t here = source(page_of(t0), t0);
        uint32_t next_page = page_of(t0 + STAGES);
        if (!SLOTS || head == 0) {
#pragma unroll
            for (int i = 0; i < FIRST; i++)
                if (t0 + i < t1) issue(here, i, i);
        }

        // queries: rotate, scale each head into fp16's range, order as the keys' lanes have them
        uint32_t q[NT][QD / 2];
        float fc[NT][2];
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

        Accumulators s;
#pragma unroll
        for (int t = 0; t < NT; t++) {
#pragma unroll
            for (int m = 0; m < MM; m++)
#pragma unroll
                for (int j = 0; j < 4; j++) s.o[t][m][j] = 0.f;
#pragma unroll
            for (int j = 0; j < 4; j++) s.ps[t][j] = 0.f;
#pragma unroll
            for (int j = 0; j < 2; j++) { s.m[t][j] = -INFINITY; s.l[t][j] = 0.f; s.z[t][j] = 0.f; }
        }

        for (int round = t0; round < t1; round += STAGES) {
        const uint64_t there = source(next_page, round + STAGES);
        next_page = page_of(round + 2 * STAGES);
#pragma unroll TILES_AT_ONCE
        for (int st = 0; st < STAGES; st++) {
            const int tile = round + st;
            if (tile >= t1) break;
            const int at = st * stage_bytes;
            if (SLOTS && head == 0 && tile > t0 && tile + AHEAD < t1)
                issue(st + AHEAD < STAGES ? here : there, (st + AHEAD) % STAGES, (st + AHEAD) % STAGES);
            barrier_wait(full + 8 * st, (full_bits >> st) & 1);
            full_bits ^= 1u << st;

            // scores
            uint32_t k0[K_WORDS], k1[K_WORDS];
            load_bits<K_CHUNK, K_ALIGN>(pk + at, k0);
            load_bits<K_CHUNK, K_ALIGN>(pk + at + 8 * kt, k1);
            float x[NT][4], y[NT][4], norm[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int j = 0; j < 4; j++) x[t][j] = y[t][j] = 0.f;
            __half2 sq0 = __float2half2_rn(0.f), sq1 = sq0;
#pragma unroll
            for (int j = 0; j < QD / 2; j += 2) {
                const uint32_t a0 = key_pair(k0, j, lane4), a1 = key_pair(k1, j, lane4), a2 = key_pair(k0, j + 1, lane4), a3 = key_pair(k1, j + 1, lane4);
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
                rs0 = __half2float(*reinterpret_cast<const __half *>(pks + at));
                rs1 = __half2float(*reinterpret_cast<const __half *>(pks + at + 8 * kst));
                if constexpr (!FOLDED) {
                    mma8(norm, *(uint32_t *)&sq0, *(uint32_t *)&sq1, 0x3c003c00u);  // row sums over the four lanes, in fp32
                    rs0 *= rsqrt_fast(norm[0]);
                    rs1 *= rsqrt_fast(norm[2]);
                }
            }
            // value scalars; a slot is only 2-byte aligned
            float vs0, vs1, vz0, vz1;
            {
                const __half *a = reinterpret_cast<const __half *>(pvs + at), *e = reinterpret_cast<const __half *>(pvs + at + 8 * vst);
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
                const int t = tile * TILE + row;
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
            load_bits<V_CHUNK, V_ALIGN>(pv0 + at, va);
            load_bits<V_CHUNK, V_ALIGN>(pv1 + at, vb);
            load_bits<V_CHUNK, V_ALIGN>(pv0 + at + 8 * vt, vc);
            load_bits<V_CHUNK, V_ALIGN>(pv1 + at + 8 * vt, vd);
#pragma unroll
            for (int m = 0; m < MM; m++) {
                const uint32_t a0 = value_pair(va, vb, 2 * m), a1 = value_pair(va, vb, 2 * m + 1);
                const uint32_t a2 = value_pair(vc, vd, 2 * m), a3 = value_pair(vc, vd, 2 * m + 1);
#pragma unroll
                for (int t = 0; t < NT; t++) mma16(s.o[t][m], a0, a1, a2, a3, pb[t][0], pb[t][1]);
            }
            __syncwarp();
            if (SLOTS) {
                if (ARRIVE_ALL || lane == 0) barrier_arrive(empty + 8 * st);
            } else if (tile + AHEAD < t1) issue(there, st, st);
        }
        flush(s);
        here = there;
        }

        // the partial result of (group, sequence): its place is group + sequence, which never repeats along the tiles
        const long long place_at = ((long long)(grp + b) * hk + head) * (NT * 8);
        float *part = p.part + place_at * D, *ml = p.ml + place_at * 2;
        float *const merging = reinterpret_cast<float *>(smem + TABLE_BYTES);  // [active, kv heads, NT * 8, D] and then [.., 2]
        float *const merging_ml = merging + active * hk * NT * 8 * D;
        if (together) {
            asm volatile("bar.sync 1, %0;" ::"r"(active * hk * 32) : "memory");  // the rings are no longer needed by anyone
            part = merging + (mine * hk + head) * NT * 8 * D;
            ml = merging_ml + (mine * hk + head) * NT * 8 * 2;
        }
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
        if (together) {
            asm volatile("bar.sync 1, %0;" ::"r"(active * hk * 32) : "memory");
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
                const long long at = ((long long)(grp0 + b) * hk + head) * (NT * 8) + g;
#pragma unroll
                for (int k = 0; k < PER_LANE; k += 2) *reinterpret_cast<float2 *>(p.part + at * D + lane * PER_LANE + k) = make_float2(o[k], o[k + 1]);
                if (lane == 0) *reinterpret_cast<float2 *>(p.ml + at * 2) = make_float2(top, l);
            }
        }
    }
}

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

static int shared_bytes(int kv_heads) {
    int rings = SLOTS ? (WARPS / kv_heads) * kv_heads : WARPS, barriers = (SLOTS ? WARPS / kv_heads : WARPS) * STAGES * 16;
    int ring_bytes = rings * STAGES * BLOCK_BYTES + barriers, merge_bytes = (WARPS / kv_heads) * kv_heads * NT * 8 * (D + 2) * 4;
    return TABLE_BYTES + (ring_bytes > merge_bytes ? ring_bytes : merge_bytes);
}

// Blocks that the current device runs at once, each of WARPS / kv_heads groups of warps, or a negative CUDA error. Also raises the kernel's shared memory limit.
extern "C" int attend_blocks(int kv_heads) {
    if (kv_heads < 1 || kv_heads > WARPS) return -(int)cudaErrorInvalidValue;
    int dev = 0, sms = 0, most = 0;
    cudaError_t e = cudaGetDevice(&dev);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, dev);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev);
    // the limit, not this call's need: other numbers of kv heads share the kernel
    if (e == cudaSuccess) e = cudaFuncSetAttribute(attend_pages, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    if (e == cudaSuccess && shared_bytes(kv_heads) > most) e = cudaErrorInvalidValue;
    return e == cudaSuccess ? sms : -(int)e;
}

extern "C" int attend_launch(const Params *p, void *stream, int parts) {
    if (p->batch == 0) return 0;
    cudaStream_t st = (cudaStream_t)stream;
    cudaError_t e = cudaSuccess;
    if (parts & 1) {
        attend_pages<<<p->blocks, WARPS * 32, shared_bytes(p->kv_heads), st>>>(*p);
        e = cudaGetLastError();
    }
    if (e == cudaSuccess && (parts & 2)) {
        // a warp takes about eight results: those it loads at once
        const int items = p->batch * p->kv_heads * p->group, likely = p->blocks / p->batch + 2 * (p->groups / p->blocks) - 1;
        int share = 1;
        while (share < MERGE_WARPS && share * 8 < likely) share *= 2;
        const int warps = share < 8 ? 8 : share;
        cudaLaunchConfig_t cfg = {};
        cfg.gridDim = dim3((items * share + warps - 1) / warps);
        cfg.blockDim = dim3(warps * 32);
        cfg.stream = st;
        cudaLaunchAttribute at = {};
        at.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at.val.programmaticStreamSerializationAllowed = 1;
        cfg.attrs = &at;
        cfg.numAttrs = (parts & 1) ? 1 : 0;
        constexpr int MANY = D == 256 ? 4 : 8, FEW = D == 256 ? 3 : 6;
        e = share > 1 ? cudaLaunchKernelEx(&cfg, attend_merge<MANY>, *p, share) : cudaLaunchKernelEx(&cfg, attend_merge<FEW>, *p, share);
    }
    return (int)e;
}

extern "C" const char *attend_error(int code) { return cudaGetErrorString((cudaError_t)code); }
