// SPDX-License-Identifier: Apache-2.0
// FP8 RMSNorm forward of many rows in one launch: a block quantises the very part of the tensor that it has reduced. What
// it shares with fp8_rmsnorm_forward.cu, with the numerics: fp8_forward.cuh.
//
// Layout: x [rows, columns] FP8 with a row stride, s_x [rows, ceil(columns / QB)] bf16 with a row stride, w [columns].
// Grid: cooperative, one block a multiprocessor at most. PARTS blocks are a team; groups of BLOCK_ROWS rows go round the
// teams, and each block of a team has `part_columns` columns, whole segments, of its rows.
//   Phase 1  a warp takes BATCH rows of one segment of 512 columns: sum of squares, and largest |x * s * w|. Blocks of a
//            team leave one another the sums. They give the rows' rstd, and with it the block's estimate of the largest
//            |y|. x of the first `resident_rows` rows stays in shared memory; with KNOWN scales and rstd of all rows do.
//   Meeting  the grid's maximum, from which every block computes the one scale.
//   Phase 2  a warp takes a tile of a group's rows by 32 / ROW_LANES * TC columns (fp8_tile.cuh), of which it has asked
//            for each quad of rows when it had used the tile's before.
// Global bytes an element with groups of QB: read 1 + 2 / QB (accesses count 1 + 2 / 16, as a lane asks for the scale of
// its 16), and again what is not resident or KNOWN; written 2. A row's rstd is 4 more. Weights: once a warp and change of
// segment in phase 1, once a tile and row of lanes in phase 2.
#include "fp8_forward.cuh"

constexpr bool KNOWN = DRVFUSE_KNOWN;  // scales and rstd of all rows are kept
constexpr int PARTS = DRVFUSE_PARTS;   // blocks that share a group of rows
constexpr int QUADS = TR / 4;
static_assert(BLOCK_ROWS == TILE_ROWS && BATCH == 4, "tiles of a group's rows, batches of its quads");
static_assert((BLOCK_ROWS & (BLOCK_ROWS - 1)) == 0, "known_scales()");
static_assert(KNOWN || PARTS == 1, "p.rstd is read by the block that has written it");

// The rows of a block, counted from 0, and what it keeps of them.
struct Rows {
    const ForwardParams& p;
    int team, teams;
    int first, width, count;  // columns from `first` on
    float* rstd;              // [count]
    u8* x;                    // [p.resident_rows, pitch], swizzled
    bf16* scales;             // [groups of QB, count], swizzled
    int pitch;

    __device__ __forceinline__ i64 global(int local) const {
        return (i64(u32(local) / BLOCK_ROWS) * teams + team) * BLOCK_ROWS + u32(local) % BLOCK_ROWS;
    }
    // Lanes TR rows apart read the same columns at once, so their places in 128 bytes are changed over.
    __device__ __forceinline__ u8* resident_x(int local, int at) const {
        return x + local * pitch + ((at - first) ^ (u32(local) / TR * TILE_COLUMNS % 128));
    }
    // Of a row and the next three. Lanes of several groups write, and read, one row's at once.
    __device__ __forceinline__ uint2* known_scales(int local, int at) const {
        const int group = u32(at - first) / QB;
        return reinterpret_cast<uint2*>(scales + group * count + (local ^ (4 * group & (BLOCK_ROWS - 1))));
    }
};

__device__ __forceinline__ void keep_batch(const Batch& batch, const Rows& rows, int local, int at) {
    if (local < rows.p.resident_rows) {
        u8* x = rows.resident_x(local, at);
#pragma unroll
        for (int r = 0; r < BATCH; ++r) {
            *reinterpret_cast<uint4*>(x + r * rows.pitch) =
                make_uint4(batch.word[r][0], batch.word[r][1], batch.word[r][2], batch.word[r][3]);
        }
    }
    if (KNOWN && (QB == PACK || at % QB == 0)) {
        *rows.known_scales(local, at) = make_uint2(batch.scale[0] | u32(batch.scale[1]) << 16,
                                                   batch.scale[2] | u32(batch.scale[3]) << 16);
    }
}

