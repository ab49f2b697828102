// SPDX-License-Identifier: Apache-2.0
// The row exchange of fp8_norm_forward_tiles.cu: how the blocks of a strip (BLOCK_ROWS rows of the tensor) add the sums
// that each of them has computed over its part of these rows. fp8_norm_forward_tiles.cu describes the division of rows
// and columns among blocks and lanes, the order of sums and the memory-ordering argument.
#pragma once
#include "coat/forward.cuh"
#include "sync/grid_words.cuh"

constexpr int SPLIT = DRVFUSE_SPLIT;              // blocks that share a segment
constexpr int PAIRS = SPLIT > 1 ? 2 * SPLIT : 1;  // sums per row that the blocks of a segment publish
constexpr int OWN_SEGMENTS = DRVFUSE_SLOTS;       // segments of a row whose sums a thread reads
constexpr bool PAIRED = !(LAYER && AFFINE);       // each sum is published together with a largest magnitude
constexpr int WORDS = PAIRED ? 2 : 1;             // 8-byte words of a published sum
constexpr int COLUMN_LANES = 32 / ROW_LANES;      // lanes that hold different packs of the same rows
constexpr int STRIP_WORDS = 16;  // distance between the words of two strips, so that each has a cache line of its own
constexpr int BLOCK_WORDS = MAX_WORD_ROWS / MAX_WORD_BLOCKS;  // distance between two blocks' words in GridWords::rows
static_assert(ROW_LANES == 8 && COLUMN_LANES == 4 && TC == PACK && BATCH == TR,
              "two bits of a pack's number come from the lane");
static_assert(WARPS * SPLIT == 8 && BLOCK_ROWS == TILE_ROWS, "the blocks of a segment have 32 packs");
// In a row exchange READERS threads read the published sums of one row. So a warp reads the sums of WARP_ROWS rows.
constexpr int READERS = THREADS / BLOCK_ROWS;
constexpr int WARP_ROWS = 32 / READERS;
static_assert(READERS >= 1 && READERS <= 32, "at least one thread for each row, and no row in two warps");

// x: the bits of the sum over a row or a part of it. y: if PAIRED, the bits of the largest |x * s * w| (RMSNorm) or
// |x * s - mean| (LayerNorm) of that part, else 0.
using Pair = uint2;

// The shared memory of a block.
struct TilesShared {
    Pair packs[WARPS][TR][32];           // [warp][r][lane]: the sum over the lane's pack in the r-th of its TR rows
    float rstd[BLOCK_ROWS];              // the rstd of the strip's rows
    float mean[LAYER ? BLOCK_ROWS : 1];  // the mean of the strip's rows
    // The bits of the largest |y|, or of its estimate: over the strip, or with LAYER and AFFINE over the block's part
    // of the strip.
    u32 estimate;
    u32 all;    // the bits of the largest |y|, or of its estimate, of the tensor
    u32 exact;  // the bits of the exact largest |y|: of the block's share of the rows, then of the tensor
};

// Combines two parts of a row: returns the sum of both sums and, if PAIRED, the larger magnitude.
__device__ __forceinline__ Pair combined(const Pair& a, const Pair& b) {
    return {__float_as_uint(__fadd_rn(__uint_as_float(a.x), __uint_as_float(b.x))), PAIRED ? max(a.y, b.y) : 0};
}

// Combines the parts of a row that this lane and lane (this lane ^ mask) hold.
__device__ __forceinline__ Pair combined_with_lane(const Pair& own, int mask) {
    const u32 magnitude = PAIRED ? __shfl_xor_sync(0xffffffffu, own.y, mask) : 0;
    return combined(own, {__shfl_xor_sync(0xffffffffu, own.x, mask), magnitude});
}

// Combines N parts of a row in the order of a butterfly: first the parts whose indices differ in the highest bit.
template <int N>
__device__ __forceinline__ Pair butterfly(Pair (&part)[N]) {
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) part[i] = combined(part[i], part[i + half]);
    }
    return part[0];
}

// This block's place in the grid, and this thread's place in the block.
struct Place {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int column_lane = lane % COLUMN_LANES;  // the index of the lane's pack among the warp's four packs of a row
    int row_lane = lane / COLUMN_LANES;     // the first of the lane's TR rows is row row_lane * TR of the strip
    int segments;                           // segments of a row
    int blocks;                             // blocks of a strip
    int strip;                              // the index of the block's strip
    int part;                               // the index of the block in its strip
    int segment;                            // the index of the block's segment
    int split;                              // the index of the block among the blocks of its segment
    // In a row exchange this thread reads the sums of segments reader, reader + READERS, ... of the strip's row `row`.
    int row = warp * WARP_ROWS + lane % WARP_ROWS, reader = lane / WARP_ROWS;

    __device__ __forceinline__ explicit Place(int columns) {
        segments = (columns + SEGMENT - 1) / SEGMENT, blocks = segments * SPLIT;
        strip = int(blockIdx.x) / blocks, part = int(blockIdx.x) % blocks;
        segment = part / SPLIT, split = part % SPLIT;
    }
};

// Loads the values of the lane's TR rows from `values`, an array with a value for each row of the strip.
__device__ __forceinline__ void load_lane_rows(float (&own)[TR], const float* values, const Place& place) {
#pragma unroll
    for (int q = 0; q < TR / 4; ++q) {
        const float4 four = *reinterpret_cast<const float4*>(values + place.row_lane * TR + 4 * q);
        own[4 * q] = four.x, own[4 * q + 1] = four.y, own[4 * q + 2] = four.z, own[4 * q + 3] = four.w;
    }
}

