// SPDX-License-Identifier: Apache-2.0
// FP8 RMSNorm forward of many rows in one launch: a block quantises the very part of the tensor that it has reduced. What
// it shares with fp8_rmsnorm_forward.cu, with the numerics: fp8_forward.cuh.
//
// Layout: x [rows, columns] FP8 with a row stride, s_x [rows, ceil(columns / QB)] bf16 with a row stride, w [columns].
// Grid: cooperative, one block a multiprocessor at most. `parts` blocks are a team; groups of BLOCK_ROWS rows go round the
// teams, and each block of a team has `part_columns` columns, whole segments, of its rows.
//   Phase 1  a warp takes BATCH rows of one segment of 512 columns: sum of squares, and largest |x * s * w|. Blocks of a
//            team leave one another the sums. They give the rows' rstd, and with it the block's estimate of the largest
//            |y|. RESIDENT of each 4 quads of rows stay in shared memory; with KNOWN scales and rstd of all rows do.
//   Meeting  the grid's maximum, from which every block computes the one scale.
//   Phase 2  a warp takes a tile of ROW_LANES * TR rows by 32 / ROW_LANES * TC columns (fp8_tile.cuh), its quads from
//            shared memory or, asked for a tile ahead, from memory.
// Global bytes an element with groups of QB: read 1 + 2 / QB (accesses count 1 + 2 / 16, as a lane asks for the scale of
// its 16), and again what is not RESIDENT or KNOWN; written 2. A row's rstd is 4 more. Weights: once a warp and change of
// segment in phase 1, once a tile and row of lanes in phase 2.
#include "bulk_copy.cuh"
#include "fp8_forward.cuh"

constexpr int RESIDENT = DRVFUSE_RESIDENT;  // quads of TR rows of which x is kept: the near rows
constexpr bool KNOWN = DRVFUSE_KNOWN;
constexpr bool BULK = DRVFUSE_BULK;  // rows of scales can be copied as wholes
constexpr int QUADS = TR / 4, FAR = QUADS - RESIDENT;
static_assert(BLOCK_ROWS % TILE_ROWS == 0 && BATCH == 4 && TR == 16, "whole tiles of whole batches");
static_assert((RESIDENT == 0 || (KNOWN && ALIGNED)) && (KNOWN || !BULK), "near rows are copied as wholes");

// The rows of a block, counted from 0, and what it keeps of them.
struct Rows {
    const ForwardParams& p;
    int team, teams;
    int first, width, count;  // columns from `first` on
    u64* come;                // [count / 4], barriers for what is copied of four rows
    float* rstd;              // [count]
    u8* x;                    // [count * RESIDENT / QUADS, pitch], rows of each TR moved on
    bf16* scales;             // [count, scale_pitch], rows of each TR moved on by 16 bytes
    int pitch, scale_pitch;

    __device__ __forceinline__ i64 global(int local) const {
        return (i64(u32(local) / BLOCK_ROWS) * teams + team) * BLOCK_ROWS + u32(local) % BLOCK_ROWS;
    }
    // Lanes TR rows apart read the same columns at once: they shall be in other banks.
    __device__ __forceinline__ u8* near_x(int local, int at) const {
        const u32 turn = u32(local) / TR;
        return x + (turn * (4 * RESIDENT) + u32(local) % TR) * pitch + turn * (TILE_COLUMNS % 128) + (at - first);
    }
    __device__ __forceinline__ bf16* known_scales(int local, int at) const {
        return scales + local * scale_pitch + u32(local) / TR * 8 + u32(at - first) / QB;
    }
};

// Asks for x of the near rows and for all scales, with a barrier for each four rows.
__device__ __forceinline__ void ask_for_rows(const Rows& rows) {
#if __CUDA_ARCH__ >= 900
    const ForwardParams& p = rows.p;
    const int scale_bytes = BULK ? (rows.width + QB - 1) / QB * 2 : 0;
    for (int quad = threadIdx.x / 32 + threadIdx.x % 32 * WARPS; quad < rows.count / 4; quad += THREADS) {
        const bool near = quad % QUADS < RESIDENT;
        if (!near && !BULK) continue;
        make_copy_barrier(rows.come + quad);
        expect_copies(rows.come + quad, 4 * (scale_bytes + (near ? rows.width : 0)));
#pragma unroll 1
        for (int local = 4 * quad; local < 4 * quad + 4; ++local) {
            const i64 row = min(rows.global(local), p.rows - 1);  // another where there is none, which nobody looks at
            if (near) {
                copy_bulk(rows.near_x(local, rows.first), p.x + row * p.x_stride + rows.first, rows.width,
                          rows.come + quad);
            }
            if (BULK) {
                copy_bulk(rows.known_scales(local, rows.first), p.scales + row * p.scale_stride + rows.first / QB,
                          scale_bytes, rows.come + quad);
            }
        }
    }
#endif
}