using Quad = u32[4][TC / 4];  // TC columns of four rows; what does not exist is 0

__device__ __forceinline__ void load_quad(Quad& word, const Rows& rows, int local, int at) {
    const ForwardParams& p = rows.p;
    if (local < p.resident_rows) {
        const u8* x = rows.resident_x(local, at);
#pragma unroll
        for (int r = 0; r < 4; ++r) load_bytes<TC>(word[r], x + r * rows.pitch, TC, true);
        return;
    }
    const i64 row = rows.global(local);
    const u8* x = p.x + row * p.x_stride + at;
    const bool all = row + 4 <= p.rows;
#pragma unroll
    for (int r = 0; r < 4; ++r, x += p.x_stride) {
#pragma unroll
        for (int j = 0; j < TC / 4; ++j) word[r][j] = 0;
        if (all || row + r < p.rows) load_bytes<TC>(word[r], x, p.columns - at, ALIGNED);
    }
}

struct Factors {
    u32 scale[2];
    float rstd[4];
};

// Of four rows.
__device__ __forceinline__ void load_factors(Factors& factors, const Rows& rows, int local, int at) {
    const ForwardParams& p = rows.p;
    if constexpr (KNOWN) {
        const float4 rstd = *reinterpret_cast<const float4*>(rows.rstd + local);
        const uint2 pair = *rows.known_scales(local, at);
        factors.rstd[0] = rstd.x, factors.rstd[1] = rstd.y, factors.rstd[2] = rstd.z, factors.rstd[3] = rstd.w;
        factors.scale[0] = pair.x, factors.scale[1] = pair.y;
    } else {
        const i64 row = rows.global(local);
        load_scales(factors.scale, p, row, at);
#pragma unroll
        for (int r = 0; r < 4; ++r) factors.rstd[r] = row + r < p.rows ? p.rstd[row + r] : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_forward_rows(const ForwardParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = blockIdx.x % PARTS, team = blockIdx.x / PARTS, teams = gridDim.x / PARTS;
    const int all_segments = (p.columns + SEGMENT - 1) / SEGMENT;
    const int first_column = part * p.part_columns;
    const int width = PARTS > 1 ? min(p.part_columns, p.columns - first_column) : p.columns;
    const int segments = (width + SEGMENT - 1) / SEGMENT, first_segment = first_column / SEGMENT;
    const int count = (p.groups + (team < p.longer)) * BLOCK_ROWS, pitch = (width + 127) / 128 * 128;
    Meetings& meetings = *reinterpret_cast<Meetings*>(dynamic);
    u8* x = dynamic + sizeof(Meetings);
    float* rstds = reinterpret_cast<float*>(x + p.resident_rows * pitch);
    u32* products = reinterpret_cast<u32*>(rstds + (KNOWN ? count : 0));    // [chunk_rows]
    float* sums = reinterpret_cast<float*>(products + p.chunk_rows);        // [all segments, chunk_rows]
    bf16* scales = reinterpret_cast<bf16*>(sums + all_segments * p.chunk_rows);
    const Rows rows{p, team, teams, first_column, width, count, rstds, x, scales, pitch};
    GridWords* words = reinterpret_cast<GridWords*>(p.scratch.state);

    // Phase 1.
    const Place step{WARPS % segments, WARPS / segments * BATCH};
    const auto next_place = [&](const Place& place) {
        Place after{place.across + step.across, place.down + step.down};
        if (after.across >= segments) after.across -= segments, after.down += BATCH;
        return after;
    };
    const auto column_of = [&](const Place& place) { return first_column + place.across * SEGMENT + lane * PACK; };
    const auto load = [&](Batch& batch, const Place& place) {
        load_batch(batch, p, rows.global(place.down), column_of(place));
    };
    Place place{warp % segments, warp / segments * BATCH};
    int first = 0, end = min(p.chunk_rows, count);  // the chunk
    Batch batch, next;
    wait_for_producer();
    if (place.down < end) load(batch, place);
    if (p.early_trigger) launch_dependents();
    ScratchUse use(p.scratch, gridDim.x > 1);
    if (threadIdx.x == 0) meetings.begin(use);
    for (int row = threadIdx.x; row < p.chunk_rows; row += THREADS) products[row] = 0;
    __syncthreads();

    u32 best = 0;
    float largest_weight = 0.0f;
    bool given_up = false;
    float w[PACK];
    int held = -1;
    for (;;) {
        while (place.down < end) {
            const Place from = place;
            const int at = column_of(from), row = from.down - first;
            place = next_place(from);
            if (place.down < end) load(next, place);
            if (from.across != held) {
                held = from.across;
                load_phase1_weights(w, largest_weight, p, at);
            }
            if (at < p.columns) keep_batch(batch, rows, from.down, at);
            float squares[BATCH];
            u32 most[BATCH];
            reduce_packs(batch, w, squares, most);
            const float sum = sum_lanes(squares);
#pragma unroll
            for (int r = 0; r < BATCH; ++r) most[r] = warp_max(most[r]);
            if (lane % (32 / BATCH) == 0) {
                const int r = lane / (32 / BATCH), segment = first_segment + from.across;
                sums[segment * p.chunk_rows + row + r] = sum;
                atomicMax(products + row + r, r < 2 ? (r < 1 ? most[0] : most[1]) : (r < 3 ? most[2] : most[3]));
                if constexpr (PARTS > 1) {
                    const i64 word = (rows.global(from.down) + r) * all_segments + segment;
                    if (word < p.rows * all_segments) {
                        leave_word(words->sums + word, meetings.epoch, __float_as_uint(sum));
                    }
                }
            }
            batch = next;
        }
        if constexpr (PARTS > 1) {
            Patience patience(p.scratch);
            given_up |= use.aborted();
            for (int i = threadIdx.x; i < (end - first) * all_segments; i += THREADS) {
                const int segment = i % all_segments, row = i / all_segments;
                const int from = segment * SEGMENT / p.part_columns;
                const i64 word = rows.global(first + row) * all_segments + segment;
                if (from == part || word >= p.rows * all_segments) continue;
                Awaited sum[1] = {{words->sums + word, u32(team * PARTS + from), 0}};
                if (!given_up) await_words(sum, meetings.epoch, patience, given_up);
                sums[segment * p.chunk_rows + row] = __uint_as_float(sum[0].value);
            }
        }
        __syncthreads();
        for (int local = first + threadIdx.x; local < end; local += THREADS) {
            const i64 row = rows.global(local);
            float rstd = 0.0f;
            if (row < p.rows) {
                float total = 0.0f;
                for (int s = 0; s < all_segments; ++s) total = __fadd_rn(total, sums[s * p.chunk_rows + local - first]);
                rstd = finish_row(p, total, products[local - first], best);
                if (part == 0) p.rstd[row] = rstd;
            }
            if (KNOWN) rstds[local] = rstd;
            products[local - first] = 0;
        }
        if (end == count) break;
        first = end, end = min(end + p.chunk_rows, count);
        place = {warp % segments, first + warp / segments * BATCH};
        if (place.down < end) load(batch, place);
        __syncthreads();
    }
    best = warp_max(largest_weight <= WEIGHT_LIMIT ? best : UNDECIDED);
    if (lane == 0) atomicMax(&meetings.estimate.own, best);

    // The last rows first: they are not resident, and L2 may still hold what was read last.
    const int passes = count / TILE_ROWS, strips = (width + TILE_COLUMNS - 1) / TILE_COLUMNS;
    Place tile{warp % strips, passes - 1 - warp / strips};
    const Place tile_step{WARPS % strips, WARPS / strips};
    const auto lane_row = [&] { return tile.down * TILE_ROWS + lane / (32 / ROW_LANES) * TR; };
    const auto lane_column = [&] {
        return first_column + tile.across * TILE_COLUMNS + lane % (32 / ROW_LANES) * TC;
    };
    Quad quads[QUADS];
    Pack<Weight, TC> weights;
    const auto ask_for_quad = [&](int q) {
        const int at = lane_column();
        load_quad(quads[q], rows, lane_row() + 4 * q, at < p.columns ? at : first_column);
    };
    tell(words, 0, meetings.estimate, meetings.epoch);
    if (tile.down >= 0) {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) ask_for_quad(q);
        load_weight_pack(weights, p, lane_column());
    }
    Awaited awaited[1];
    if (!hear(words, 0, meetings.estimate, meetings.epoch, use, p.scratch, given_up, awaited)) return;
    u32 scale_bits = decided_scale(meetings.estimate.all);
    if (scale_bits == UNDECIDED) {
        // Whole rows, since only of those it matters whether all y are NaN.
        for (int local = part + warp * PARTS; local < count; local += WARPS * PARTS) {
            const i64 row = rows.global(local);
            if (row >= p.rows) break;
            const u32 most = exact_row_maximum(p, row, KNOWN ? rstds[local] : p.rstd[row]);
            if (lane == 0) atomicMax(&meetings.exact.own, most);
        }
        tell(words, 1, meetings.exact, meetings.epoch);
        if (!hear(words, 1, meetings.exact, meetings.epoch, use, p.scratch, false, awaited)) return;
        scale_bits = fp8_scale_bits<X>(__uint_as_float(meetings.exact.all));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = u16(scale_bits);
    const float inverse = reciprocal(bf16{u16(scale_bits)});

    // Phase 2.
    while (tile.down >= 0) {
        const int at = lane_column(), own = lane_row(), valid = p.columns - at, from = valid > 0 ? at : first_column;
        const i64 row = rows.global(own);
        const int left = valid > 0 ? int(min(p.rows - row, i64(TR))) : 0;
        tile.across += tile_step.across, tile.down -= tile_step.down;
        if (tile.across >= strips) tile.across -= strips, --tile.down;
        const bool more = tile.down >= 0;
        float weight[TC];
        to_float(weight, weights);
        if (more) load_weight_pack(weights, p, lane_column());
        Turned<TR, TC> turned;
        u8* to = p.qy + row * p.columns + at;
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            Factors factors;
            load_factors(factors, rows, own + 4 * q, from);
            u32 out[4][TC / 4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const u32 pair = factors.scale[r / 2];
                const float scale = __uint_as_float(r % 2 ? pair & 0xffff0000u : pair << 16);
                float v[TC];
#pragma unroll
                for (int j = 0; j < TC / 4; ++j) fp8_floats<X>(quads[q][r][j], v + 4 * j);
#pragma unroll
                for (int i = 0; i < TC; ++i) {
                    v[i] = rounded_to_bf16(normalised(v[i], scale, factors.rstd[r], weight[i]));
                }
                quantise<X, TC>(out[r], v, inverse);
            }
            // The next tile's bytes are asked for before this one's stores, which nothing can be moved across.
            if (more) ask_for_quad(q);
#pragma unroll
            for (int r = 0; r < 4; ++r, to += p.columns) {
                if (4 * q + r < left) store_bytes<TC>(to, out[r], valid, ALIGNED);
            }
            turned.take(q, out);
        }
        store_turned<RUN, ALIGNED>(p.qy_t, turned, row, p.rows, p.batch_rows, p.columns, at);
    }
    if (gridDim.x > 1) use.finish(meetings.epoch, meetings.users);
    if (!p.early_trigger) launch_dependents();
}
