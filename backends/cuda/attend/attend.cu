// Paged decode attention directly over TurboQuant pages, for Hopper and later (mma.sync, cp.async.bulk, one warp = one stream of blocks).
// One build serves one configuration (config.cuh). This file is its plain C interface; pages.cuh is the first launch, merge.cuh the second.
//
// A tile is 16 tokens of one kv head. Both products put tokens or dimensions on the m = 16 side of mma.m16n8k16 and the query heads on the
// n = 8 side, so a group of 8 query heads wastes nothing:
//   scores  S[token, head] = K[token, dim] . q[dim, head]      k = dimensions, in any order that the query shares: no shuffle
//   output  O[dim, head]   = V^T[dim, token] . P[token, head]  k = tokens, in any order that P shares
// A lane is (r, c) = (lane / 4, lane % 4). For K it owns tokens rho(r), rho(r) + 8 and the quarter c of the dimensions; for V it owns the
// eighth r of the dimensions and tokens rho(2c), rho(2c + 1) and those + 8.
#include "merge.cuh"
#include "pages.cuh"

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