__device__ __forceinline__ void await_rows(const Rows& rows, int local) {
#if __CUDA_ARCH__ >= 900
    await_copies(rows.come + local / 4);
#endif
}

using QuadWords = u32[4][TC / 4];  // TC columns of four rows; what does not exist is 0

__device__ __forceinline__ void load_far_quad(QuadWords& word, const ForwardParams& p, i64 row, int at) {
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
    float scale[4], rstd[4];
};

// Of quad `quad` of a lane's rows, which begin at `own`.
__device__ __forceinline__ void load_factors(Factors& factors, const Rows& rows, int own, int quad, int at) {
    const ForwardParams& p = rows.p;
    if constexpr (KNOWN) {
        const float4 rstd = *reinterpret_cast<const float4*>(rows.rstd + own + 4 * quad);
        factors.rstd[0] = rstd.x, factors.rstd[1] = rstd.y, factors.rstd[2] = rstd.z, factors.rstd[3] = rstd.w;
#pragma unroll
        for (int r = 0; r < 4; ++r) factors.scale[r] = *rows.known_scales(own + 4 * quad + r, at);
    } else {
        const i64 row = rows.global(own) + 4 * quad;
        const bf16* scale = p.scales + row * p.scale_stride + at / QB;
#pragma unroll
        for (int r = 0; r < 4; ++r, scale += p.scale_stride) {
            const bool exists = row + r < p.rows;
            factors.scale[r] = exists ? float(*scale) : 0.0f;
            factors.rstd[r] = exists ? p.rstd[row + r] : 0.0f;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_forward_rows(const ForwardParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = blockIdx.x % p.parts, team = blockIdx.x / p.parts, teams = gridDim.x / p.parts;
    const int all_segments = (p.columns + SEGMENT - 1) / SEGMENT;
    const int first_column = part * p.part_columns, width = min(p.part_columns, p.columns - first_column);
    const int segments = (width + SEGMENT - 1) / SEGMENT, first_segment = first_column / SEGMENT;
    const int count = (p.groups + (team < p.longer)) * BLOCK_ROWS;
    const int pitch = (width + 127) / 128 * 128, scale_pitch = (segments * SEGMENT / QB + 7) / 8 * 8;
    Meetings& meetings = *reinterpret_cast<Meetings*>(dynamic);
    u8* x = dynamic + sizeof(Meetings);
    float* rstds = reinterpret_cast<float*>(x + (RESIDENT > 0 ? count * RESIDENT / QUADS * pitch + count / TR * (TILE_COLUMNS % 128) : 0));
    u32* products = reinterpret_cast<u32*>(rstds + (KNOWN ? count : 0));    // [chunk_rows]
    float* sums = reinterpret_cast<float*>(products + p.chunk_rows);        // [all segments, chunk_rows]
    bf16* scales = reinterpret_cast<bf16*>(sums + all_segments * p.chunk_rows);
    u64* come = reinterpret_cast<u64*>(scales + (KNOWN ? count * scale_pitch + count / TR * 8 : 0));
    const Rows rows{p, team, teams, first_column, width, count, come, rstds, x, scales, pitch, scale_pitch};
    GridWords* words = reinterpret_cast<GridWords*>(p.scratch.state);

    // Phase 1. A place's `down` counts batches, of near rows or of far ones.
    const Place step{WARPS % segments, WARPS / segments};
    const auto next = [&](const Place& place) {
        Place after{place.across + step.across, place.down + step.down};
        if (after.across >= segments) after.across -= segments, ++after.down;
        return after;
    };
    const auto near_row = [](const Place& place) {
        constexpr int quads = RESIDENT > 0 ? RESIDENT : 1;
        return place.down / quads * TR + place.down % quads * 4;
    };
    const auto far_row = [](const Place& place) {
        constexpr int quads = FAR > 0 ? FAR : 1;
        return place.down / quads * TR + (RESIDENT + place.down % quads) * 4;
    };
    const auto column_of = [&](const Place& place) { return first_column + place.across * SEGMENT + lane * PACK; };
    int first = 0, end = min(p.chunk_rows, count);  // the chunk
    const auto load = [&](Batch& batch, const Place& place) {
        if (place.down < end / TR * FAR) load_batch<!KNOWN>(batch, p, rows.global(far_row(place)), column_of(place));
    };
    wait_for_producer();
    // A far batch is asked for before the one ahead of it is reduced, the first before all near ones.
    Place far{warp % segments, warp / segments};
    Batch ahead;
    if constexpr (FAR > 0) load(ahead, far);
    ask_for_rows(rows);
    if (p.early_trigger) launch_dependents();
    ScratchUse use(p.scratch, gridDim.x > 1);
    if (threadIdx.x == 0) meetings.begin(use);
    for (int row = threadIdx.x; row < p.chunk_rows; row += THREADS) products[row] = 0;
    if constexpr (KNOWN && !BULK) {
        for (int i = threadIdx.x; i < count * scale_pitch; i += THREADS) {
            const int local = i / scale_pitch, at = first_column + i % scale_pitch * QB;
            const i64 row = rows.global(local);
            const bool exists = row < p.rows && at < p.columns;
            rows.known_scales(local, at)->bits = exists ? p.scales[row * p.scale_stride + at / QB].bits : 0;
        }
    }
    __syncthreads();

    u32 best = 0;
    float largest_weight = 0.0f;
    bool given_up = false;
    float w[PACK];
    int held = -1;
    for (;;) {
        // What follows the loads of a batch.
        const auto reduce = [&](const Batch& batch, int segment, int local) {
            const int row = local - first;
            if (segment != held) {
                held = segment;
                load_phase1_weights(w, largest_weight, p, first_column + segment * SEGMENT + lane * PACK);
            }
            float squares[BATCH];
            u32 most[BATCH];
            reduce_packs(batch, w, squares, most);
            const float sum = sum_lanes(squares);
#pragma unroll
            for (int r = 0; r < BATCH; ++r) most[r] = warp_max(most[r]);
            if (lane % (32 / BATCH) == 0) {
                const int r = lane / (32 / BATCH);
                segment += first_segment;
                sums[segment * p.chunk_rows + row + r] = sum;
                atomicMax(products + row + r, r < 2 ? (r < 1 ? most[0] : most[1]) : (r < 3 ? most[2] : most[3]));
                if (p.parts > 1) {
                    const i64 word = (rows.global(local) + r) * all_segments + segment;
                    if (word < p.rows * all_segments) leave_word(words->sums + word, meetings.epoch, __float_as_uint(sum));
                }
            }
        };
        const auto take_scales = [&](Batch& batch, int local, int at) {
#pragma unroll
            for (int r = 0; r < BATCH; ++r) {
                batch.scale[r] = at < p.columns ? rows.known_scales(local + r, at)->bits : u16(0);
            }
        };
        if constexpr (RESIDENT > 0) {
            Place near{warp % segments, first / TR * RESIDENT + warp / segments};
            for (; near.down < end / TR * RESIDENT; near = next(near)) {
                const int local = near_row(near), at = column_of(near);
                await_rows(rows, local);
                Batch batch = {};
                if (at < p.columns) {
                    const u8* x = rows.near_x(local, at);
#pragma unroll
                    for (int r = 0; r < BATCH; ++r) load_bytes<PACK>(batch.word[r], x + r * pitch, PACK, true);
                }
                take_scales(batch, local, at);
                reduce(batch, near.across, local);
            }
        }
        if constexpr (FAR > 0) {
            while (far.down < end / TR * FAR) {
                Batch batch = ahead;
                const int across = far.across, local = far_row(far);
                far = next(far);
                load(ahead, far);
                if (BULK) await_rows(rows, local);
                if (KNOWN) take_scales(batch, local, first_column + across * SEGMENT + lane * PACK);
                reduce(batch, across, local);
            }
        }
        if (p.parts > 1) {
            Patience patience(p.scratch);
            given_up |= use.aborted();
            for (int i = threadIdx.x; i < (end - first) * all_segments; i += THREADS) {
                const int segment = i % all_segments, row = i / all_segments;
                const int from = segment * SEGMENT / p.part_columns;
                const i64 word = rows.global(first + row) * all_segments + segment;
                if (from == part || word >= p.rows * all_segments || given_up) continue;
                Awaited sum[1] = {{words->sums + word, u32(team * p.parts + from), 0}};
                await_words(sum, meetings.epoch, patience, given_up);
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
        far = {warp % segments, first / TR * FAR + warp / segments};
        if constexpr (FAR > 0) load(ahead, far);
        __syncthreads();
    }
    best = warp_max(largest_weight <= WEIGHT_LIMIT ? best : UNDECIDED);
    if (lane == 0) atomicMax(&meetings.estimate.own, best);

    // The last rows first, since L2 may still hold what was read last.
    const int passes = count / TILE_ROWS, strips = (width + TILE_COLUMNS - 1) / TILE_COLUMNS;
    Place tile{warp % strips, passes - 1 - warp / strips};
    const Place tile_step{WARPS % strips, WARPS / strips};
    const auto lane_row = [&] { return tile.down * TILE_ROWS + lane / (32 / ROW_LANES) * TR; };
    const auto lane_column = [&] {
        return first_column + tile.across * TILE_COLUMNS + lane % (32 / ROW_LANES) * TC;
    };
    QuadWords reread[FAR > 0 ? FAR : 1];
    Pack<Weight, TC> weights;
    const auto reread_quad = [&](int q) {
        const int at = lane_column();
        load_far_quad(reread[q - RESIDENT], p, rows.global(lane_row()) + 4 * q, at < p.columns ? at : first_column);
    };
    if (tile.down >= 0) {
#pragma unroll
        for (int q = RESIDENT; q < QUADS; ++q) reread_quad(q);
        load_weight_pack(weights, p, lane_column());
    }
    Turned<TR, TC> before;  // the tile of which the columns are stored between the rows of the next
    u8* columns = nullptr;
    int columns_valid = 0;
    tell(words, 0, meetings.estimate, meetings.epoch);
    Awaited awaited[1];
    if (!hear(words, 0, meetings.estimate, meetings.epoch, use, p.scratch, given_up, awaited)) return;
    u32 scale_bits = decided_scale(meetings.estimate.all);
    if (scale_bits == UNDECIDED) {
        // Whole rows, since only of those it matters whether all y are NaN.
        for (int local = part + warp * p.parts; local < count; local += WARPS * p.parts) {
            const i64 row = rows.global(local);
            if (row >= p.rows) break;
            const u32 most = exact_row_maximum(p, row, KNOWN ? rstds[local] : p.rstd[row], 0, p.columns);
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
        const i64 row0 = rows.global(own);
        const int left = valid > 0 ? int(min(p.rows - row0, i64(TR))) : 0;
        float weight[TC];
        to_float(weight, weights);
        Turned<TR, TC> turned;
        u8* to = p.qy + row0 * p.columns + at;
        const u8* const kept = rows.near_x(own, from);
        tile.across += tile_step.across, tile.down -= tile_step.down;
        if (tile.across >= strips) tile.across -= strips, --tile.down;
        const bool more = tile.down >= 0;
        if (more) load_weight_pack(weights, p, lane_column());
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            QuadWords word;
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (q < RESIDENT) {
                    load_bytes<TC>(word[r], kept + (4 * q + r) * pitch, TC, true);
                } else {
#pragma unroll
                    for (int j = 0; j < TC / 4; ++j) word[r][j] = reread[q < RESIDENT ? 0 : q - RESIDENT][r][j];
                }
            }
            Factors factors;
            load_factors(factors, rows, own, q, from);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                float v[TC];
#pragma unroll
                for (int j = 0; j < TC / 4; ++j) fp8_floats<X>(word[r][j], v + 4 * j);
#pragma unroll
                for (int i = 0; i < TC; ++i) {
                    v[i] = rounded_to_bf16(normalised(v[i], factors.scale[r], factors.rstd[r], weight[i]));
                }
                quantise<X, TC>(word[r], v, inverse);
            }
            // Of the next tile, before this one's stores, which nothing can be moved across.
            if (q >= RESIDENT && more) reread_quad(q);
            // A branch, or the compiler defers the stores of the whole tile.
            if (4 * q + 4 <= left) {
#pragma unroll
                for (int r = 0; r < 4; ++r, to += p.columns) store_bytes<TC>(to, word[r], valid, ALIGNED);
            } else {
#pragma unroll
                for (int r = 0; r < 4; ++r, to += p.columns) {
                    if (4 * q + r < left) store_bytes<TC>(to, word[r], valid, ALIGNED);
                }
            }
            turned.take(q, word);
            if (RUN == TR && columns != nullptr) {
                store_columns<ALIGNED>(columns, before, p.batch_rows, columns_valid, q * TC / QUADS, TC / QUADS);
            }
        }
        if constexpr (RUN == TR) {
            before = turned, columns_valid = valid;
            columns = left > 0 ? turned_place(p.qy_t, row0, p.rows, p.batch_rows, p.columns, at) : nullptr;
        } else {
            store_turned<RUN, ALIGNED>(p.qy_t, turned, row0, p.rows, p.batch_rows, p.columns, at);
        }
    }
    if (RUN == TR && columns != nullptr) store_columns<ALIGNED>(columns, before, p.batch_rows, columns_valid, 0, TC);
    if (gridDim.x > 1) use.finish();
    if (!p.early_trigger) launch_dependents();
}
