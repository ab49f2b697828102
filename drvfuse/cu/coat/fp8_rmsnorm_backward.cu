// SPDX-License-Identifier: Apache-2.0
// The backward pass of FP8 RMSNorm, or with CENTRED of FP8 LayerNorm, in one launch. It reads x and the gradients once.
// fp8_rmsnorm_backward_few.cu is the kernel for few rows.
//
// Computes, with xhat = (x * s - mean) * rstd (mean is 0 without CENTRED), g the gradient of y, and wdy = w * g (w is 1
// without WEIGHTED):
//   c1 = sum of xhat * wdy over the row * (1 / columns)
//   c2 = sum of wdy over the row * (1 / columns)               with CENTRED only
//   dx = (wdy - xhat * c1) * rstd, with CENTRED (wdy - (xhat * c1 + c2)) * rstd                  [rows, columns] bf16
//   dw = sum of g * xhat over all rows                         with WEIGHTED only                     [columns]
//   db = sum of g over all rows                                with WEIGHTED and CENTRED only         [columns]
// x [rows, columns] is FP8 with bf16 group scales s_x, rstd and mean are fp32 [rows], w has the type of dw and db. g is
// the sum of GRADIENTS bf16 arrays [rows, columns], rounded to bf16 after each addition. All else is in fp32 and IEEE
// arithmetic.
//
// Division. The launch is cooperative, with at most one block per segment. A segment is a set of rows, and a block
// takes whole segments. Segment s of `segments` has rows s, s + segments, ..., so that all blocks process neighbouring
// rows at any time. The first segments may have one row more than the others, and the first blocks also add segments at
// the end. So the work is balanced by giving the first segment to the last block. Team t of the block's TEAMS teams
// takes rows t, t + TEAMS, ... of a segment. Each thread of a team has PACKS packs of 8 columns of a row. A pack has 8
// columns so that a warp accesses 512 contiguous bytes of g and dx: with packs of 16 columns, each sector would be
// written in two halves. When a block has added a segment, it publishes the segment's sums. In the end each block takes
// some of the columns and adds the sums of all segments for them (backward_sums.cuh).
//
// Storage. Registers: a thread's packs of the current row, xhat and wdy, and its sums for dw and db over the rows.
// Shared memory: w in fp32, sums of teams and warps, and a ring of rows that bulk copies fill (backward_ring.cuh). With
// RING 0 there is no ring, and the loads of a row are issued as soon as the registers of the row before it are free,
// before the reduction of c1. A team adds its last KEPT + 1 rows of a segment to the sums before the dx of these rows
// is computed, so that other blocks get these sums earlier; KEPT of these rows are read from the ring twice.
//
// Order of sums. dw and db: the rows of a team in order (fma), the teams in order, then strand i of STRANDS adds
// segments i, i + STRANDS, ..., and the strands are added in order; the result is rounded once. c1 and c2: the 8
// elements of a pack in order, the packs of a thread, a butterfly over the lanes, the warps in order. So all results
// have the same bits in every run and on every grid.
//
// Memory ordering. Between blocks: see backward_sums.cuh. Without WEIGHTED, blocks exchange no data and do not wait for
// one another. Between the warps of a team: see Products::add_over_team() and backward_ring.cuh.
// Failure: see scratch.cuh. After a time-out dw and db are not written.
//
// Traffic. Global bytes per element: 1 + 2 / QB for x (with RING 0: 1 + 2 / 8), 2 * GRADIENTS for g, 2 for dx. Per row,
// in each warp of a team: 4 for rstd, with CENTRED 4 for mean. Per column, with WEIGHTED: w for each block, dw, and for
// each segment a word of 4 bytes that is written, read and cleared; with CENTRED also db and a second word for each
// segment.
//
// PDL. Before the wait for the producer nothing is read. A block triggers right after the wait (early_trigger) or after
// its last store.
#include "coat/backward_ring.cuh"
#include "coat/backward_sums.cuh"

