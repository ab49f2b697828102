// SPDX-License-Identifier: Apache-2.0
// The forward pass of FP8 RMSNorm or LayerNorm of many rows in one launch: a block quantises the part of the tensor
// that it has reduced. forward.cuh has the common parts of the forward kernels, and the numerics.
//
// Layout: x [rows, columns] FP8 with a row stride, s_x [rows, ceil(columns / QB)] bf16 with a row stride, w, b [columns].
// Grid: cooperative, at most one block per multiprocessor. PARTS blocks form a team. The teams take groups of
// BLOCK_ROWS rows in turn, and each block of a team has `part_columns` columns, whole segments, of the team's rows.
//   Phase 1  A warp takes BATCH rows of one segment of 512 columns: the sum of squares, and the largest |x * s * w|.
//            The blocks of a team exchange the sums. These give the rows' rstd, and with it the block's estimate of the
//            largest |y|. x of the first `resident_columns` columns stays in shared memory; with KNOWN all scales and
//            rstd do.
//   Meeting  The blocks exchange their maxima, and every block computes the one scale from the grid's maximum.
//   Phase 2  A warp takes tiles of a group's rows (forward_tiles.cuh): first those that are not resident, since L2 may
//            still hold them, then those that are.
// LayerNorm reads x twice in phase 1, the second time from shared memory if it is resident: for the sum, which gives
// the mean, and for the squares of x * s - mean, which give the rstd. It then has the largest |y| too: without w and b
// this is rstd times the largest |x * s - mean|, with w and b an estimate with a guess at the rstd
// (forward_layernorm.cuh). If the estimate does not decide the scale, the blocks read x once more.
//
// Global bytes per element, with one scale per QB columns: 1 + 2 / QB are read (the counters show 1 + 2 / 16, since
// each lane loads the scale of its 16 columns). Elements that are not resident, and scales without KNOWN, are read
// again for each further reading and for phase 2. 2 bytes are written. Each row's rstd, and its mean, adds 4. The
// weights are read once per warp and change of segment in phase 1, and once per tile and row of lanes in phase 2.
//
// PDL. Nothing in global memory is read before the wait. The trigger is right after the first loads (early_trigger) or
// after the last store.
#include "coat/forward_layernorm.cuh"
#include "coat/forward_meeting.cuh"
#include "coat/forward_tiles.cuh"

constexpr int PARTS = DRVFUSE_PARTS;  // blocks that share a group of rows
constexpr bool LATE =
    LAYER && AFFINE;  // the first near tile is loaded late: there are no registers for it during the far tiles
static_assert(KNOWN || PARTS == 1, "p.rstd is read by the block that has written it");
static_assert(!GUESSED || PARTS == 1, "a block guesses the rstd of whole rows");

// A warp's batches of a chunk of rows, in an order with few changes of segment: one batch is processed while the next
// one is loaded. The batches do not alternate between two sets of registers: then all loads of a round would count on
// one scoreboard, and each would wait for the others.
struct Run {
    Place asked;  // the batch that is loaded next, if there is one
    int left;     // batches from there on
    Batch after;  // the batch before `asked`, in flight

    template <typename Fetch>
    __device__ __forceinline__ void begin(int first, int end, int segments, Fetch fetch) {
        const int warp = threadIdx.x / 32;
        const int quads = (end - first) / BATCH, from = quads * segments * warp / WARPS;
        asked = {from / quads, first + from % quads * BATCH}, left = quads * segments * (warp + 1) / WARPS - from;
        if (left > 0) fetch(after, asked);
    }
    template <typename Fetch, typename Take>
    __device__ __forceinline__ void each(int first, int end, Fetch fetch, Take take) {
#pragma unroll 1
        while (left > 0) {
            const Place from = asked;
            const Batch batch = after;
            if ((asked.down += BATCH) == end) asked.down = first, ++asked.across;
            if (--left > 0) fetch(after, asked);
            take(batch, from);
        }
    }
};

// Calls `finish` for each row of a chunk, with the sum over its segments.
template <typename Finish>
__device__ __forceinline__ void add_segments(const Rows& rows, const float* sums, int first, int end, Finish finish) {
    const ForwardParams& p = rows.p;
    for (int local = first + threadIdx.x; local < end; local += THREADS) {
        const i64 row = rows.global(local);
        float total = 0.0f;
        if (row < p.rows) {
            for (int at = 0, s = 0; at < p.columns; at += SEGMENT, ++s) {
                total = __fadd_rn(total, sums[s * p.chunk_rows + local - first]);
            }
        }
        finish(local, row, total);
    }
}

