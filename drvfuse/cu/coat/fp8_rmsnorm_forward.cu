// SPDX-License-Identifier: Apache-2.0
// The forward pass of FP8 RMSNorm of few rows in one launch: it reads x and its group scales, and writes qy, its
// transpose, one scale and rstd. fp8_rmsnorm_forward_few.cu is for tensors that one cluster holds,
// fp8_norm_forward_rows.cu for many rows. forward.cuh has their common parts, and the numerics.
//
// Layout: x [rows, columns] FP8 with a row stride, s_x [rows, ceil(columns / QB)] bf16 with a row stride, w [columns].
// Grid: cooperative, at most one block per multiprocessor. The blocks take groups of BLOCK_ROWS rows in turn.
//   Phase 1  A warp takes BATCH rows of one segment of 512 columns: the sum of squares, and the largest |x * s * w|.
//            Over all segments they give the rows' rstd and the block's estimate of the largest |y|.
//   Meeting  The blocks exchange their maxima, and every block computes the one scale from the grid's maximum.
//   Phase 2  A warp takes tiles of ROW_LANES * TR rows by 32 / ROW_LANES * TC columns (tile.cuh), in turn with all
//            warps of the grid. The block that has reduced a row publishes its rstd.
// Global bytes per element, with one scale per QB columns: 1 + 2 / QB are read twice (the counters show 1 + 2 / 16,
// since each lane loads the scale of its 16 columns), and 2 are written. Each row's rstd adds 4. The weights are read
// once per warp and segment in phase 1, and once per tile and row of lanes in phase 2.
//
// PDL. A warp's first weights of each phase are read before the wait, all else after it. The trigger is right after the
// wait (early_trigger) or after the last store.
#include "coat/forward_meeting.cuh"

// TC columns of four rows and the rows' scales; elements that do not exist are 0.
struct Quad {
    u32 word[4][TC / 4];
    u32 scale[2];
};

