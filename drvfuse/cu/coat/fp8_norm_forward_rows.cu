// SPDX-License-Identifier: Apache-2.0
// The forward pass of FP8 RMSNorm or LayerNorm of many rows in one launch (plan `ManyRows`). Each block quantises the
// part of the tensor whose sums it has computed, and keeps as much of this part in shared memory as fits.
//
// Computes rstd, the scale, qy and qy_t, with LAYER also mean, from x, its group scales, w and b. forward.cuh has the
// formulas, shapes, dtypes and numerics, and `ForwardParams` the layout.
//
// Division. The launch is cooperative, with at most one block per multiprocessor. PARTS blocks form a team. A group is
// BLOCK_ROWS consecutive rows. Team t takes groups t, t + teams, ..., and each block of a team has `part_columns`
// columns, whole segments, of the team's rows. In phase 1 a block works on a chunk of `chunk_rows` rows at a time.
//   Phase 1   A warp takes batches of BATCH rows of one segment of 512 columns. It computes each row's sum of squares
//             and largest |x * s * w| over the segment. The blocks of a team exchange the sums, which give the rows'
//             rstd, and with it the block's estimate of the largest |y|.
//   Exchange  All blocks exchange their estimates, and every block computes the scale (forward_meeting.cuh).
//   Phase 2   A warp takes tiles of a group's rows (forward_tiles.cuh), quantises them, and stores them in qy and qy_t:
//             first far tiles, since L2 may still hold them, then near tiles.
// In phase 1 LayerNorm reads x twice: first for the sum of x * s, which gives the mean, then for the squares of x * s -
// mean, which give the rstd. The second time also gives the largest |y|. Without w and b this is rstd times the largest
// |x * s - mean|. With w and b it is an estimate with a guess at rstd (forward_layernorm.cuh). If the estimate does not
// decide the scale, the blocks read x once more.
//
// Storage. Shared memory: x of the first `resident_columns` columns of all rows of the block; with KNOWN the scales,
// rstd and mean of these rows; the sums of a chunk of rows by segment, and one maximum for each row of the chunk.
// Registers: a warp's batch and the next batch, which is in flight; in phase 2 the quads of a tile.
//
// Memory ordering. Warps of a block exchange values through shared memory, with block barriers between stores and
// loads. The blocks of a team exchange the sums of a row's segments as words of grid_words.cuh, each of which carries
// its own readiness; LayerNorm's two sums have separate words. No block stores a word before it has read the epoch.
// After the exchange of estimates, block 0 has read a word of every block, so it may advance the epoch.
//
// Traffic. Global bytes per element, with one scale per QB columns: 1 + 2 / QB are read (profilers show 1 + 2 / 16,
// since each lane loads the scale of its 16 columns). Elements that are not in shared memory, and scales without KNOWN,
// are read again each time that phase 1 needs x again, and in phase 2. 2 bytes are written. Each row adds 4 bytes for
// rstd and, with LAYER, 4 for mean. In phase 1 a warp reads weights each time that it begins another segment. In phase
// 2 the weights of a tile are read ROW_LANES times, once by each of the lanes that have the same columns.
//
// PDL. Before the wait for the producer, nothing in global memory is read. A block triggers right after its first loads
// (early_trigger) or after its last store.
#include "coat/forward_batches.cuh"
#include "coat/forward_meeting.cuh"