// LayerNorm's largest |y|, with w and b, of a warp's part of the block's rows; UNDECIDED if all y of a pack are NaN.
__device__ __forceinline__ u32 largest_of_all(const Rows& rows, int segments) {
    const ForwardParams& p = rows.p;
    u32 best = 0;
#pragma unroll 1
    for (int row = threadIdx.x / 32 * BATCH, at = rows.first + int(threadIdx.x) % 32 * PACK; row < rows.count;) {
        Batch batch;
        load_batch(batch, p, rows.global(row), at);
        Pack<Weight, PACK> weight, bias;
        load_weight_pack(weight, p, at);
        load_weight_pack(bias, p.bias, p.columns, at);
        float mean[BATCH], rstd[BATCH];
#pragma unroll
        for (int r = 0; r < BATCH; ++r) mean[r] = rows.mean_of(row + r), rstd[r] = rows.rstd_of(row + r);
        u32 most[BATCH];
        largest_of_batch(most, batch, mean, rstd, weight, bias, p.columns - at);
#pragma unroll
        for (int r = 0; r < BATCH; ++r) {
            const bool exists = WHOLE || rows.global(row + r) < p.rows;
            if (exists && (WHOLE || at < p.columns)) best = max(best, most[r]);
        }
        if ((at += SEGMENT) >= segments * SEGMENT) at -= segments * SEGMENT, row += WARPS * BATCH;
    }
    return ptx::warp_max(best);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_norm_forward_rows(const ForwardParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = blockIdx.x % PARTS, team = blockIdx.x / PARTS, teams = gridDim.x / PARTS;
    const int all_segments = (p.columns + SEGMENT - 1) / SEGMENT;
    const int first_column = part * p.part_columns;
    const int width = PARTS > 1 ? min(p.part_columns, p.columns - first_column) : p.columns;
    const int segments = (width + SEGMENT - 1) / SEGMENT, first_segment = first_column / SEGMENT;
    const int count = (p.groups + (team < p.longer)) * BLOCK_ROWS;
    Meetings& meetings = *reinterpret_cast<Meetings*>(dynamic);
    u8* x = dynamic + sizeof(Meetings);
    float* rstds = reinterpret_cast<float*>(x + count * p.resident_columns);
    float* means = rstds + (KNOWN ? count : 0);
    u32* products = reinterpret_cast<u32*>(means + (KNOWN && LAYER ? count : 0));  // [chunk_rows]
    float* sums = reinterpret_cast<float*>(products + p.chunk_rows);               // [all segments, chunk_rows]
    // with LayerNorm's guess, sums of squares are stored in place of the products
    float* guesses = reinterpret_cast<float*>(products);
    bf16* scales = reinterpret_cast<bf16*>(sums + all_segments * p.chunk_rows);
    const Rows rows{p, team, teams, first_column, width, count, rstds, means, x, scales};
    GridWords* words = reinterpret_cast<GridWords*>(p.scratch.state);

    // Phase 1.
    const auto column_of = [&](const Place& place) { return first_column + place.across * SEGMENT + lane * PACK; };
    int first = 0, end = min(p.chunk_rows, count);  // the chunk
    int held = -1;                                  // the segment whose weights are in registers
    Run run;
    Pack<Weight, PACK> raw;  // the chunk's first weights, in flight
    const auto fetch = [&](Batch& batch, const Place& place) {
        load_batch(batch, p, rows.global(place.down), column_of(place));
    };
    const auto begin_chunk = [&] {
        run.begin(first, end, segments, fetch);
        held = -1;
        if (!LAYER && run.left > 0) load_weight_pack(raw, p, column_of(run.asked));
    };
    wait_for_producer();
    ScratchUse use(p.scratch, gridDim.x > 1);
    if (FAULT("fp8-launch-number-too-early") && threadIdx.x + blockIdx.x == 0) {
        ptx::store_relaxed_gpu(&p.scratch.state->epoch, use.epoch());
    }
    begin_chunk();
    if (p.early_trigger) launch_dependents();
    for (int row = threadIdx.x; row < p.chunk_rows; row += THREADS) products[row] = 0;
    __syncthreads();

    u32 best = 0;
    float largest_weight = 0.0f, largest_bias = 0.0f;
    bool given_up = false;
    float w[PACK];
    // Stores the sums of a batch's rows over the lanes and, if `magnitudes`, their largest magnitudes.
    const auto leave_batch = [&](float (&own)[BATCH], u32(&most)[BATCH], bool magnitudes, const Place& from) {
        const int row = from.down - first;
        const float sum = sum_lanes(own);
        if (magnitudes) {
#pragma unroll
            for (int r = 0; r < BATCH; ++r) most[r] = ptx::warp_max(most[r]);
        }
        if (lane % (32 / BATCH) == 0) {
            const int r = lane / (32 / BATCH), segment = first_segment + from.across;
            sums[segment * p.chunk_rows + row + r] = sum;
            if (magnitudes) {
                atomicMax(products + row + r, r < 2 ? (r < 1 ? most[0] : most[1]) : (r < 3 ? most[2] : most[3]));
            }
        }
    };
    // Completes the sums of the chunk's rows. Each of LAYER's rounds has its own words. Contains a block barrier.
    const auto share_sums = [&](int round) {
        if constexpr (PARTS > 1) {
            u64* const of_round = words->sums + round * (p.rows * all_segments);
            __syncthreads();
            for (int i = threadIdx.x; i < (end - first) * segments; i += THREADS) {
                const int segment = first_segment + i % segments, row = i / segments;
                const i64 word = rows.global(first + row) * all_segments + segment;
                const u32 sum = __float_as_uint(sums[segment * p.chunk_rows + row]);
                if (FAULT("block-1-leaves-no-sums") && blockIdx.x == 1) continue;
                if (word < p.rows * all_segments) leave_word(of_round + word, meetings.epoch, sum);
            }
            Patience patience(p.scratch);
            given_up |= use.aborted();
            for (int i = threadIdx.x; i < (end - first) * all_segments; i += THREADS) {
                const int segment = i % all_segments, row = i / all_segments;
                const int from = segment * SEGMENT / p.part_columns;
                const i64 word = rows.global(first + row) * all_segments + segment;
                if (from == part || word >= p.rows * all_segments) continue;
                Awaited sum[1] = {{of_round + word, u32(team * PARTS + from), 0}};
                if (!given_up) await_words(sum, meetings.epoch, patience, given_up);
                sums[segment * p.chunk_rows + row] = __uint_as_float(sum[0].value);
            }
        }
        __syncthreads();
    };
    for (;;) {
        run.each(first, end, fetch, [&](const Batch& batch, const Place& from) {
            const int at = column_of(from);
            float own[BATCH];
            u32 most[BATCH];
            if constexpr (!LAYER) {
                if (from.across != held) {
                    if (held >= 0) load_weight_pack(raw, p, at);
                    held = from.across;
                    take_phase1_weights(w, largest_weight, raw);
                }
            }
            if (at < p.columns) keep_batch(batch, rows, from.down, at);
            if constexpr (LAYER) {
                float squared[BATCH];
#pragma unroll
                for (int r = 0; r < BATCH; ++r) own[r] = pack_sum(batch, r, GUESSED ? &squared[r] : nullptr);
                if constexpr (GUESSED) {  // the order may vary, since the sums are only used for a guess
                    const float sum = sum_lanes(squared);
                    float* of_row = guesses + from.down - first + lane / (32 / BATCH);
                    if (lane % (32 / BATCH) == 0) atomicAdd(of_row, sum);
                }
            } else {
                reduce_packs(batch, w, own, most);
            }
            leave_batch(own, most, !LAYER, from);
        });
        if (first == 0 && threadIdx.x == 0) meetings.begin(use);
        if constexpr (LAYER) {
            const auto again = [&](Batch& batch, const Place& place) {
                fetch_batch(batch, rows, place.down, column_of(place));
            };
            share_sums(0);
            add_segments(rows, sums, first, end, [&](int local, i64 row, float total) {
                const float mean = ptx::divide_full(total, float(p.columns));
                if (row < p.rows && part == 0) p.mean[row] = mean;
                if (KNOWN) means[local] = mean;
                if constexpr (GUESSED) {
                    guesses[local - first] = guess_rstd(p, guesses[local - first], mean);
                }
            });
            run.begin(first, end, segments, again);
            __syncthreads();
            Pack<Weight, PACK> bias;
            run.each(first, end, again, [&](const Batch& batch, const Place& from) {
                const int at = column_of(from);
                float own[BATCH], mean[BATCH], guess[BATCH];
                u32 most[BATCH] = {};
#pragma unroll
                for (int r = 0; r < BATCH; ++r) mean[r] = rows.mean_of(from.down + r);
                if constexpr (GUESSED) {
                    if (from.across != held) {
                        load_weight_pack(raw, p, at);
                        load_weight_pack(bias, p.bias, p.columns, at);
                        held = from.across;
                        // Rows behind the end of the tensor come last. In a warp without an existing row `best` stays 0.
                        const bool exists = WHOLE || rows.global(from.down) < p.rows;
                        if (exists) grow_to(largest_weight, raw), grow_to(largest_bias, bias);
                    }
#pragma unroll
                    for (int r = 0; r < BATCH; ++r) guess[r] = guesses[from.down - first + r];
                    estimate_batch(own, most, batch, mean, guess, raw, bias, p.columns - at);
#pragma unroll
                    for (int r = 0; r < BATCH; ++r) {
                        if (WHOLE || rows.global(from.down + r) < p.rows) best = max(best, most[r]);
                    }
                } else {
#pragma unroll
                    for (int r = 0; r < BATCH; ++r) {
                        own[r] = pack_variance(batch, r, mean[r], p.columns - at, &most[r]);
                    }
                }
                leave_batch(own, most, !AFFINE, from);
            });
            share_sums(1);
            add_segments(rows, sums, first, end, [&](int local, i64 row, float total) {
                const float variance = ptx::divide_full(total, float(p.columns));
                const float rstd = reciprocal_root(__fadd_rn(variance, p.epsilon));
                if (row < p.rows) {
                    if (part == 0) p.rstd[row] = rstd;
                    if (!AFFINE) best = max(best, largest_by_rstd(products[local - first], rstd));
                    if (AFFINE && !near_enough(guesses[local - first], rstd)) best = UNDECIDED;
                }
                if (KNOWN) rstds[local] = rstd;
                products[local - first] = 0;
            });
        } else {
            share_sums(0);
            add_segments(rows, sums, first, end, [&](int local, i64 row, float total) {
                float rstd = 0.0f;
                if (row < p.rows) {
                    rstd = finish_row(p, total, products[local - first], best);
                    if (part == 0) p.rstd[row] = rstd;
                }
                if (KNOWN) rstds[local] = rstd;
                products[local - first] = 0;
            });
        }
        if (end == count) break;
        first = end, end = min(end + p.chunk_rows, count);
        begin_chunk();
        __syncthreads();
    }
    if (GUESSED) best = ptx::warp_max(best);
    best = ptx::warp_max(may_estimate(best, largest_weight, largest_bias) ? best : UNDECIDED);
    if (lane == 0) atomicMax(&meetings.estimate.own, best);

    const int strips = (width + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int near = min(strips, p.resident_columns / TILE_COLUMNS);
    const int others = count / TILE_ROWS * (strips - near);  // the tiles that are not resident
    const int second = (warp + WARPS - others % WARPS) % WARPS;
    Tiles<false> far_tiles(rows, near, strips - near, warp);
    Tiles<true> near_tiles(rows, 0, near, second);
    tell(words, 0, meetings.estimate, meetings.epoch);
    far_tiles.ask_for_first();
    if (!LATE) near_tiles.ask_for_first();
    Awaited awaited[1];
    if (!hear(words, 0, meetings.estimate, meetings.epoch, use, p.scratch, given_up, awaited)) return;
    const bool exact = LAYER && !AFFINE;
    u32 scale_bits = exact ? settled_scale(meetings.estimate.all) : decided_scale(meetings.estimate.all);
    if (scale_bits == UNDECIDED) {
        bool strange = true;
        if constexpr (GUESSED) {
            const u32 most = largest_of_all(rows, segments);
            strange = __syncthreads_or(most == UNDECIDED);
            if (!strange && lane == 0) atomicMax(&meetings.exact.own, most);
        }
        // A warp takes a whole row, since the test whether all y are NaN is for whole rows.
        for (int local = part + warp * PARTS; strange && local < count; local += WARPS * PARTS) {
            const i64 row = rows.global(local);
            if (row >= p.rows) break;
            const u32 most = exact_row_maximum(p, row, rows.mean_of(local), rows.rstd_of(local));
            if (lane == 0) atomicMax(&meetings.exact.own, most);
        }
        tell(words, 1, meetings.exact, meetings.epoch);
        if (!hear(words, 1, meetings.exact, meetings.epoch, use, p.scratch, false, awaited)) return;
        scale_bits = fp8_scale_bits<X>(__uint_as_float(meetings.exact.all));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = u16(scale_bits);
    const float inverse = ptx::reciprocal_approx(bf16{u16(scale_bits)});

    // Phase 2.
    far_tiles.quantise_all(inverse);
    if (LATE) near_tiles.ask_for_first();
    near_tiles.quantise_all(inverse);
    if (gridDim.x > 1) use.finish(meetings.epoch, meetings.users);
    leave_stream(p);
}
