// SPDX-License-Identifier: Apache-2.0
// The forward pass of FP8 RMSNorm or LayerNorm of a tensor that the registers of one grid hold: x is read once, and no
// x is kept in shared memory. fp8_rmsnorm_forward_few.cu is for fewer rows, fp8_norm_forward_rows.cu for more.
// forward.cuh has their common parts, and the numerics.
//
// Layout: x [rows, columns] FP8 with a row stride, s_x [rows, ceil(columns / QB)] bf16 with a row stride, w, b [columns].
// Grid: cooperative. PARTS * SPLIT blocks, side by side in the order of their indices, have a strip of BLOCK_ROWS rows.
// A block holds its rows of one segment of 512 columns, or, with SPLIT, of every SPLITth pair of packs of a segment. A
// lane holds TR rows of one pack of 16 columns. Eight lanes lie over one another and four side by side, in two pairs
// whose packs are neighbours, so that sectors of 32 bytes of qy and of qy_t are written at once.
//   Phase 1   For each row and pack: the sum of squares, and the largest |x * s * w|. The block adds its part of the
//             tree.
//   Rows      The blocks of a strip exchange these sums, with the largest products. Each block completes the tree, so
//             it has the rstd of its rows and the strip's estimate of the largest |y|.
//   Meeting   The first block of each strip publishes the strip's estimate. All blocks read all estimates, and compute
//             the one scale. If the estimates do not decide it, the blocks of a strip divide its rows, evaluate them
//             exactly, and all blocks exchange the results.
//   Phase 2   The same registers are quantised and stored, in rows and transposed.
// LayerNorm exchanges partial results of rows twice: first the sums of x * s, which give the mean; then the sums of the
// squares of x * s - mean. Without w and b the second exchange includes the largest |x * s - mean|, which times rstd is
// the row's largest |y|. With w and b each block computes its y when it knows rstd, and publishes the largest |y| at
// the meeting.
//
// The tree of a segment first adds packs whose numbers differ in the highest bit. The highest of the five bits of a
// pack's number are the number of the warp; then come one bit of the lane, the bits of the block within SPLIT, and the
// lowest bit, of the lane. So a block adds over its warps and over one bit of its lanes, and publishes one sum, or with
// SPLIT one for each lowest bit.
//
// Memory ordering. Blocks exchange values by words of grid_words.cuh: each has the launch's epoch in its 8 bytes, and
// each round has its own words. A block stores no word before its threads have read the epoch. The word of a strip is
// stored by a block that has read words of every block of the strip; with w and b every block stores one of LayerNorm's
// words. So when block 0 has read all words of a meeting, every block has read the epoch, and block 0 may advance it.
// Failure: scratch.cuh. After a time-out qy, qy_t, the scale, mean and rstd are undefined.
//
// Global bytes per element, with one scale per QB columns: 1 + 2 / QB are read (the counters show 1 + 2 / 16, since each
// lane loads the scale of its 16 columns) and 2 are written. Each row's rstd, and its mean, adds 4. Each row of lanes
// reads the weights.
//
// PDL. RMSNorm's w is read before the wait, all else after it. The trigger is right after the loads (early_trigger) or
// after the last store.
#include "coat/forward.cuh"
#include "coat/forward_layernorm.cuh"
#include "sync/grid_words.cuh"

constexpr int SPLIT = DRVFUSE_SPLIT;              // blocks that share a segment
constexpr int PAIRS = SPLIT > 1 ? 2 * SPLIT : 1;  // sums of a row that they publish for one segment
constexpr int SLOTS = DRVFUSE_SLOTS;              // segments of a row whose parts a thread reads
constexpr bool PAIRED = !(LAYER && AFFINE);       // whether a largest magnitude comes with a sum
constexpr int WORDS = PAIRED ? 2 : 1;             // words of a sum
constexpr int COLUMN_LANES = 32 / ROW_LANES;
constexpr int STRIP_WORDS = 16;  // distance between the words of two strips, which lie in separate lines
constexpr int BLOCK_WORDS = MAX_WORD_ROWS / MAX_WORD_BLOCKS;  // distance between the words of two blocks
static_assert(ROW_LANES == 8 && COLUMN_LANES == 4 && TC == PACK && BATCH == TR,
              "two bits of a pack's number are a lane's");
