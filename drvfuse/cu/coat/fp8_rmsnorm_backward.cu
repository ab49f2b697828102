// SPDX-License-Identifier: Apache-2.0
// The backward pass of FP8 RMSNorm in one launch: it reads x, its group scales and g once, writes dx once, and adds dw
// in fp32. With CENTRED it is that of LayerNorm, with a mean, a second sum c2 of each row, and db. Without WEIGHTED
// there are no w, dw and db, and so no words, no waits and no scratch. fp8_rmsnorm_backward_few.cu is the kernel for
// few rows.
//
// Layout: x [rows, columns] FP8 and GRADIENTS arrays g [rows, columns] bf16, each with a row stride; s_x bf16; w, rstd;
// dx bf16. The gradient is g[0] + g[1] + g[2], rounded to bf16 after each addition. Segment s of `segments` has the
// rows s, s + segments, ...; a block takes whole segments, so that all blocks process neighbouring rows at any time.
// Team t of TEAMS takes every TEAMS-th row of a segment, from the t-th on, and each thread keeps fp32 sums of g * xhat
// for its PACKS packs of columns. Rows are loaded through a ring in shared memory. With RING 0 they are loaded to
// registers: a row's loads are issued as soon as the registers of the row before it are free, before the reduction of
// c1. The last KEPT + 1 rows of a segment are added before their dx is computed, so that other blocks get their sums
// earlier; KEPT of them are read from the ring twice. Global bytes per element: 1 + 2 / QB for x (RING 0: 1 + 2 / 8), 2
// GRADIENTS for g, 2 for dx. Per row: 4 for rstd in each warp of a team. Per column: w for each block, dw, and for each
// segment 4 that are written, 4 that are read and 4 that are cleared.
//
// Order of dw: the rows of a team in order (fma), the teams in order, then strand i of STRANDS adds segments i, i +
// STRANDS, ..., and the strands are added in order; one rounding. c1: 8 elements of a pack in order, packs, a butterfly
// over the lanes, the warps in order, times 1 / columns. So all results have the same bits in every run and on every
// grid, and there are no locks. All operations are IEEE. A pack is 8 elements here, so that a warp's accesses of g and
// dx are 512 contiguous bytes: 32-byte strides would write each sector in two halves.
//
// Memory ordering: backward_sums.cuh.
// PDL. Nothing is read before the wait. The trigger is right after the wait (early_trigger) or after the last store of
// dw.
// Grid. Cooperative, at most one block per segment. The last block has the first segment, since the first segments may
// have one more row, and the first blocks add columns. Failure: scratch.cuh. After a time-out dw is not written.
#include "coat/backward_ring.cuh"
#include "coat/backward_sums.cuh"

constexpr int KEPT = DRVFUSE_KEPT;  // with a ring, less than RING
// The number of warps of a team that issue the ring's copies and no other loads, which would come late.
constexpr int COPIERS = RING > 0 && TEAM_WARPS > 1;

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_backward(const BackwardParams p) {
    extern __shared__ __align__(SLOT_ALIGNMENT) u8 dynamic[];
    u8* slots = dynamic;
    float4* weights = reinterpret_cast<float4*>(slots + TEAMS * RING * Ring::slot_bytes(p));
    float* shared = reinterpret_cast<float*>(weights) + PACKS * SPAN;  // first the sums of teams, then those of strands
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
        // Lane l has the saved values of the l-th of 32 rows; after the loop `later` has those of the remaining rows.
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
            __syncthreads();  // the barrier also makes the slots' mbarriers visible
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
