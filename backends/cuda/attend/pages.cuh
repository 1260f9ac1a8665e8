// The first launch: each warp streams its tiles of one kv head through a ring in shared memory and attends to them.
#pragma once
#include "queries.cuh"
#include "result.cuh"
#include "share.cuh"

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
    int *sums = reinterpret_cast<int *>(smem + TABLE_BYTES + 256);
    const int total = sum_tiles(p, lane, warp, sums, reinterpret_cast<int *>(smem + TABLE_BYTES));
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
    const Lane places = {
        ring + k_at + row * kt + c * K_CHUNK, ring + v_at + vrow0 * vt + r * V_CHUNK, ring + v_at + vrow1 * vt + r * V_CHUNK,
        ring + ks_at + row * kst, ring + vs_at + row * vst, kt, vt, kst, vst, row, lane4};
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

        uint32_t q[NT][QD / 2];
        float fc[NT][2];
        load_queries(p, b, head, r, c, q, fc);

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
                attend_tile(p, places, at, tile, n, floor_token, whole0, whole1, q, fc, s);
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
        write_result(p, s, r, c, part, ml);
        if (together) {
            asm volatile("bar.sync 1, %0;" ::"r"(active * hk * 32) : "memory");
            merge_block(p, merging, merging_ml, active, mine, head, lane, ((long long)(grp0 + b) * hk + head) * (NT * 8));
        }
    }
}