// Waits for the published sums of this thread's row and segments, and sets parts[k][i] to sum i of segment k * READERS
// + place.reader. In every poll the loads of all of these sums are in flight at once. Sets `given_up` on a time-out.
__device__ __forceinline__ void await_row(Pair (&parts)[OWN_SEGMENTS][PAIRS], const u64* words, const Place& place,
                                          u32 epoch, Patience& patience, bool& given_up) {
    for (;;) {
        u64 sum[OWN_SEGMENTS][PAIRS], magnitude[OWN_SEGMENTS][PAIRS];  // the words, with epochs in the upper halves
#pragma unroll
        for (int k = 0; k < OWN_SEGMENTS; ++k) {
            const int segment = min(k * READERS + place.reader, place.segments - 1);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const u64* from = words + WORDS * ((segment * PAIRS + i) * BLOCK_ROWS + place.row);
                if constexpr (PAIRED) {
                    ptx::load_relaxed_gpu_v2(sum[k][i], magnitude[k][i], from);
                } else {
                    sum[k][i] = magnitude[k][i] = ptx::load_relaxed_gpu(from);
                }
            }
        }
        bool late = false;
        // For the report of a time-out: the block of the strip whose word is missing, and the epoch that was read in
        // its place.
        u32 block = 0, seen = 0;
#pragma unroll
        for (int k = 0; k < OWN_SEGMENTS; ++k) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                parts[k][i] = {u32(sum[k][i]), u32(magnitude[k][i])};
                const u32 first = u32(sum[k][i] >> 32), second = u32(magnitude[k][i] >> 32);
                if (FAULT("fp8-pair-of-any-launch") ? first == 0 || second == 0 : first != epoch || second != epoch) {
                    late = true, seen = first != epoch ? first : second;
                    block = min(k * READERS + place.reader, place.segments - 1) * SPLIT + i / 2;
                }
            }
        }
        if (!late) return;
        if (!patience.goes_on(place.strip * place.blocks + block, epoch, seen)) {
            given_up = true;
            return;
        }
    }
}

// Does a row exchange: publishes the sums of `shared.packs` to `words`, waits for the sums of all blocks of the strip,
// and returns the sum and the largest magnitude over the whole of this thread's row (`place.row`). All threads of the
// block call it, after a block barrier. Sets `given_up` on a time-out.
__device__ __forceinline__ Pair row_total(const TilesShared& shared, u64* words, const Place& place, u32 epoch,
                                          Patience& patience, bool& given_up) {
    // Warp w handles rows r = w, w + WARPS, ... of each lane's TR rows, and adds the sums that all warps have of these
    // rows.
    for (int r = place.warp; r < TR; r += WARPS) {
        Pair own[WARPS];
#pragma unroll
        for (int i = 0; i < WARPS; ++i) own[i] = shared.packs[i][r][place.lane];
        Pair sum = combined_with_lane(butterfly(own), 2);
        if constexpr (SPLIT == 1) sum = combined_with_lane(sum, 1);
        const int row = place.row_lane * TR + r;
        const bool publishes = SPLIT == 1 ? place.column_lane == 0 : place.column_lane < 2;
        const int pair = (place.segment * SPLIT + place.split) * (SPLIT > 1 ? 2 : 1) + place.column_lane;
        if (publishes && !(FAULT("block-1-absent") && blockIdx.x == 1)) {
            u64* to = words + WORDS * (pair * BLOCK_ROWS + row);
            if constexpr (PAIRED) {
                ptx::store_relaxed_gpu_v2(to, u64(epoch) << 32 | sum.x, u64(epoch) << 32 | sum.y);
            } else {
                leave_word(to, epoch, sum.x);
            }
        }
    }
    Pair parts[OWN_SEGMENTS][PAIRS];
    if (!given_up) await_row(parts, words, place, epoch, patience, given_up);
    __syncwarp();
    float total = 0.0f;
    u32 largest = 0;
#pragma unroll
    for (int k = 0; k < OWN_SEGMENTS; ++k) {
        const Pair sum = butterfly(parts[k]);
#pragma unroll
        for (int i = 0; i < READERS; ++i) {
            const u32 of_segment = __shfl_sync(0xffffffffu, sum.x, i * WARP_ROWS + place.lane % WARP_ROWS);
            const u32 magnitude = PAIRED ? __shfl_sync(0xffffffffu, sum.y, i * WARP_ROWS + place.lane % WARP_ROWS) : 0;
            if (k * READERS + i < place.segments) {
                total = __fadd_rn(total, __uint_as_float(of_segment));
                largest = max(largest, magnitude);
            }
        }
    }
    return {__float_as_uint(total), largest};
}

// Waits for `count` words that are `stride` words apart, and sets `maximum`, in all lanes, to the largest value in
// these words. Word i is stored by block i * blocks. Called by a whole warp. Returns false on a time-out.
__device__ __forceinline__ bool await_maxima(u32& maximum, const u64* words, int count, int stride, int blocks,
                                             u32 epoch, const Scratch& scratch) {
    Patience patience(scratch, true);
    bool given_up = false;
    maximum = 0;
    for (int first = 0; first < count; first += 64) {
        Awaited awaited[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int number = first + 32 * i + int(threadIdx.x) % 32;
            awaited[i] = {number < count ? words + number * stride : nullptr, u32(number * blocks), 0};
        }
        if (!given_up) await_words(awaited, epoch, patience, given_up);
        maximum = max(maximum, max(awaited[0].value, awaited[1].value));
    }
    __syncwarp();
    maximum = ptx::warp_max(maximum);
    return !given_up;
}
