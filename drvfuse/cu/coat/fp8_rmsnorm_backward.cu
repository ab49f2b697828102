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
// row's loads are issued as soon as the registers of the row before it are free, and cross the reduction of c1. The last
// rows of a segment, KEPT and one, are added up before their dx is computed, so that their sums are on the way to other
// blocks meanwhile; the KEPT are taken from the ring twice. Global bytes an element: 1 + 2 / QB of x (RING 0: 1 + 2 / 8),
// 2 GRADIENTS of g, 2 of dx; a row: 4 of rstd for each warp of a team; a column: w a block, 4 written, 4 read and 4
// cleared a segment, dw.
//
// Order of dw: the rows of a team in turn (fma), the teams in turn, then strand i of STRANDS adds segments i, i +
// STRANDS, ... and the strands are added in turn; one rounding. c1: 8 elements of a pack in turn, packs, a butterfly
// over the lanes, the warps in turn, times 1 / columns. So all results have the same bits in every run and on every
// grid, and there are no locks. All operations are IEEE. A pack is 8 elements here, so that a warp's accesses of g and
// dx are 512 contiguous bytes: 32-byte strides would write each sector in two halves.
//
// Memory order: backward_sums.cuh.
// PDL: nothing is read before the wait; the trigger is right after it (early_trigger) or after the last store of dw.
// Grid: cooperative, at most one block a segment. The last block has the first segment: the first segments may have a
// row more, and the first blocks add up columns. Failure: scratch.cuh; then dw is not written.
#include "coat/backward_ring.cuh"
#include "coat/backward_sums.cuh"

constexpr int KEPT = DRVFUSE_KEPT;  // with a ring, less than RING
// The number of warps of a team that issue the ring's copies and no other loads, which would come late.
constexpr int COPIERS = RING > 0 && TEAM_WARPS > 1;

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

    enter_stream(p);
    ScratchUse use(p.scratch, WEIGHTED);
    const float inverse = __frcp_rn(float(p.columns));
    const i64 jump = i64(TEAMS) * p.segments;
    Ring ring(p, slots + team * RING * Ring::slot_bytes(p), arrivals[team], RING > 0 && member == 0);

    u32 turn = 0;
    for (int segment = gridDim.x - 1 - blockIdx.x; segment < p.segments; segment += gridDim.x) {
        const i64 first = segment + i64(team) * p.segments;
        const int rows = p.segment_rows + (segment < p.longer);
        const int count = (rows - team + TEAMS - 1) / TEAMS;  // rows of this team
        const int turns = (rows + TEAMS - 1) / TEAMS;         // rows of a team, at most
        const int kept = min(KEPT, turns - 1), before = turns - 1 - kept;
        Cursor from(p, first, column);
        u16* to = p.dx + first * p.columns + column;
        Row row;
        if constexpr (RING > 0) {
            ring.begin(first, jump, count);
        } else {
            load_row(row, from, count > 0, p, column, jump);
        }
        // Of 32 rows, lane l has the l-th's; behind the loop `later` has those of the rows that are left.
        Saved some, later = load_saved(p, first + lane * jump, lane < (before > 0 ? before : count));
        float dw[PACKS][WIDTH], db[PACKS][WIDTH];
        clear(dw), clear(db);
        if (segment + blockIdx.x + 1 == gridDim.x) {
            if (WEIGHTED && warp % TEAM_WARPS >= COPIERS) {
                const int loader = threadIdx.x - 32 * COPIERS * (team + 1);
                Weights<THREADS - 32 * COPIERS * TEAMS> all;
                all.load(p, loader);
                all.keep(weights, loader);
            }
            __syncthreads();  // also makes the slots' mbarriers visible
        }
        const auto over_rows = [&](int i, int at, float g, float xhat) {
            if constexpr (WEIGHTED) dw[i][at] = __fmaf_rn(g, xhat, dw[i][at]);
            if constexpr (WEIGHTED && CENTRED) db[i][at] = __fadd_rn(db[i][at], g);
        };
        Products products;
#pragma unroll 1
        for (int n = 0; n < before; ++n) {
            if (n % 32 == 0) {
                some = later;
                later = load_saved(p, first + (n + 32 + lane) * jump, n + 32 + lane < before);
            }
            if (n + 1 == before) later = load_saved(p, first + (before + lane) * jump, before + lane < count);
            const Saved saved = some.of_lane(n % 32);
            if constexpr (RING > 0) ring.take(row, column);
            products.take(row, saved, weights, p.columns, member, over_rows);
            if constexpr (RING == 0) load_row(row, from, n + 1 < count, p, column, jump);
            products.add_over_team(warp_sums[turn], team, warp);
            turn ^= 1;
            if constexpr (RING > 0) ring.refill();
            products.store(to, saved.rstd, inverse, p.columns, member);
            to += jump * p.columns;
        }
        // The sums are published before the dx of the last rows is stored. Only the very last row may be missing in
        // some teams.
        if constexpr (KEPT > 0) {
#pragma unroll 1
            for (int n = 0; n < kept; ++n) {
                ring.take(row, column, n);
                add_row(row, later.of_lane(n), over_rows);
            }
        }
        const bool whole = count == turns;
        const Saved saved = later.of_lane(kept);
        if (whole) {
            if constexpr (RING > 0) ring.take(row, column, kept);
            products.take(row, saved, weights, p.columns, member, over_rows);
        }
        if (WEIGHTED && !(FAULT("block-1-absent") && blockIdx.x == 1)) {
            u32* words = p.words + i64(segment) * (SUMS * ROW_QUADS * 4);
            store_segment(p, words, shared, team, member, dw);
            if constexpr (CENTRED) store_segment(p, words + ROW_QUADS * 4, shared, team, member, db);
        }
        // All teams call this, also for its barrier: compute-sanitizer's racecheck derives no order between teams if
        // some pass fewer barriers.
        products.add_over_team(warp_sums[turn], team, warp);
        turn ^= 1;
        if (whole) products.store(to + kept * jump * p.columns, saved.rstd, inverse, p.columns, member);
        if constexpr (KEPT > 0) {
#pragma unroll 1
            for (int n = 0; n < kept; ++n) {
                const Saved saved = later.of_lane(n);
                ring.take(row, column);
                products.take(row, saved, weights, p.columns, member, [](int, int, float, float) {});
                products.add_over_team(warp_sums[turn], team, warp);
                turn ^= 1;
                ring.pass();
                products.store(to, saved.rstd, inverse, p.columns, member);
                to += jump * p.columns;
            }
        }
        if (RING > 0 && whole) ring.pass();
    }
    if constexpr (WEIGHTED) {
        __syncthreads();
        if (!add_segments(p, use, shared)) return;
        use.finish();
    }
    leave_stream(p);
}
