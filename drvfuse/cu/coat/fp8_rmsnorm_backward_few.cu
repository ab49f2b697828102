// SPDX-License-Identifier: Apache-2.0
// The backward pass of FP8 RMSNorm of few rows, or with CENTRED of FP8 LayerNorm. It computes dw (and db) by columns
// and dx by rows, independently of each other. Each of these two computations reads all of x and g; the later one finds
// most of them in L2.
//
// Computes dx, dw and db by the formulas of fp8_rmsnorm_backward.cu, with the same operands.
//
// Division. The launch is not cooperative. Each of the B blocks has rows and columns.
//   dx  Team t of block b takes rows t * B + b, then every (B * TEAMS)-th row. Threads have the packs of a row as in
//       fp8_rmsnorm_backward.cu.
//   dw  A slice is 32 columns, 4 packs of 8. The last block takes slices 0, B, ..., the block before it slices 1, B +
//       1, ..., and so on. Thread t of a block has pack t % 4 of a slice, and rows t / 4, t / 4 + QUARTETS, ...; the
//       four threads with the same rows form a quartet.
//
// Storage. Registers: a thread's packs of one row, the next row, which is in flight, and the sums of its pack of a
// slice. Shared memory: w in fp32, the sums of the warps of a team, and the sums of the quartets of a slice.
//
// Order of sums. dw and db: quartet q adds rows q, q + QUARTETS, ... in order (fma), strand i of WARPS adds quartets i,
// i + WARPS, ..., and the strands are added in order; the result is rounded once. c1 and c2 as in
// fp8_rmsnorm_backward.cu. All operations are IEEE.
//
// Memory ordering. Blocks exchange no data and do not wait for one another. Warps of a block exchange sums through
// shared memory, with block barriers between stores and loads.
//
// Traffic. The global bytes are those of fp8_rmsnorm_backward.cu, except that x, its scales, g, rstd and mean are read
// twice and that there are no words which blocks exchange.
//
// PDL. With WEIGHTS_FIRST, which is for early triggers, a block reads w before the wait for the producer; everything
// else is read after the wait. A block triggers right after the wait (early_trigger) or after its last store.
#include "coat/backward_dx.cuh"

constexpr int SLICE = 32;                              // columns of a slice
constexpr int QUARTETS = THREADS / 4;                  // quartets of threads in a block
constexpr int WARPS = THREADS / 32;                    // warps of a block; also the strands into which a sum is divided
constexpr bool WEIGHTS_FIRST = DRVFUSE_WEIGHTS_FIRST;  // w is read before the wait for the producer
constexpr int BATCH = 4;                               // rows of a quartet whose loads are in flight at the same time

// Adds the rows of this thread's quartet (`threadIdx.x / 4`) for this thread's pack, which begins at `column`. Sets
// sums[0] to the sums for dw and, with CENTRED, sums[1] to those for db.
__device__ __forceinline__ void add_quartet(const BackwardParams& p, int column, float (&sums)[SUMS][WIDTH]) {
    clear(sums);
    const int valid = p.columns - column;
    for (int first = threadIdx.x / 4; first < p.segment_rows; first += BATCH * QUARTETS) {
        Octet pack[BATCH];
        Saved saved[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int row = first + k * QUARTETS;
            const bool wanted = row < p.segment_rows && valid > 0;
            load_octet(pack[k], Cursor(p, row, column), 0, wanted, valid);
            saved[k] = load_saved(p, row, wanted);
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            if (first + k * QUARTETS >= p.segment_rows || valid <= 0) break;
#pragma unroll
            for (int j = 0; j < WIDTH / 4; ++j) {
                float xhat[4], g[4];
                normalised(xhat, pack[k], j, saved[k]);
                gradient(g, pack[k], 2 * j);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums[0][4 * j + i] = __fmaf_rn(g[i], xhat[i], sums[0][4 * j + i]);
                    if constexpr (CENTRED) sums[1][4 * j + i] = __fadd_rn(sums[1][4 * j + i], g[i]);
                }
            }
        }
    }
}