static_assert(WARPS * SPLIT == 8 && BLOCK_ROWS == TILE_ROWS, "a segment's packs are its blocks' lanes");
constexpr int TURNS = THREADS / BLOCK_ROWS;  // threads per row
constexpr int WARP_ROWS = 32 / TURNS;        // rows per warp
static_assert(TURNS >= 1 && TURNS <= 32, "threads for each row");

// The sum of a row, or of a part of it. If PAIRED also its largest |x * s * w| (RMSNorm) or |x * s - mean| (LayerNorm).
using Pair = uint2;

struct TilesShared {
    Pair packs[WARPS][TR][32];  // [warp][r][l]: row r of lane l of each warp
    float rstd[BLOCK_ROWS];
    float mean[LAYER ? BLOCK_ROWS : 1];
    u32 estimate, all, exact;
};

__device__ __forceinline__ Pair both(const Pair& a, const Pair& b) {
    return {__float_as_uint(__fadd_rn(__uint_as_float(a.x), __uint_as_float(b.x))), PAIRED ? max(a.y, b.y) : 0};
}

__device__ __forceinline__ Pair with_lane(const Pair& own, int mask) {
    const u32 most = PAIRED ? __shfl_xor_sync(0xffffffffu, own.y, mask) : 0;
    return both(own, {__shfl_xor_sync(0xffffffffu, own.x, mask), most});
}

// The sum of N parts in the order of a butterfly: parts that differ in the highest bit of their numbers are added
// first.
template <int N>
__device__ __forceinline__ Pair butterfly(Pair (&part)[N]) {
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) part[i] = both(part[i], part[i + half]);
    }
    return part[0];
}

// This block's place in the grid and this thread's in the block.
struct Seat {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int column_lane = lane % COLUMN_LANES, row_lane = lane / COLUMN_LANES;
    int segments, blocks, strip, part, segment, split;
    // Thread `turn` of row `local` has every TURNSth segment of it.
    int local = warp * WARP_ROWS + lane % WARP_ROWS, turn = lane / WARP_ROWS;

    __device__ __forceinline__ explicit Seat(int columns) {
        segments = (columns + SEGMENT - 1) / SEGMENT, blocks = segments * SPLIT;  // number of blocks of a strip
        strip = int(blockIdx.x) / blocks, part = int(blockIdx.x) % blocks;
        segment = part / SPLIT, split = part % SPLIT;
    }
};

// The values of this thread's rows, from an array with a value for each of the block's rows.
__device__ __forceinline__ void load_row_lane(float (&own)[TR], const float* of_rows, const Seat& seat) {
#pragma unroll
    for (int q = 0; q < TR / 4; ++q) {
        const float4 four = *reinterpret_cast<const float4*>(of_rows + seat.row_lane * TR + 4 * q);
        own[4 * q] = four.x, own[4 * q + 1] = four.y, own[4 * q + 2] = four.z, own[4 * q + 3] = four.w;
    }
}

// Waits for the parts of this thread's row in its segments, with the loads of all parts in flight in every poll. Sets
// `given_up` on a time-out.
__device__ __forceinline__ void await_row(Pair (&parts)[SLOTS][PAIRS], const u64* words, const Seat& seat, u32 epoch,
                                          Patience& patience, bool& given_up) {
    for (;;) {
        u64 sum[SLOTS][PAIRS], most[SLOTS][PAIRS];
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
            const int segment = min(slot * TURNS + seat.turn, seat.segments - 1);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const u64* from = words + WORDS * ((segment * PAIRS + i) * BLOCK_ROWS + seat.local);
                if constexpr (PAIRED) {
                    ptx::load_relaxed_gpu_v2(sum[slot][i], most[slot][i], from);
                } else {
                    sum[slot][i] = most[slot][i] = ptx::load_relaxed_gpu(from);
                }
            }
        }
        bool late = false;
        u32 block = 0, left = 0;
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                parts[slot][i] = {u32(sum[slot][i]), u32(most[slot][i])};
                const u32 first = u32(sum[slot][i] >> 32), second = u32(most[slot][i] >> 32);
                if (FAULT("fp8-pair-of-any-launch") ? first == 0 || second == 0 : first != epoch || second != epoch) {
                    late = true, left = first != epoch ? first : second;
                    block = min(slot * TURNS + seat.turn, seat.segments - 1) * SPLIT + i / 2;
                }
            }
        }
        if (!late) return;
        if (!patience.goes_on(seat.strip * seat.blocks + block, epoch, left)) {
            given_up = true;
            return;
        }
    }
}