// A team adds its last KEPT + 1 rows of a segment to the sums before it computes the dx of these rows. KEPT is less
// than RING, or 0 without a ring.
constexpr int KEPT = DRVFUSE_KEPT;
// Warps of a team that issue the ring's copies and load no weights, since these loads would delay the copies.
constexpr int COPIERS = RING > 0 && TEAM_WARPS > 1;

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_backward(const BackwardParams p) {
    extern __shared__ __align__(SLOT_ALIGNMENT) u8 dynamic[];
    u8* slots = dynamic;
    float4* weights = reinterpret_cast<float4*>(slots + TEAMS * RING * Ring::slot_bytes(p));
    // The sums of the teams, later the sums of the strands (parts of a sum over all segments, see "Order of sums").
    float* shared = reinterpret_cast<float*>(weights) + PACKS * SPAN;
    __shared__ Mbarrier arrivals[TEAMS][RING + 1];
    __shared__ __align__(16) float warp_sums[2][TEAMS][SUMS][TEAM_WARPS];
    const int lane = threadIdx.x % 32;
    // The shuffle tells the compiler that all lanes of the warp have the same value.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int team = warp / TEAM_WARPS, member = threadIdx.x % TEAM_THREADS;
    const int column = member * WIDTH;

    enter_stream(p);
    ScratchUse use(p.scratch, WEIGHTED);
    const float inverse = __frcp_rn(float(p.columns));
    const i64 jump = i64(TEAMS) * p.segments;
    Ring ring(p, slots + team * RING * Ring::slot_bytes(p), arrivals[team], RING > 0 && member == 0);

    u32 set = 0;
    for (int segment = gridDim.x - 1 - blockIdx.x; segment < p.segments; segment += gridDim.x) {
        const i64 first = segment + i64(team) * p.segments;
        const int rows = p.segment_rows + (segment < p.longer);
        const int count = (rows - team + TEAMS - 1) / TEAMS;  // rows of this team
        const int most_rows = (rows + TEAMS - 1) / TEAMS;     // the largest `count` of a team
        const int kept = min(KEPT, most_rows - 1);            // rows that are read from the ring twice
        const int before = most_rows - 1 - kept;              // rows whose dx is stored before the sums are published
        Cursor from(p, first, column);
        u16* to = p.dx + first * p.columns + column;
        Row row;
        if constexpr (RING > 0) {
            ring.begin(first, jump, count);
        } else {
            load_row(row, from, count > 0, p, column, jump);
        }
        // In `some` lane l holds the statistics of row l of the team's current 32 rows, and in `later` those of row l
        // of the next 32 rows. After the loop over rows, `later` has the statistics of the rows that remain.
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
            __syncthreads();  // this barrier also makes the initialised mbarriers of the ring visible
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
            products.add_over_team(warp_sums[set], team, warp);
            set ^= 1;
            if constexpr (RING > 0) ring.refill();
            products.store(to, saved.rstd, inverse, p.columns, member);
            to += jump * p.columns;
        }
        // The sums are published before the dx of the last kept + 1 rows is stored. A team that has one row less than
        // other teams of the block skips the last row.
        if constexpr (KEPT > 0) {
#pragma unroll 1
            for (int n = 0; n < kept; ++n) {
                ring.take(row, column, n);
                add_row(row, later.of_lane(n), over_rows);
            }
        }
        const bool has_last = count == most_rows;
        const Saved saved = later.of_lane(kept);
        if (has_last) {
            if constexpr (RING > 0) ring.take(row, column, kept);
            products.take(row, saved, weights, p.columns, member, over_rows);
        }
        if (WEIGHTED && !(FAULT("block-1-absent") && blockIdx.x == 1)) {
            u32* words = p.words + i64(segment) * (SUMS * ROW_QUADS * 4);
            store_segment(p, words, shared, team, member, dw);
            if constexpr (CENTRED) store_segment(p, words + ROW_QUADS * 4, shared, team, member, db);
        }
        // Teams without a last row call this too, for its barrier: racecheck of compute-sanitizer derives no order
        // between teams if some teams pass fewer barriers than others.
        products.add_over_team(warp_sums[set], team, warp);
        set ^= 1;
        if (has_last) products.store(to + kept * jump * p.columns, saved.rstd, inverse, p.columns, member);
        if constexpr (KEPT > 0) {
#pragma unroll 1
            for (int n = 0; n < kept; ++n) {
                const Saved saved = later.of_lane(n);
                ring.take(row, column);
                products.take(row, saved, weights, p.columns, member, [](int, int, float, float) {});
                products.add_over_team(warp_sums[set], team, warp);
                set ^= 1;
                ring.pass();
                products.store(to, saved.rstd, inverse, p.columns, member);
                to += jump * p.columns;
            }
        }
        if (RING > 0 && has_last) ring.pass();
    }
    if constexpr (WEIGHTED) {
        __syncthreads();
        if (!add_segments(p, use, shared)) return;
        use.finish();
    }
    leave_stream(p);
}
