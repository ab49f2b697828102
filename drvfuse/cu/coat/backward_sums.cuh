// SPDX-License-Identifier: Apache-2.0
// How fp8_rmsnorm_backward.cu computes dw and db, the sums over all rows. A segment is a set of rows
// (fp8_rmsnorm_backward.cu). Each block adds the rows of each of its segments, and publishes the segment's sums as
// words in the workspace. Then each block takes some of the columns, and adds the words that all segments have for
// them.
//
// Memory ordering. A word is the complement of the bits of a sum, or 0 if the sum is not published yet. No sum has all
// bits set, since arithmetic gives 0x7fffffff for a NaN; so no published word is 0. The block that adds the segments
// polls the words by relaxed loads: each word carries its own readiness and guards no other memory. The thread that has
// read a word then stores 0, which the next launch expects. So no barrier between blocks is needed, no fence (a fence
// would wait for the stores of dx), and no launch number in the words.
//
// Order of words. A quad is 4 columns. Quad q of a row belongs to thread q % TEAM_THREADS of a team, so that the stores
// of a warp are contiguous; quad_column() returns the first column of a quad.
#pragma once
#include "coat/backward_dx.cuh"

constexpr int STRANDS = DRVFUSE_STRANDS;     // parts of a sum over the segments, which different threads add
constexpr int ROW_QUADS = PACKS * SPAN / 4;  // quads of a row
constexpr int QUADS = THREADS / STRANDS;     // quads (4 columns each) whose sums a block adds at the same time
constexpr int MOST = DRVFUSE_MOST;           // the most segments that a strand adds
// The number of floats of shared memory that the functions below need.
constexpr int SHARED_SUMS = (TEAMS > 1 ? TEAMS * PACKS * SPAN : 0) > 4 * THREADS ? TEAMS * PACKS * SPAN : 4 * THREADS;

// The first column of a quad of a row.
__device__ __forceinline__ int quad_column(int quad) {
    const int half = quad / TEAM_THREADS;
    return half / 2 * SPAN + quad % TEAM_THREADS * WIDTH + half % 2 * 4;
}

// Publishes the sums of a quad.
__device__ __forceinline__ void publish_quad(u32* to, float4 sum) {
    ptx::store_relaxed_gpu_v4(to, ~__float_as_uint(sum.x), ~__float_as_uint(sum.y), ~__float_as_uint(sum.z),
                              ~__float_as_uint(sum.w));
}

// Whether all sums of a quad are published.
__device__ __forceinline__ bool is_published(const u32 (&word)[4]) { return word[0] && word[1] && word[2] && word[3]; }

// For this block's columns, adds the words of all segments, and stores dw and db. Called by all threads of the block;
// contains block barriers. Returns false to all threads if a wait has timed out, else true.
__device__ __forceinline__ bool add_segments(const BackwardParams& p, ScratchUse& use, float* shared) {
    const int own = threadIdx.x % QUADS, strand = threadIdx.x / QUADS;
    for (int first = blockIdx.x * QUADS; first < SUMS * ROW_QUADS; first += gridDim.x * QUADS) {
        const int quad = first + own;
        u32* at = p.words + i64(strand) * (SUMS * ROW_QUADS * 4) + quad * 4;
        constexpr i64 STEP = i64(STRANDS) * SUMS * ROW_QUADS * 4;
        const bool here = strand < STRANDS && quad < SUMS * ROW_QUADS && quad_column(quad % ROW_QUADS) < p.columns;
        u32 word[MOST][4] = {};
        Patience patience(p.scratch);
        bool waiting = here, failed = use.aborted();
        while (waiting && !failed) {
            waiting = false;
            int missing = 0;
#pragma unroll
            for (int k = 0; k < MOST; ++k) {
                const int segment = strand + k * STRANDS;
                if (segment < p.segments && !is_published(word[k])) ptx::load_relaxed_gpu_v4(word[k], at + k * STEP);
            }
#pragma unroll
            for (int k = 0; k < MOST; ++k) {
                const int segment = strand + k * STRANDS;
                if (segment < p.segments && !is_published(word[k])) waiting = true, missing = segment;
            }
            if (waiting) failed = !patience.goes_on(gridDim.x - 1 - missing % gridDim.x, use.epoch(), 0);
        }
        float4 sum = {};
#pragma unroll
        for (int k = 0; k < MOST; ++k) {
            if (strand + k * STRANDS < p.segments) {
                sum.x = __fadd_rn(sum.x, __uint_as_float(~word[k][0]));
                sum.y = __fadd_rn(sum.y, __uint_as_float(~word[k][1]));
                sum.z = __fadd_rn(sum.z, __uint_as_float(~word[k][2]));
                sum.w = __fadd_rn(sum.w, __uint_as_float(~word[k][3]));
                if (here && !failed) ptx::store_relaxed_gpu_v4(at + k * STEP, 0);
            }
        }
        if (!use.met(failed)) return false;
        if (threadIdx.x < STRANDS * QUADS) *reinterpret_cast<float4*>(shared + 4 * threadIdx.x) = sum;
        __syncthreads();
        for (int out = threadIdx.x; out < 4 * QUADS; out += THREADS) {
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < STRANDS; ++i) total = __fadd_rn(total, shared[i * 4 * QUADS + out]);
            const int place = first + out / 4, column = quad_column(place % ROW_QUADS) + out % 4;
            if (place < SUMS * ROW_QUADS && column < p.columns) {
                store_scalar((place < ROW_QUADS ? p.dw : p.db) + column, total);
            }
        }
        __syncthreads();
    }
    return true;
}

// Adds the sums that the block's teams have for a segment, either for dw or for db, and publishes the totals in
// `words`, which belong to the segment. `sums` are the sums of this thread. Called by all threads of the block;
// contains block barriers if there are several teams.
__device__ __forceinline__ void store_segment(const BackwardParams& p, u32* words, float* shared, int team, int member,
                                              const float (&sums)[PACKS][WIDTH]) {
    if constexpr (TEAMS > 1) __syncthreads();
#pragma unroll
    for (int half = 0; half < 2 * PACKS; ++half) {
        const float* sum = &sums[half / 2][half % 2 * 4];
        const int quad = half * TEAM_THREADS + member;
        const float4 own = make_float4(sum[0], sum[1], sum[2], sum[3]);
        if (TEAMS > 1) {
            *reinterpret_cast<float4*>(shared + (team * ROW_QUADS + quad) * 4) = own;
        } else if (quad_column(quad) < p.columns) {
            publish_quad(words + quad * 4, own);
        }
    }
    if constexpr (TEAMS > 1) {
        __syncthreads();
        for (int quad = threadIdx.x; quad < ROW_QUADS; quad += THREADS) {
            if (quad_column(quad) >= p.columns) continue;
            float4 sum = *reinterpret_cast<const float4*>(shared + quad * 4);
#pragma unroll
            for (int other = 1; other < TEAMS; ++other) {
                const float4 more = *reinterpret_cast<const float4*>(shared + (other * ROW_QUADS + quad) * 4);
                sum.x = __fadd_rn(sum.x, more.x), sum.y = __fadd_rn(sum.y, more.y);
                sum.z = __fadd_rn(sum.z, more.z), sum.w = __fadd_rn(sum.w, more.w);
            }
            publish_quad(words + quad * 4, sum);
        }
    }
}