// One exchange of rows: returns the total, and the largest magnitude, of this thread's row from the parts of all packs,
// of which `shared.packs` has this block's. A block barrier must precede it. Fails as `await_row` does.
__device__ __forceinline__ Pair row_total(const TilesShared& shared, u64* words, const Seat& seat, u32 epoch,
                                          Patience& patience, bool& given_up) {
    // Warp r has row r of every row lane, over all warps' packs.
    for (int r = seat.warp; r < TR; r += WARPS) {
        Pair own[WARPS];
#pragma unroll
        for (int i = 0; i < WARPS; ++i) own[i] = shared.packs[i][r][seat.lane];
        Pair sum = with_lane(butterfly(own), 2);
        if constexpr (SPLIT == 1) sum = with_lane(sum, 1);
        const int told = seat.row_lane * TR + r;
        const bool tells = SPLIT == 1 ? seat.column_lane == 0 : seat.column_lane < 2;
        const int part = (seat.segment * SPLIT + seat.split) * (SPLIT > 1 ? 2 : 1) + seat.column_lane;
        if (tells && !(FAULT("block-1-absent") && blockIdx.x == 1)) {
            u64* to = words + WORDS * (part * BLOCK_ROWS + told);
            if constexpr (PAIRED) {
                ptx::store_relaxed_gpu_v2(to, u64(epoch) << 32 | sum.x, u64(epoch) << 32 | sum.y);
            } else {
                leave_word(to, epoch, sum.x);
            }
        }
    }
    Pair parts[SLOTS][PAIRS];
    if (!given_up) await_row(parts, words, seat, epoch, patience, given_up);
    __syncwarp();
    float total = 0.0f;
    u32 product = 0;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        const Pair sum = butterfly(parts[slot]);
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const u32 own = __shfl_sync(0xffffffffu, sum.x, i * WARP_ROWS + seat.lane % WARP_ROWS);
            const u32 most = PAIRED ? __shfl_sync(0xffffffffu, sum.y, i * WARP_ROWS + seat.lane % WARP_ROWS) : 0;
            if (slot * TURNS + i < seat.segments) {
                total = __fadd_rn(total, __uint_as_float(own));
                product = max(product, most);
            }
        }
    }
    return {__float_as_uint(total), product};
}

// Waits for `count` words that are `stride` words apart, and gives their maximum to the whole warp. Returns false on a
// time-out.
__device__ __forceinline__ bool hear_all(u32& most, const u64* words, int count, int stride, int blocks, u32 epoch,
                                         const Scratch& scratch) {
    Patience patience(scratch, true);
    bool given_up = false;
    most = 0;
    for (int first = 0; first < count; first += 64) {
        Awaited some[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int number = first + 32 * i + int(threadIdx.x) % 32;
            some[i] = {number < count ? words + number * stride : nullptr, u32(number * blocks), 0};
        }
        if (!given_up) await_words(some, epoch, patience, given_up);
        most = max(most, max(some[0].value, some[1].value));
    }
    __syncwarp();
    most = ptx::warp_max(most);
    return !given_up;
}