__device__ __forceinline__ void load_quad(Quad& quad, const ForwardParams& p, i64 row, int at) {
    const u8* x = p.x + row * p.x_stride + at;
    if (row + 4 <= p.rows) {
#pragma unroll
        for (int r = 0; r < 4; ++r, x += p.x_stride) load_bytes<TC>(quad.word[r], x, p.columns - at, ALIGNED);
    } else {
#pragma unroll
        for (int r = 0; r < 4; ++r, x += p.x_stride) {
            clear(quad.word[r]);
            if (row + r < p.rows) load_bytes<TC>(quad.word[r], x, p.columns - at, ALIGNED);
        }
    }
    load_scales(quad.scale, p, row, at);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_forward(const ForwardParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Meetings meetings;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int segments = (p.columns + SEGMENT - 1) / SEGMENT;
    float* rstds = reinterpret_cast<float*>(dynamic) + warp * TILE_ROWS;  // rstd of the warp's tile
    float* sums = reinterpret_cast<float*>(dynamic) + WARPS * TILE_ROWS;
    u32* products = reinterpret_cast<u32*>(sums + segments * p.chunk_rows);  // both [segments, chunk_rows]
    // for a grid of a single block: rstd of all rows
    float* alone = sums + 2 * segments * p.chunk_rows;
    const int count = (p.groups + (int(blockIdx.x) < p.longer)) * BLOCK_ROWS;
    const auto global = [&](int local) {
        return (i64(u32(local) / BLOCK_ROWS) * gridDim.x + blockIdx.x) * BLOCK_ROWS + u32(local) % BLOCK_ROWS;
    };
    GridWords* words = reinterpret_cast<GridWords*>(p.scratch.state);

    const int tiles_across = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int tiles_down = (int(p.rows) + TILE_ROWS - 1) / TILE_ROWS;
    const int first_tile = int(blockIdx.x) * WARPS + warp;
    Place tile{first_tile % tiles_across, first_tile / tiles_across};
    const auto lane_row = [&] { return tile.down * TILE_ROWS + lane / (32 / ROW_LANES) * TR; };
    const auto lane_column = [&] { return tile.across * TILE_COLUMNS + lane % (32 / ROW_LANES) * TC; };
    Quad quads[TR / 4];
    Pack<Weight, TC> weights;
    const auto load_tile_quad = [&](int q) {
        const int at = lane_column();
        load_quad(quads[q], p, lane_row() + 4 * q, at < p.columns ? at : 0);
    };
    const auto load_first_tile = [&] {
        if (tile.down >= tiles_down) return;
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) load_tile_quad(q);
    };

    Pack<Weight, PACK> raw;  // weights for phase 1
    if (warp / segments * BATCH < count) load_weight_pack(raw, p, warp % segments * SEGMENT + lane * PACK);
    if (tile.down < tiles_down) load_weight_pack(weights, p, lane_column());
    if (!FAULT("fp8-operand-before-pdl-wait")) wait_for_producer();
    if (p.early_trigger) launch_dependents();
    ScratchUse use(p.scratch, gridDim.x > 1);

    // Phase 1.
    u32 best = 0;
    float largest = 0.0f;
    float w[PACK];
    int held = -1;
    const Place step{WARPS % segments, WARPS / segments * BATCH};
    // runs at least once, even if the block has no rows
    for (int first = 0; first == 0 || first < count; first += p.chunk_rows) {
        const int end = min(first + p.chunk_rows, count);
        Place place{warp % segments, first + warp / segments * BATCH}, after;
        Batch batch, next;
        if (place.down < end) load_batch(batch, p, global(place.down), place.across * SEGMENT + lane * PACK);
        if (first == 0) load_first_tile();
        for (; place.down < end; place = after, batch = next) {
            after = {place.across + step.across, place.down + step.down};
            if (after.across >= segments) after.across -= segments, after.down += BATCH;
            if (after.down < end) load_batch(next, p, global(after.down), after.across * SEGMENT + lane * PACK);
            const int at = place.across * SEGMENT + lane * PACK;
            if (place.across != held) {
                if (held >= 0) load_weight_pack(raw, p, at);
                held = place.across;
                take_phase1_weights(w, largest, raw);
            }
            float squares[BATCH];
            u32 most[BATCH];
            reduce_packs(batch, w, squares, most);
            const float sum = sum_lanes(squares);
#pragma unroll
            for (int r = 0; r < BATCH; ++r) most[r] = ptx::warp_max(most[r]);
            const int to = place.across * p.chunk_rows + place.down - first;
            if (lane % (32 / BATCH) == 0) sums[to + lane / (32 / BATCH)] = sum;
            if (lane == 0) {
#pragma unroll
                for (int r = 0; r < BATCH; ++r) products[to + r] = most[r];
            }
        }
        if (first == 0 && threadIdx.x == 0) meetings.begin(use);
        __syncthreads();
        for (int local = first + threadIdx.x; local < end; local += THREADS) {
            const i64 row = global(local);
            if (row < p.rows) {
                float total = 0.0f;
                u32 most = 0;
                for (int s = 0; s < segments; ++s) {
                    total = __fadd_rn(total, sums[s * p.chunk_rows + local - first]);
                    most = max(most, products[s * p.chunk_rows + local - first]);
                }
                const float rstd = finish_row(p, total, most, best);
                p.rstd[row] = rstd;
                if (gridDim.x > 1) {
                    leave_word(words->rows + row, meetings.epoch, __float_as_uint(rstd));
                } else {
                    alone[row] = rstd;
                }
            }
        }
        if (end < count) __syncthreads();
    }
    best = ptx::warp_max(largest <= WEIGHT_LIMIT ? best : UNDECIDED);
    if (lane == 0) atomicMax(&meetings.estimate.own, best);

    // The rstd of a tile's rows, some of which other blocks have reduced.
    constexpr int LOOKS = (TILE_ROWS + 31) / 32;
    Awaited awaited[1 + LOOKS] = {};
    const auto await_rows = [&] {
#pragma unroll
        for (int i = 0; i < LOOKS; ++i) {
            const int r = lane + 32 * i, row = tile.down * TILE_ROWS + r;
            const bool wanted = r < TILE_ROWS && row < p.rows && tile.down < tiles_down && gridDim.x > 1;
            awaited[1 + i] = {wanted ? words->rows + row : nullptr, u32(row / BLOCK_ROWS) % gridDim.x, 0};
        }
    };
    const auto take_rows = [&] {
#pragma unroll
        for (int i = 0; i < LOOKS; ++i) {
            const int r = lane + 32 * i, row = tile.down * TILE_ROWS + r;
            const bool own = row < p.rows && gridDim.x == 1;
            if (r < TILE_ROWS) rstds[r] = own ? alone[row] : __uint_as_float(awaited[1 + i].value);
        }
        __syncwarp();
    };
    if (FAULT("fp8-operand-before-pdl-wait")) wait_for_producer();
    tell(words, 0, meetings.estimate, meetings.epoch);
    await_rows();
    if (!hear(words, 0, meetings.estimate, meetings.epoch, use, p.scratch, false, awaited)) return;
    take_rows();
    u32 scale_bits = decided_scale(meetings.estimate.all);
    if (scale_bits == UNDECIDED) {
        for (int local = warp; local < count && global(local) < p.rows; local += WARPS) {
            const i64 row = global(local);
            const u32 most = exact_row_maximum(p, row, 0.0f, p.rstd[row]);
            if (lane == 0) atomicMax(&meetings.exact.own, most);
        }
        tell(words, 1, meetings.exact, meetings.epoch);
        Awaited again[1];
        if (!hear(words, 1, meetings.exact, meetings.epoch, use, p.scratch, false, again)) return;
        scale_bits = fp8_scale_bits<X>(__uint_as_float(meetings.exact.all));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = u16(scale_bits);
    const float inverse = ptx::reciprocal_approx(bf16{u16(scale_bits)});

    // Phase 2.
    while (tile.down < tiles_down) {
        const int at = lane_column(), own = lane_row(), valid = p.columns - at;
        const int left = valid > 0 ? int(min(p.rows - own, i64(TR))) : 0;
        tile.across += WARPS * int(gridDim.x);
        while (tile.across >= tiles_across) tile.across -= tiles_across, ++tile.down;
        const bool more = tile.down < tiles_down;
        float w[TC];
        to_float(w, weights);
        if (more) load_weight_pack(weights, p, lane_column());
        Turned<TR, TC> turned;
        u8* to = p.qy + i64(own) * p.columns + at;
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) {
            float rstd[4];
            *reinterpret_cast<float4*>(rstd) = *reinterpret_cast<const float4*>(rstds + (own + 4 * q) % TILE_ROWS);
            u32 out[4][TC / 4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const u32 pair = quads[q].scale[r / 2];
                const float scale = __uint_as_float(r % 2 ? pair & 0xffff0000u : pair << 16);
                float v[TC];
#pragma unroll
                for (int j = 0; j < TC / 4; ++j) Word<X>::unpack(quads[q].word[r][j], v + 4 * j);
#pragma unroll
                for (int i = 0; i < TC; ++i) v[i] = rounded_to_bf16(normalised(v[i], scale, rstd[r], w[i]));
                quantise<X, TC>(out[r], v, inverse);
            }
            // The next tile is loaded before this tile's stores, since the compiler moves no load across them.
            if (more) load_tile_quad(q);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (4 * q + r < left) {
                    store_bytes<TC>(to + u64(u32(4 * q + r)) * u32(p.columns), out[r], valid, ALIGNED);
                }
            }
            turned.take(q, out);
        }
        store_turned<RUN, ALIGNED>(p.qy_t, turned, own, p.rows, p.batch_rows, p.columns, at);
        if (more) {
            Patience patience(p.scratch);
            bool given_up = false;
            await_rows();
            awaited[0] = {};
            await_words(awaited, meetings.epoch, patience, given_up);
            __syncwarp();
            take_rows();
        }
    }
    if (gridDim.x > 1) use.finish(meetings.epoch, meetings.users);
    leave_stream(p);
}