// Adds the sums of all quartets, and stores dw and db of the slice that begins at column `first`. `sums` has this
// thread's results of add_quartet(), and `shared` has room for [SUMS][QUARTETS][SLICE] floats. Called by all threads of
// the block; contains block barriers.
__device__ __forceinline__ void store_slice(const BackwardParams& p, int first, float* shared,
                                            const float (&sums)[SUMS][WIDTH]) {
    const int warp = threadIdx.x / 32, column = first + threadIdx.x % SLICE;
#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
        float* quartets = shared + k * QUARTETS * SLICE;
        float4* own = reinterpret_cast<float4*>(quartets + threadIdx.x * WIDTH);
        own[0] = make_float4(sums[k][0], sums[k][1], sums[k][2], sums[k][3]);
        own[1] = make_float4(sums[k][4], sums[k][5], sums[k][6], sums[k][7]);
    }
    __syncthreads();
    float strand[SUMS] = {};
#pragma unroll
    for (int i = 0; i < QUARTETS / WARPS; ++i) {
#pragma unroll
        for (int k = 0; k < SUMS; ++k) {
            const float* quartets = shared + k * QUARTETS * SLICE;
            strand[k] = __fadd_rn(strand[k], quartets[(warp + i * WARPS) * SLICE + threadIdx.x % SLICE]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < SUMS; ++k) shared[k * THREADS + threadIdx.x] = strand[k];
    __syncthreads();
    if (warp < SUMS && column < p.columns) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) total = __fadd_rn(total, shared[warp * THREADS + i * 32 + threadIdx.x % SLICE]);
        store_scalar((warp == 0 ? p.dw : p.db) + column, total);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_backward_few(const BackwardParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    float4* weights = reinterpret_cast<float4*>(dynamic);
    float* shared = reinterpret_cast<float*>(weights) + PACKS * SPAN;  // [SUMS][QUARTETS][SLICE]
    __shared__ __align__(16) float warp_sums[2][TEAMS][SUMS][TEAM_WARPS];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int team = warp / TEAM_WARPS, member = threadIdx.x % TEAM_THREADS;
    const int column = member * WIDTH, rows = p.segment_rows, jump = gridDim.x * TEAMS;

    Weights<TEAM_THREADS> own;
    if constexpr (WEIGHTS_FIRST) {
        if (team == 0 && int(blockIdx.x) < rows) own.load(p, member);
    }
    enter_stream(p);
    int at = team * gridDim.x + blockIdx.x;
    Row row;
    Cursor from(p, at, column);
    load_row(row, from, at < rows, p, column, jump);
    Saved saved = load_saved(p, at, at < rows);
    const bool keeps = team == 0 && int(blockIdx.x) < rows;
    if (!WEIGHTS_FIRST && keeps) own.load(p, member);
    // The loads above are in flight while add_quartet() adds the rows of the block's first slice.
    int first = (gridDim.x - 1 - blockIdx.x) * SLICE;
    float sums[SUMS][WIDTH];
    add_quartet(p, first + threadIdx.x % 4 * WIDTH, sums);
    if (keeps) own.keep(weights, member);
    __syncthreads();
    const float inverse = __frcp_rn(float(p.columns));
    u32 set = 0;
    for (; at < rows; at += jump) {
        Products products;
        products.take(row, saved, weights, p.columns, member, [](int, int, float, float) {});
        const float rstd = saved.rstd;
        load_row(row, from, at + jump < rows, p, column, jump);
        saved = load_saved(p, at + jump, at + jump < rows);
        products.add_over_team(warp_sums[set], team, warp);
        set ^= 1;
        products.store(p.dx + i64(at) * p.columns + column, rstd, inverse, p.columns, member);
    }
    for (;;) {
        if (first < p.columns) store_slice(p, first, shared, sums);
        first += gridDim.x * SLICE;
        if (first >= p.columns) break;
        add_quartet(p, first + threadIdx.x % 4 * WIDTH, sums);
    }
    leave_stream(p);
}