extern "C" __global__ void __launch_bounds__(THREADS, DRVFUSE_RESIDENT) fp8_norm_forward_tiles(const ForwardParams p) {
    __shared__ TilesShared shared;
    const Seat seat(p.columns);
    const int lane = seat.lane, warp = seat.warp, blocks = seat.blocks, strips = int(gridDim.x) / blocks;
    const int pack = ((warp * 2 + seat.column_lane / 2) * SPLIT + seat.split) * 2 + seat.column_lane % 2;
    const int at = seat.segment * SEGMENT + pack * PACK, valid = p.columns - at;
    const i64 strip_row = i64(seat.strip) * BLOCK_ROWS, row = strip_row + seat.row_lane * TR;
    const int left = valid > 0 ? int(min(p.rows - row, i64(TR))) : 0;
    GridWords* words = reinterpret_cast<GridWords*>(p.scratch.state);
    const u32 round_words = WORDS * seat.segments * PAIRS * BLOCK_ROWS;
    u64* const sums = words->sums + u64(seat.strip) * (LAYER ? 2 : 1) * round_words;

    // Phase 1.
    Pack<Weight, PACK> raw, raw_bias;
    if (!LAYER) load_weight_pack(raw, p.weight, p.columns, at);
    wait_for_producer();
    Batch batch;
    load_batch(batch, p, row, at);
    if (LAYER && AFFINE) load_weight_pack(raw, p.weight, p.columns, at);
    if (LAYER && AFFINE) load_weight_pack(raw_bias, p.bias, p.columns, at);
    ScratchUse use(p.scratch);
    if (p.early_trigger) launch_dependents();
    if (threadIdx.x == 0) shared.estimate = shared.all = shared.exact = 0;
    float w[PACK], b[PACK], largest = 0.0f;
    if (LAYER && AFFINE) to_float(w, raw), to_float(b, raw_bias);
    if (!LAYER) take_phase1_weights(w, largest, raw);
    if constexpr (LAYER) {
#pragma unroll
        for (int r = 0; r < TR; ++r) shared.packs[warp][r][lane] = {__float_as_uint(pack_sum(batch, r)), 0};
    } else {
        float squares[BATCH];
        u32 most[BATCH];
        reduce_packs(batch, w, squares, most);
#pragma unroll
        for (int r = 0; r < TR; ++r) {
            const u32 product = largest <= WEIGHT_LIMIT ? most[r] : UNDECIDED;
            shared.packs[warp][r][lane] = {__float_as_uint(squares[r]), product};
        }
    }
    const u32 epoch = use.epoch();
    bool given_up = use.aborted();
    __syncthreads();

    // Rows.
    Patience patience(p.scratch);
    Pair total = row_total(shared, sums, seat, epoch, patience, given_up);
    const bool exists = strip_row + seat.local < p.rows, writes = exists && seat.turn == 0 && seat.part == 0;
    u32 best = 0;
    if constexpr (LAYER) {
        const float mean = ptx::divide_full(__uint_as_float(total.x), float(p.columns));
        if (seat.turn == 0) shared.mean[seat.local] = mean;
        if (writes) p.mean[strip_row + seat.local] = mean;
        if (!use.met(given_up)) return;
#pragma unroll
        for (int r = 0; r < TR; ++r) {
            const float mean = shared.mean[seat.row_lane * TR + r];
            u32 away = 0;
            const float squares = pack_variance(batch, r, mean, valid, PAIRED ? &away : nullptr);
            shared.packs[warp][r][lane] = {__float_as_uint(squares), away};
        }
        __syncthreads();
        total = row_total(shared, sums + round_words, seat, epoch, patience, given_up);
    }
    float rstd = 0.0f;
    if (exists && LAYER) {
        const float variance = ptx::divide_full(__uint_as_float(total.x), float(p.columns));
        rstd = reciprocal_root(__fadd_rn(variance, p.epsilon));
        if (PAIRED) best = largest_by_rstd(total.y, rstd);
    } else if (exists) {
        rstd = finish_row(p, __uint_as_float(total.x), total.y, best);
    }
    if (writes) p.rstd[strip_row + seat.local] = rstd;
    if (seat.turn == 0) shared.rstd[seat.local] = rstd;
    if constexpr (!PAIRED) {
        if (!use.met(given_up)) return;
        float mean[TR], rstd[TR];
        load_row_lane(mean, shared.mean, seat), load_row_lane(rstd, shared.rstd, seat);
        u32 most[TR];
        largest_of_batch(most, batch, mean, rstd, raw, raw_bias, valid);
#pragma unroll
        for (int r = 0; r < TR; ++r) {
            if (r < left) best = max(best, most[r]);
        }
    }
    best = ptx::warp_max(best);
    if (lane == 0) atomicMax(&shared.estimate, best);
    if (!use.met(given_up)) return;

    // Meeting.
    const auto meet = [&](u32& largest, u64* of_blocks, int stride) {  // the first warp reads the words of all blocks
        if (lane == 0) leave_word(of_blocks + blockIdx.x * stride, epoch, largest);
        return !hear_all(largest, of_blocks, int(gridDim.x), stride, 1, epoch, p.scratch);
    };
    if (warp == 0) {
        u32 most = shared.estimate;
        if (!PAIRED) {
            given_up = meet(most, words->rows, BLOCK_WORDS);
        } else if (strips > 1) {
            u64* of_strips = words->rows;
            if (seat.part == 0 && lane == 0) leave_word(of_strips + seat.strip * STRIP_WORDS, epoch, most);
            given_up = !hear_all(most, of_strips, strips, STRIP_WORDS, blocks, epoch, p.scratch);
        }
        if (lane == 0) shared.all = most;
    }
    if (!use.met(given_up)) return;
    u32 scale_bits = LAYER ? settled_scale(shared.all) : decided_scale(shared.all);
    if (scale_bits == UNDECIDED) {
        // A warp takes a whole row, since the test whether all y are NaN is for whole rows.
        for (int local = seat.part * WARPS + warp; local < BLOCK_ROWS; local += blocks * WARPS) {
            if (strip_row + local >= p.rows) break;
            const float mean = LAYER ? shared.mean[local] : 0.0f;
            const u32 most = exact_row_maximum(p, strip_row + local, mean, shared.rstd[local]);
            if (lane == 0) atomicMax(&shared.exact, most);
        }
        __syncthreads();
        if (warp == 0) {
            u32 most = shared.exact;
            given_up = meet(most, words->maxima[1], 1);
            if (lane == 0) shared.exact = most;
        }
        if (!use.met(given_up)) return;
        scale_bits = fp8_scale_bits<X>(__uint_as_float(shared.exact));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = u16(scale_bits);
    const float inverse = ptx::reciprocal_approx(bf16{u16(scale_bits)});

    // Phase 2.
    Turned<TR, PACK> turned;
    u8* to = p.qy + row * p.columns + at;
#pragma unroll
    for (int q = 0; q < TR / 4; ++q) {
        float rstd[4], mean[4] = {};
        *reinterpret_cast<float4*>(rstd) = *reinterpret_cast<const float4*>(shared.rstd + seat.row_lane * TR + 4 * q);
        if constexpr (LAYER) {
            const float* of_quad = shared.mean + seat.row_lane * TR + 4 * q;
            *reinterpret_cast<float4*>(mean) = *reinterpret_cast<const float4*>(of_quad);
        }
        u32 out[4][PACK / 4];
#pragma unroll
        for (int r = 0; r < 4; ++r, to += p.columns) {
            float v[PACK];
#pragma unroll
            for (int j = 0; j < 4; ++j) Word<X>::unpack(batch.word[4 * q + r][j], v + 4 * j);
            const float scale = bf16{batch.scale[4 * q + r]};
#pragma unroll
            for (int i = 0; i < PACK; ++i) v[i] = quotient(v[i], scale, mean[r], rstd[r], w[i], b[i]);
            quantise<X, PACK>(out[r], v, inverse);
            if (4 * q + r < left) store_bytes<PACK, (TR > 4)>(to, out[r], valid, ALIGNED);
        }
        turned.take(q, out);
    }
    if (left > 0) store_turned<RUN, ALIGNED, WHOLE, (TR > 4)>(p.qy_t, turned, row, p.rows, p.batch_rows, p.columns, at);
    use.finish();
    leave_stream(p);
}