constexpr int PARTS = DRVFUSE_PARTS;  // blocks that share a group of rows
// Whether the first loads of near tiles are issued only after all far tiles are stored, since far tiles leave no
// registers for them.
constexpr bool LOADS_NEAR_LATE = LAYER && AFFINE;
static_assert(KNOWN || PARTS == 1, "p.rstd is read by the block that has written it");
static_assert(!GUESSED || PARTS == 1, "a block guesses the rstd of whole rows");

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_norm_forward_rows(const ForwardParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = blockIdx.x % PARTS, team = blockIdx.x / PARTS, teams = gridDim.x / PARTS;
    const int all_segments = (p.columns + SEGMENT - 1) / SEGMENT;
    const int first_column = part * p.part_columns;
    const int width = PARTS > 1 ? min(p.part_columns, p.columns - first_column) : p.columns;  // columns of the block
    const int segments = (width + SEGMENT - 1) / SEGMENT, first_segment = first_column / SEGMENT;
    const int count = (p.groups + (team < p.longer)) * BLOCK_ROWS;  // rows of the block
    // Shared memory, in this order.
    Meetings& meetings = *reinterpret_cast<Meetings*>(dynamic);
    u8* x = dynamic + sizeof(Meetings);                                       // Rows::x
    float* rstds = reinterpret_cast<float*>(x + count * p.resident_columns);  // Rows::rstd
    float* means = rstds + (KNOWN ? count : 0);                               // Rows::mean
    // [chunk_rows]: the bits of the largest |x * s * w| (RMSNorm) or |x * s - mean| (LayerNorm) of each row. With
    // GUESSED the same memory is `guesses` [chunk_rows]: each row's sum of squares, later the guess at its rstd.
    u32* products = reinterpret_cast<u32*>(means + (KNOWN && LAYER ? count : 0));
    float* guesses = reinterpret_cast<float*>(products);
    float* sums = reinterpret_cast<float*>(products + p.chunk_rows);             // [all_segments, chunk_rows]
    bf16* scales = reinterpret_cast<bf16*>(sums + all_segments * p.chunk_rows);  // Rows::scales
    const Rows rows{p, team, teams, first_column, width, count, rstds, means, x, scales};
    GridWords* words = reinterpret_cast<GridWords*>(p.scratch.state);

    // Phase 1: compute the statistics of the rows and the estimate of the largest |y|.
    const auto column_of = [&](const Position& batch) { return first_column + batch.across * SEGMENT + lane * PACK; };
    int first = 0, end = min(p.chunk_rows, count);  // the chunk has rows `first` to end - 1 of the block
    int weight_segment = -1;                        // the segment whose weights are in registers; -1: none
    BatchLoop loop;
    // w of segment `weight_segment` or, while that is -1, of the segment of the chunk's first batch
    Pack<Weight, PACK> raw;
    const auto load = [&](Batch& batch, const Position& position) {
        load_batch(batch, p, rows.global_row(position.down), column_of(position));
    };
    const auto begin_chunk = [&] {
        loop.begin(first, end, segments, load);
        weight_segment = -1;
        if (!LAYER && loop.left > 0) load_weight_pack(raw, p, column_of(loop.position));
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

    u32 estimate = 0;                                  // the largest |y| (an estimate, as bits) of this thread's rows
    float largest_weight = 0.0f, largest_bias = 0.0f;  // the largest |w| and |b| that this thread has used
    bool given_up = false;                             // a wait of this thread has timed out
    float w[PACK];
    // For each row of a batch: adds `own` over the lanes, and stores the sum in `sums`. If `magnitudes`, also raises
    // the row's maximum in `products` to the greatest value that `largest` has in any lane.
    const auto store_sums = [&](float (&own)[BATCH], u32(&largest)[BATCH], bool magnitudes, const Position& position) {
        const int row = position.down - first;
        const float sum = sum_lanes(own);
        if (magnitudes) {
#pragma unroll
            for (int r = 0; r < BATCH; ++r) largest[r] = ptx::warp_max(largest[r]);
        }
        if (lane % (32 / BATCH) == 0) {
            const int r = lane / (32 / BATCH), segment = first_segment + position.across;
            sums[segment * p.chunk_rows + row + r] = sum;
            if (magnitudes) {
                const u32 of_row = r < 2 ? (r < 1 ? largest[0] : largest[1]) : (r < 3 ? largest[2] : largest[3]);
                atomicMax(products + row + r, of_row);
            }
        }
    };
    // Exchanges the sums of the chunk's rows with the other blocks of the team, so that this block's `sums` has the
    // sums of all segments. `which` is 0, or 1 for LayerNorm's second sums, for which there are separate words.
    // Contains block barriers.
    const auto share_sums = [&](int which) {
        if constexpr (PARTS > 1) {
            u64* const sum_words = words->sums + which * (p.rows * all_segments);
            __syncthreads();
            for (int i = threadIdx.x; i < (end - first) * segments; i += THREADS) {
                const int segment = first_segment + i % segments, row = i / segments;
                const i64 word = rows.global_row(first + row) * all_segments + segment;
                const u32 sum = __float_as_uint(sums[segment * p.chunk_rows + row]);
                if (FAULT("block-1-leaves-no-sums") && blockIdx.x == 1) continue;
                if (word < p.rows * all_segments) leave_word(sum_words + word, meetings.epoch, sum);
            }
            Patience patience(p.scratch);
            given_up |= use.aborted();
            for (int i = threadIdx.x; i < (end - first) * all_segments; i += THREADS) {
                const int segment = i % all_segments, row = i / all_segments;
                const int source = segment * SEGMENT / p.part_columns;  // the block of the team that has the segment
                const i64 word = rows.global_row(first + row) * all_segments + segment;
                if (source == part || word >= p.rows * all_segments) continue;
                Awaited sum[1] = {{sum_words + word, u32(team * PARTS + source), 0}};
                if (!given_up) await_words(sum, meetings.epoch, patience, given_up);
                sums[segment * p.chunk_rows + row] = __uint_as_float(sum[0].value);
            }
        }
        __syncthreads();
    };
    for (;;) {
        loop.run(first, end, load, [&](const Batch& batch, const Position& position) {
            const int column = column_of(position);
            float own[BATCH];
            u32 largest[BATCH];
            if constexpr (!LAYER) {
                if (position.across != weight_segment) {
                    if (weight_segment >= 0) load_weight_pack(raw, p, column);
                    weight_segment = position.across;
                    widen_weights(w, largest_weight, raw);
                }
            }
            if (column < p.columns) store_in_shared(batch, rows, position.down, column);
            if constexpr (LAYER) {
                float squares[BATCH];
#pragma unroll
                for (int r = 0; r < BATCH; ++r) own[r] = pack_sum(batch, r, GUESSED ? &squares[r] : nullptr);
                // Atomics add in any order. This is allowed here, since the sums are used only for a guess at rstd.
                if constexpr (GUESSED) {
                    const float sum = sum_lanes(squares);
                    float* row_squares = guesses + position.down - first + lane / (32 / BATCH);
                    if (lane % (32 / BATCH) == 0) atomicAdd(row_squares, sum);
                }
            } else {
                reduce_packs(batch, w, own, largest);
            }
            store_sums(own, largest, !LAYER, position);
        });
        if (first == 0 && threadIdx.x == 0) meetings.begin(use);
        if constexpr (LAYER) {
            const auto reload = [&](Batch& batch, const Position& position) {
                reload_batch(batch, rows, position.down, column_of(position));
            };
            share_sums(0);
            add_segments(rows, sums, first, end, [&](int block_row, i64 row, float total) {
                const float mean = ptx::divide_full(total, float(p.columns));
                if (row < p.rows && part == 0) p.mean[row] = mean;
                if (KNOWN) means[block_row] = mean;
                if constexpr (GUESSED) {
                    guesses[block_row - first] = guess_rstd(p, guesses[block_row - first], mean);
                }
            });
            loop.begin(first, end, segments, reload);
            __syncthreads();
            Pack<Weight, PACK> bias;
            loop.run(first, end, reload, [&](const Batch& batch, const Position& position) {
                const int column = column_of(position);
                float own[BATCH], mean[BATCH], guess[BATCH];
                u32 largest[BATCH] = {};
#pragma unroll
                for (int r = 0; r < BATCH; ++r) mean[r] = rows.mean_of(position.down + r);
                if constexpr (GUESSED) {
                    if (position.across != weight_segment) {
                        load_weight_pack(raw, p, column);
                        load_weight_pack(bias, p.bias, p.columns, column);
                        weight_segment = position.across;
                        // A warp that has only rows beyond the tensor's last row has the estimate 0. Its largest |b|
                        // must then stay 0 too, or is_reliable() would refuse the estimate.
                        if (WHOLE || rows.global_row(position.down) < p.rows) {
                            float widened[PACK];
                            widen_weights(widened, largest_weight, raw);
                            widen_weights(widened, largest_bias, bias);
                        }
                    }
#pragma unroll
                    for (int r = 0; r < BATCH; ++r) guess[r] = guesses[position.down - first + r];
                    estimate_batch(own, largest, batch, mean, guess, raw, bias, p.columns - column);
#pragma unroll
                    for (int r = 0; r < BATCH; ++r) {
                        if (WHOLE || rows.global_row(position.down + r) < p.rows) estimate = max(estimate, largest[r]);
                    }
                } else {
#pragma unroll
                    for (int r = 0; r < BATCH; ++r) {
                        own[r] = pack_variance(batch, r, mean[r], p.columns - column, &largest[r]);
                    }
                }
                store_sums(own, largest, !AFFINE, position);
            });
            share_sums(1);
            add_segments(rows, sums, first, end, [&](int block_row, i64 row, float total) {
                const float variance = ptx::divide_full(total, float(p.columns));
                const float rstd = reciprocal_root(__fadd_rn(variance, p.epsilon));
                if (row < p.rows) {
                    if (part == 0) p.rstd[row] = rstd;
                    if (!AFFINE) estimate = max(estimate, largest_by_rstd(products[block_row - first], rstd));
                    if (AFFINE && !is_close(guesses[block_row - first], rstd)) estimate = UNDECIDED;
                }
                if (KNOWN) rstds[block_row] = rstd;
                products[block_row - first] = 0;
            });
        } else {
            share_sums(0);
            add_segments(rows, sums, first, end, [&](int block_row, i64 row, float total) {
                float rstd = 0.0f;
                if (row < p.rows) {
                    rstd = finish_row(p, total, products[block_row - first], estimate);
                    if (part == 0) p.rstd[row] = rstd;
                }
                if (KNOWN) rstds[block_row] = rstd;
                products[block_row - first] = 0;
            });
        }
        if (end == count) break;
        first = end, end = min(end + p.chunk_rows, count);
        begin_chunk();
        __syncthreads();
    }
    if (GUESSED) estimate = ptx::warp_max(estimate);
    estimate = ptx::warp_max(is_reliable(estimate, largest_weight, largest_bias) ? estimate : UNDECIDED);
    if (lane == 0) atomicMax(&meetings.estimate.of_block, estimate);

    const int across = (width + TILE_COLUMNS - 1) / TILE_COLUMNS;            // the number of tile columns
    const int near_across = min(across, p.resident_columns / TILE_COLUMNS);  // tile columns with x in shared memory
    const int far_count =
        count / TILE_ROWS * (across - near_across);  // far tiles of the block (x not in shared memory)
    // Near tiles (x in shared memory) go to the warps in the order in which these finish their far tiles.
    const int near_index = (warp + WARPS - far_count % WARPS) % WARPS;
    Tiles<false> far_tiles(rows, near_across, across - near_across, warp);
    Tiles<true> near_tiles(rows, 0, near_across, near_index);
    publish_maximum(words, 0, meetings.estimate, meetings.epoch);
    far_tiles.start_first_loads();
    if (!LOADS_NEAR_LATE) near_tiles.start_first_loads();
    Awaited awaited[1];
    if (!await_maximum(words, 0, meetings.estimate, meetings.epoch, use, p.scratch, given_up, awaited)) return;
    const bool is_exact = LAYER && !AFFINE;
    const u32 maximum = meetings.estimate.of_grid;
    u32 scale_bits = is_exact ? scale_from_exact(maximum) : scale_from_estimate(maximum);
    if (scale_bits == UNDECIDED) {
        bool by_rows = true;
        if constexpr (GUESSED) {
            const u32 largest = largest_of_rows(rows, segments);
            by_rows = __syncthreads_or(largest == UNDECIDED);
            if (!by_rows && lane == 0) atomicMax(&meetings.exact.of_block, largest);
        }
        // Each warp takes whole rows and not parts of them: a row's maximum is NaN only if all y of the row are NaN, so
        // parts of a row would not give it.
        for (int block_row = part + warp * PARTS; by_rows && block_row < count; block_row += WARPS * PARTS) {
            const i64 row = rows.global_row(block_row);
            if (row >= p.rows) break;
            const u32 largest = exact_row_maximum(p, row, rows.mean_of(block_row), rows.rstd_of(block_row));
            if (lane == 0) atomicMax(&meetings.exact.of_block, largest);
        }
        publish_maximum(words, 1, meetings.exact, meetings.epoch);
        if (!await_maximum(words, 1, meetings.exact, meetings.epoch, use, p.scratch, false, awaited)) return;
        scale_bits = fp8_scale_bits<X>(__uint_as_float(meetings.exact.of_grid));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = u16(scale_bits);
    const float inverse = ptx::reciprocal_approx(bf16{u16(scale_bits)});

    // Phase 2: normalise, quantise and store the tiles.
    far_tiles.quantise_all(inverse);
    if (LOADS_NEAR_LATE) near_tiles.start_first_loads();
    near_tiles.quantise_all(inverse);
    if (gridDim.x > 1) use.finish(meetings.epoch, meetings.users);
    leave_stream(p);
}
