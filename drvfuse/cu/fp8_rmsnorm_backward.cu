// SPDX-License-Identifier: Apache-2.0
// FP8 RMSNorm backward in one launch: x, its group scales and g are read once, dx is written once, dw summed in fp32.
// With CENTRED it is LayerNorm's, which has a mean, a second sum c2 of the row, and db; without WEIGHTED there are no
// w, dw and db, and so no words, no wait and no scratch. Few rows have a kernel of their own,
// fp8_rmsnorm_backward_few.cu.
//
// Layout: x [rows, columns] FP8 and GRADIENTS arrays g [rows, columns] bf16, each with a row stride; s_x bf16; w, rstd;
// dx bf16. The gradient is g[0] + g[1] + g[2], rounded to bf16 after each addition. Segment s of `segments` has the
// rows s, s + segments, ...; a block takes whole segments, so that all blocks are at neighbouring rows at any time. In
// a segment team t of TEAMS takes every TEAMS-th row from its t-th on, and each thread keeps fp32 sums of g * xhat for
// its PACKS packs of columns. Rows come through a ring in shared memory, or with RING 0 straight to registers: then a
// row's loads are issued as soon as the registers of the row before it are free, and cross the reduction of c1. Global
// bytes an element: 1 + 2 / QB of x (RING 0: 1 + 2 / 8), 2 GRADIENTS of g, 2 of dx; a row: 4 of rstd for each warp of a
// team; a column: w a block, 4 written, 4 read and 4 cleared a segment, dw.
//
// Order of dw: the rows of a team in turn (fma), the teams in turn, then strand i of STRANDS adds segments i, i +
// STRANDS, ... and the strands are added in turn; one rounding. c1: 8 elements of a pack in turn, packs, a butterfly
// over the lanes, the warps in turn, times 1 / columns. So all results have the same bits in every run and on every
// grid, and there are no locks. All operations are IEEE. A pack is 8 elements here, so that a warp's accesses of g and
// dx are 512 contiguous bytes: 32-byte strides would write each sector in two halves.
//
// Memory order: fp8_backward_sums.cuh.
// PDL: nothing is read before the wait; the trigger is right after it (early_trigger) or after the last store of dw.
// Grid: cooperative, at most one block a segment. The last block has the first segment: the first segments may have a
// row more, and the first blocks add up columns. Failure: scratch.cuh; then dw is not written.
#include "fp8_backward_ring.cuh"
#include "fp8_backward_sums.cuh"
#include "pdl.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_backward(const BackwardParams p) {
    extern __shared__ __align__(SLOT_ALIGNMENT) u8 dynamic[];
    u8* slots = dynamic;
    float4* weights = reinterpret_cast<float4*>(slots + TEAMS * RING * Ring::slot_bytes(p));
    float* shared = reinterpret_cast<float*>(weights) + PACKS * SPAN;  // teams' sums, then strands'
    __shared__ Mbarrier arrivals[TEAMS][RING + 1];
    __shared__ __align__(16) float warp_sums[2][TEAMS][SUMS][TEAM_WARPS];
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // so that the compiler knows it to be uniform
    const int team = warp / TEAM_WARPS, member = threadIdx.x % TEAM_THREADS;
    const int column = member * WIDTH;

    wait_for_producer();
    if (p.early_trigger) launch_dependents();
    ScratchUse use(p.scratch, WEIGHTED);
    const float inverse = __frcp_rn(float(p.columns));
    const i64 jump = i64(TEAMS) * p.segments;
    Ring ring(p, slots + team * RING * Ring::slot_bytes(p), arrivals[team], RING > 0 && member == 0);

    u32 turn = 0;
    for (int segment = gridDim.x - 1 - blockIdx.x; segment < p.segments; segment += gridDim.x) {
        const i64 first = segment + i64(team) * p.segments;
        const int count = (p.segment_rows + (segment < p.longer) - team + TEAMS - 1) / TEAMS;  // of rows for this team
        Cursor from(p, first, column);
        u16* to = p.dx + first * p.columns + column;
        Row row;
        if constexpr (RING > 0) {
            ring.begin(first, jump, count);
        } else {
            load_row(row, from, count > 0, p, column, jump);
        }
        Saved some, later = load_saved(p, first + lane * jump, lane < count);  // of 32 rows: lane l has the l-th's
        float dw[PACKS][WIDTH], db[PACKS][WIDTH];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) dw[i][j] = 0.0f, db[i][j] = 0.0f;
        }
        if (segment + blockIdx.x + 1 == gridDim.x) {
            if (WEIGHTED && team == 0) {
                Weights own;
                own.load(p, member);
                own.keep(weights, member);
            }
            __syncthreads();  // that the slots' mbarriers are made, too
        }
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            if (n % 32 == 0) {
                some = later;
                later = load_saved(p, first + (n + 32 + lane) * jump, n + 32 + lane < count);
            }
            Saved saved = {__shfl_sync(0xffffffffu, some.rstd, n % 32), 0.0f};
            if constexpr (CENTRED) saved.mean = __shfl_sync(0xffffffffu, some.mean, n % 32);
            if constexpr (RING > 0) ring.take(row, column);
            Products products(row, saved, weights, p.columns, member, [&](int i, int at, float g, float xhat) {
                if constexpr (WEIGHTED) dw[i][at] = __fmaf_rn(g, xhat, dw[i][at]);
                if constexpr (WEIGHTED && CENTRED) db[i][at] = __fadd_rn(db[i][at], g);
            });
            if constexpr (RING == 0) load_row(row, from, n + 1 < count, p, column, jump);
            products.add_over_team(warp_sums[turn], team, warp);
            turn ^= 1;
            if constexpr (RING > 0) ring.refill();
            products.store(to, saved.rstd, inverse, p.columns, member);
            to += jump * p.columns;
        }
        // All teams pass as many barriers: compute-sanitizer's racecheck orders nothing across teams that do not.
        const int most = (p.segment_rows + (segment < p.longer) + TEAMS - 1) / TEAMS;
        if (TEAM_WARPS > 1 && count < most) team_barrier(team);
        if constexpr (WEIGHTED) {
            u32* words = p.words + i64(segment) * (SUMS * ROW_QUADS * 4);
            store_segment(p, words, shared, team, member, dw);
            if constexpr (CENTRED) store_segment(p, words + ROW_QUADS * 4, shared, team, member, db);
        }
    }
    if constexpr (WEIGHTED) {
        __syncthreads();
        if (!add_segments(p, use, shared)) return;
        use.finish();
    }
    if (!p.early_trigger) launch_dependents();
}
