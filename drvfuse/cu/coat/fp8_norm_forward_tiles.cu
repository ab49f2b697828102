// SPDX-License-Identifier: Apache-2.0
// The forward pass of FP8 RMSNorm or LayerNorm of a tensor that the registers of one grid hold (plan `HeldTiles`). It
// reads x once. fp8_rmsnorm_forward_few.cu is for fewer rows, fp8_norm_forward_rows.cu for more.
//
// Computes rstd, the scale, qy and qy_t, with LAYER also mean, from x, its group scales, w and b. forward.cuh has the
// formulas, shapes, dtypes and numerics, and `ForwardParams` the layout.
//
// Division. The launch is cooperative. A strip is BLOCK_ROWS rows of the tensor. Each segment of 512 columns of a strip
// belongs to SPLIT blocks, and the blocks of a strip have consecutive indices. With SPLIT 1 a block has a whole
// segment, else every SPLITth pair of neighbouring packs of it. A lane has TR rows of one pack of 16 columns. The lanes
// of a warp form 8 rows of 4 lanes. The 4 lanes of such a row have different packs of the same rows of the tensor, in
// two pairs of neighbouring packs. The 8 lanes of a column have the same pack of different rows. So whole sectors of 32
// bytes of qy and of qy_t are written at once.
//   Phase 1         Each lane computes, for each of its rows, the sum of squares and the largest |x * s * w| of its
//                   pack. Each block adds the packs that it has.
//   Row exchange    The blocks of a strip exchange these sums and maxima. Each block completes the sums, so it has the
//                   rstd of the strip's rows and the strip's estimate of the largest |y|.
//   Grid exchange   The first block of each strip publishes the strip's estimate. All blocks read the estimates of all
//                   strips, and compute the scale. If the estimates do not decide it, the blocks of a strip divide its
//                   rows, compute their exact largest |y|, and all blocks exchange these.
//   Phase 2         Each lane quantises its packs, which are still in registers, and stores them in qy and qy_t.
// LayerNorm has two row exchanges: the first of sums of x * s, which give the mean, the second of sums of the squares
// of x * s - mean. Without w and b the second one includes the largest |x * s - mean|, and this times rstd is the row's
// largest |y|. With w and b, each block computes its y after the second row exchange, and every block publishes its
// largest |y| in the grid exchange.
//
// Order of sums: that of forward.cuh. The butterfly over the 32 packs of a segment first adds packs whose numbers
// differ in the highest of their five bits. These five bits are, from the highest to the lowest: the bits of the warp,
// one bit of the lane, the bits of the block within SPLIT, and another bit of the lane. So a block adds over its warps
// and over one bit of its lanes. With SPLIT 1 it also adds over the lowest bit and publishes one sum, otherwise it
// publishes one sum for each value of the lowest bit.
//
// Storage. Registers: x, scales and weights, from the first load to the end. Shared memory: the sums of the block's
// packs, and rstd and mean of its rows.
//
// Memory ordering. Blocks exchange values by words of grid_words.cuh: each contains the launch's epoch and carries its
// own readiness, and each exchange has separate words. A block stores no word before its threads have read the epoch.
// The word of a strip in the grid exchange is stored by a block that has read words of every block of the strip; with w
// and b every block stores a word in the grid exchange. So when block 0 has read all words of a grid exchange, every
// block has read the epoch, and block 0 may advance it.
// Failure: see scratch.cuh. After a time-out qy, qy_t, the scale, mean and rstd are undefined.
//
// Traffic. Global bytes per element, with one scale per QB columns: 1 + 2 / QB are read (profilers show 1 + 2 / 16,
// since each lane loads the scale of its 16 columns) and 2 are written. Each row adds 4 bytes for rstd and, with LAYER,
// 4 for mean. The weights of a pack are read once by each of the lanes that have the pack.
//
// PDL. Before the wait for the producer, a block reads only RMSNorm's w. It triggers right after its loads
// (early_trigger) or after its last store.
#include "coat/forward_layernorm.cuh"
#include "coat/forward_strips.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, DRVFUSE_RESIDENT) fp8_norm_forward_tiles(const ForwardParams p) {
    __shared__ TilesShared shared;
    const Place place(p.columns);
    const int lane = place.lane, warp = place.warp, blocks = place.blocks, strips = int(gridDim.x) / blocks;
    const int pack = ((warp * 2 + place.column_lane / 2) * SPLIT + place.split) * 2 + place.column_lane % 2;
    const int column = place.segment * SEGMENT + pack * PACK, columns_left = p.columns - column;
    const i64 strip_row = i64(place.strip) * BLOCK_ROWS, row = strip_row + place.row_lane * TR;
    const int rows_left = columns_left > 0 ? int(min(p.rows - row, i64(TR))) : 0;
    GridWords* words = reinterpret_cast<GridWords*>(p.scratch.state);
    // The number of words that the blocks of a strip publish in one row exchange.
    const u32 exchange_words = WORDS * place.segments * PAIRS * BLOCK_ROWS;
    u64* const sums = words->sums + u64(place.strip) * (LAYER ? 2 : 1) * exchange_words;

    // Phase 1: load x, and compute sums and maxima of its packs.
    Pack<Weight, PACK> raw, raw_bias;
    if (!LAYER) load_weight_pack(raw, p.weight, p.columns, column);
    wait_for_producer();
    Batch batch;
    load_batch(batch, p, row, column);
    if (LAYER && AFFINE) load_weight_pack(raw, p.weight, p.columns, column);
    if (LAYER && AFFINE) load_weight_pack(raw_bias, p.bias, p.columns, column);
    ScratchUse use(p.scratch);
    if (p.early_trigger) launch_dependents();
    if (threadIdx.x == 0) shared.estimate = shared.all = shared.exact = 0;
    float w[PACK], b[PACK], largest_weight = 0.0f;
    if (LAYER && AFFINE) to_float(w, raw), to_float(b, raw_bias);
    if (!LAYER) widen_weights(w, largest_weight, raw);
    if constexpr (LAYER) {
#pragma unroll
        for (int r = 0; r < TR; ++r) shared.packs[warp][r][lane] = {__float_as_uint(pack_sum(batch, r)), 0};
    } else {
        float squares[BATCH];
        u32 largest[BATCH];
        reduce_packs(batch, w, squares, largest);
#pragma unroll
        for (int r = 0; r < TR; ++r) {
            const u32 product = largest_weight <= WEIGHT_LIMIT ? largest[r] : UNDECIDED;
            shared.packs[warp][r][lane] = {__float_as_uint(squares[r]), product};
        }
    }
    const u32 epoch = use.epoch();
    bool given_up = use.aborted();
    __syncthreads();

    // Row exchange: the blocks of a strip exchange their sums of each row.
    Patience patience(p.scratch);
    Pair total = row_total(shared, sums, place, epoch, patience, given_up);
    const bool exists = strip_row + place.row < p.rows, writes = exists && place.reader == 0 && place.part == 0;
    u32 maximum = 0;  // for this thread's row or packs: the bits of the largest |y|, or of its estimate
    if constexpr (LAYER) {
        const float mean = ptx::divide_full(__uint_as_float(total.x), float(p.columns));
        if (place.reader == 0) shared.mean[place.row] = mean;
        if (writes) p.mean[strip_row + place.row] = mean;
        if (!use.met(given_up)) return;
#pragma unroll
        for (int r = 0; r < TR; ++r) {
            const float mean = shared.mean[place.row_lane * TR + r];
            u32 deviation = 0;
            const float squares = pack_variance(batch, r, mean, columns_left, PAIRED ? &deviation : nullptr);
            shared.packs[warp][r][lane] = {__float_as_uint(squares), deviation};
        }
        __syncthreads();
        total = row_total(shared, sums + exchange_words, place, epoch, patience, given_up);
    }
    float rstd = 0.0f;
    if (exists && LAYER) {
        const float variance = ptx::divide_full(__uint_as_float(total.x), float(p.columns));
        rstd = reciprocal_root(__fadd_rn(variance, p.epsilon));
        if (PAIRED) maximum = largest_by_rstd(total.y, rstd);
    } else if (exists) {
        rstd = finish_row(p, __uint_as_float(total.x), total.y, maximum);
    }
    if (writes) p.rstd[strip_row + place.row] = rstd;
    if (place.reader == 0) shared.rstd[place.row] = rstd;
    if constexpr (!PAIRED) {
        if (!use.met(given_up)) return;
        float mean[TR], rstd[TR];
        load_lane_rows(mean, shared.mean, place), load_lane_rows(rstd, shared.rstd, place);
        u32 largest[TR];
        largest_of_batch(largest, batch, mean, rstd, raw, raw_bias, columns_left);
#pragma unroll
        for (int r = 0; r < TR; ++r) {
            if (r < rows_left) maximum = max(maximum, largest[r]);
        }
    }
    maximum = ptx::warp_max(maximum);
    if (lane == 0) atomicMax(&shared.estimate, maximum);
    if (!use.met(given_up)) return;

    // Called by the first warp of each block: publishes the block's maximum, and replaces it by that of all blocks of
    // the grid. Returns whether a wait has given up.
    const auto exchange_of_blocks = [&](u32& largest, u64* block_words, int stride) {
        if (lane == 0) leave_word(block_words + blockIdx.x * stride, epoch, largest);
        return !await_maxima(largest, block_words, int(gridDim.x), stride, 1, epoch, p.scratch);
    };
    if (warp == 0) {
        u32 largest = shared.estimate;
        if (!PAIRED) {
            given_up = exchange_of_blocks(largest, words->rows, BLOCK_WORDS);
        } else if (strips > 1) {
            u64* strip_words = words->rows;
            if (place.part == 0 && lane == 0) leave_word(strip_words + place.strip * STRIP_WORDS, epoch, largest);
            given_up = !await_maxima(largest, strip_words, strips, STRIP_WORDS, blocks, epoch, p.scratch);
        }
        if (lane == 0) shared.all = largest;
    }
    if (!use.met(given_up)) return;
    u32 scale_bits = LAYER ? scale_from_exact(shared.all) : scale_from_estimate(shared.all);
    if (scale_bits == UNDECIDED) {
        // Each warp takes whole rows and not parts of them: a row's maximum is NaN only if all y of the row are NaN, so
        // parts of a row would not give it.
        for (int r = place.part * WARPS + warp; r < BLOCK_ROWS; r += blocks * WARPS) {
            if (strip_row + r >= p.rows) break;
            const float mean = LAYER ? shared.mean[r] : 0.0f;
            const u32 largest = exact_row_maximum(p, strip_row + r, mean, shared.rstd[r]);
            if (lane == 0) atomicMax(&shared.exact, largest);
        }
        __syncthreads();
        if (warp == 0) {
            u32 largest = shared.exact;
            given_up = exchange_of_blocks(largest, words->maxima[1], 1);
            if (lane == 0) shared.exact = largest;
        }
        if (!use.met(given_up)) return;
        scale_bits = fp8_scale_bits<X>(__uint_as_float(shared.exact));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = u16(scale_bits);
    const float inverse = ptx::reciprocal_approx(bf16{u16(scale_bits)});

    // Phase 2: normalise, quantise and store the packs.
    Turned<TR, PACK> turned;
    u8* qy = p.qy + row * p.columns + column;
#pragma unroll
    for (int q = 0; q < TR / 4; ++q) {
        float rstd[4], mean[4] = {};
        *reinterpret_cast<float4*>(rstd) = *reinterpret_cast<const float4*>(shared.rstd + place.row_lane * TR + 4 * q);
        if constexpr (LAYER) {
            const float* quad_mean = shared.mean + place.row_lane * TR + 4 * q;
            *reinterpret_cast<float4*>(mean) = *reinterpret_cast<const float4*>(quad_mean);
        }
        u32 out[4][PACK / 4];
#pragma unroll
        for (int r = 0; r < 4; ++r, qy += p.columns) {
            float v[PACK];
#pragma unroll
            for (int j = 0; j < 4; ++j) Word<X>::unpack(batch.word[4 * q + r][j], v + 4 * j);
            const float scale = bf16{batch.scale[4 * q + r]};
#pragma unroll
            for (int i = 0; i < PACK; ++i) v[i] = dividend(v[i], scale, mean[r], rstd[r], w[i], b[i]);
            quantise<X, PACK>(out[r], v, inverse);
            if (4 * q + r < rows_left) store_bytes<PACK, (TR > 4)>(qy, out[r], columns_left, ALIGNED);
        }
        turned.take(q, out);
    }
    if (rows_left > 0) {
        store_turned<RUN, ALIGNED, WHOLE, (TR > 4)>(p.qy_t, turned, row, p.rows, p.batch_rows, p.columns, column);
    }
    use.finish();
    leave_stream(p);
}
