// SPDX-License-Identifier: Apache-2.0
// FP8 RMSNorm forward in one launch: x and its group scales are read, qy, its transpose, one scale and rstd written.
//
// Layout: x [rows, columns] FP8 with a row stride, s_x [rows, ceil(columns / QB)] bf16 with a row stride, w [columns].
// Grid: cooperative, one block a multiprocessor at most. Groups of BLOCK_ROWS rows go round the blocks.
//   Phase 1  a warp takes BATCH rows of one segment of 512 columns: sum of squares, and largest |x * s * w|. Their
//            combination over the segments gives the rows' rstd and the block's estimate of the largest |y|.
//   Meeting  the grid's maximum, from which every block computes the one scale.
//   Phase 2  a warp takes a tile of ROW_LANES * TR rows by 32 / ROW_LANES * TC columns (fp8_tile.cuh). With OWN a block
//            meets its own rows again, of which it has kept x (`resident_rows`), scales and rstd (`known_rows`) in
//            shared memory as far as they fit; else tiles go round the grid and each row's rstd comes from its block.
// Global bytes an element with groups of QB: read 1 + 2 / QB (accesses count 1 + 2 / 16, as a lane asks for the scale of
// its 16), and again what OWN has not kept (all of it without OWN); written 2. A row's rstd is 4 more. Weights: once a
// warp and segment in phase 1, once a tile and row of lanes in phase 2.
//
// The sum of squares of a row is a tree on the columns alone: squares of 16 elements in order (they are exact), times
// the scale twice; butterfly over a segment's 32; the segments in order. Numerics otherwise as COAT's: y =
// (x * s * rstd) * w in fp32, its maximum of unrounded values, y rounded to bf16 before the quotient, which is a product
// with the approximate reciprocal, as div.full computes it.
//
// The maximum. x * s is exact, so rstd * max|x * s * w|, each step rounded, is within 5 * 2^-24 of the row's largest |y|,
// relatively. The scale is a monotone function of the maximum, rounded to bf16: if both ends of that range, widened to
// 2^-21, have one scale, it is the scale. Else (one tensor in some thousands), or if a weight, an rstd or the estimate is
// so large, small or strange that a step may be inexact by more, all blocks evaluate every y of their rows and meet
// again. Bounds: with rstd >= 2^-20 no |x * s| exceeds 2^20 * sqrt(columns) and no scale of an x that is not 0 exceeds
// 2^36 * sqrt(columns); with |w| and rstd <= 2^20 what underflows is then far below 2^-24 of a maximum of 2^-40.
// NaN: a row whose y are all NaN (so one with a NaN rstd) makes the maximum a NaN; other NaN are dropped.
//
// Memory order: words of grid_words.cuh carry all that blocks tell one another. Failure: scratch.cuh; then qy, qy_t and
// the scale are not written.
#include "fp8_tile.cuh"
#include "grid_words.cuh"
#include "pdl.cuh"

using X = DRVFUSE_DTYPE;
using Weight = DRVFUSE_WEIGHT_DTYPE;
constexpr int QB = DRVFUSE_GROUP;
constexpr int WARPS = DRVFUSE_WARPS;
constexpr int BATCH = DRVFUSE_BATCH;
constexpr int BLOCK_ROWS = DRVFUSE_BLOCK_ROWS;
constexpr int TR = DRVFUSE_TILE_ROWS, TC = DRVFUSE_TILE_COLUMNS, ROW_LANES = DRVFUSE_ROW_LANES;
constexpr int RUN = DRVFUSE_RUN;           // bytes of a column that one store of qy_t can take
constexpr bool ALIGNED = DRVFUSE_ALIGNED;  // whole packs, 16-byte aligned rows
constexpr bool OWN = DRVFUSE_OWN;          // a block quantises the rows that it has reduced

constexpr int THREADS = 32 * WARPS;
constexpr int SEGMENT = 32 * PACK;
constexpr int TILE_ROWS = ROW_LANES * TR, TILE_COLUMNS = 32 / ROW_LANES * TC;
constexpr u32 UNDECIDED = 0xffffffffu;  // above every magnitude, as bits
constexpr u32 NAN_BITS = 0x7fffffffu;
static_assert(BLOCK_ROWS % (OWN ? TILE_ROWS : BATCH) == 0 && (!OWN || BATCH % 4 == 0), "whole tiles and batches");

struct ForwardParams {
    const u8* x;
    const bf16* scales;
    const Weight* weight;
    u8* qy;
    u8* qy_t;
    u16* scale;
    float* rstd;
    Scratch scratch;
    i64 rows, batch_rows, x_stride, scale_stride;
    int columns;
    int groups, longer;  // groups of BLOCK_ROWS that each block has; the first `longer` blocks have one more
    int resident_rows, known_rows, chunk_rows;
    float epsilon;
    int early_trigger;
};

// The rows of a block, counted from 0, and what it keeps of them.
struct Rows {
    const ForwardParams& p;
    float* rstd;   // OWN: [known_rows]; else [WARPS, TILE_ROWS], of each warp's tile
    u8* x;         // [resident_rows, pitch], swizzled
    bf16* scales;  // [groups of QB, known_rows]
    int pitch;

    __device__ __forceinline__ int count() const {
        return (p.groups + (int(blockIdx.x) < p.longer)) * BLOCK_ROWS;
    }
    __device__ __forceinline__ i64 global(int local) const {
        return (i64(u32(local) / BLOCK_ROWS) * gridDim.x + blockIdx.x) * BLOCK_ROWS + u32(local) % BLOCK_ROWS;
    }
    // Lanes TR rows apart read the same columns at once: every other TR rows have the halves of 128 bytes changed over.
    __device__ __forceinline__ u32 offset(int local, int at) const {
        return u32(local) * pitch + (at ^ (u32(local) / TR % 2 * 64));
    }
};

struct Place {
    int across, down;
};

__device__ __forceinline__ u32 warp_max(u32 value) {
    u32 result;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
    return result;
}

// Each of N values added over the lanes as a butterfly adds them; lane l gets the sum of value l / (32 / N).
template <int N>
__device__ __forceinline__ float sum_lanes(float (&v)[N]) {
    int mask = 16;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2, mask /= 2) {
        const bool upper = threadIdx.x & mask;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float give = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
            v[i] = __fadd_rn(keep, __shfl_xor_sync(0xffffffffu, give, mask));
        }
    }
#pragma unroll
    for (; mask > 0; mask /= 2) v[0] = __fadd_rn(v[0], __shfl_xor_sync(0xffffffffu, v[0], mask));
    return v[0];
}

template <int W>
__device__ __forceinline__ void load_weight_pack(Pack<Weight, W>& pack, const ForwardParams& p, int at) {
    if constexpr (ALIGNED) {
#pragma unroll
        for (int i = 0; i < pack.words; ++i) pack.word[i] = 0;
        if (at < p.columns) load_pack(pack, p.weight + at);
    } else {
        load_elements(pack, p.weight + at, p.columns - at);
    }
}

// One pack of each of BATCH rows; what does not exist is 0.
struct Batch {
    u32 word[BATCH][4];
    u16 scale[BATCH];
};

__device__ __forceinline__ void load_batch(Batch& batch, const ForwardParams& p, i64 row, int at) {
    const u8* x = p.x + row * p.x_stride + at;
    const bf16* scale = p.scales + row * p.scale_stride + at / QB;
    if (ALIGNED && row + BATCH <= p.rows && at < p.columns) {
#pragma unroll
        for (int r = 0; r < BATCH; ++r, x += p.x_stride, scale += p.scale_stride) {
            stream_pack(batch.word[r], x);
            batch.scale[r] = scale->bits;
        }
        return;
    }
#pragma unroll
    for (int r = 0; r < BATCH; ++r, x += p.x_stride, scale += p.scale_stride) {
#pragma unroll
        for (int j = 0; j < 4; ++j) batch.word[r][j] = 0;
        batch.scale[r] = 0;
        if (row + r < p.rows && at < p.columns) {
            load_bytes<PACK>(batch.word[r], x, p.columns - at, ALIGNED);
            batch.scale[r] = scale->bits;
        }
    }
}

__device__ __forceinline__ void keep_batch(const Batch& batch, const Rows& rows, int local, int at) {
    if (local < rows.p.resident_rows) {
        u8* x = rows.x + rows.offset(local, at);
#pragma unroll
        for (int r = 0; r < BATCH; ++r) {
            *reinterpret_cast<uint4*>(x + r * rows.pitch) =
                make_uint4(batch.word[r][0], batch.word[r][1], batch.word[r][2], batch.word[r][3]);
        }
    }
    if (local < rows.p.known_rows && at % QB == 0) {
        bf16* scale = rows.scales + at / QB * rows.p.known_rows + local;
#pragma unroll
        for (int r = 0; r < BATCH; r += 4) {
            *reinterpret_cast<uint2*>(scale + r) = make_uint2(batch.scale[r] | u32(batch.scale[r + 1]) << 16,
                                                              batch.scale[r + 2] | u32(batch.scale[r + 3]) << 16);
        }
    }
}

// The scales of four rows at a column; of rows that do not exist 0.
__device__ __forceinline__ void load_scales(u32 (&pair)[2], const ForwardParams& p, i64 row, int at) {
    const bf16* scale = p.scales + row * p.scale_stride + at / QB;
    u16 one[4];
#pragma unroll
    for (int r = 0; r < 4; ++r, scale += p.scale_stride) one[r] = row + r < p.rows ? scale->bits : 0;
    pair[0] = one[0] | u32(one[1]) << 16, pair[1] = one[2] | u32(one[3]) << 16;
}

// TC columns of four rows; what does not exist is 0.
struct Quad {
    u32 word[4][TC / 4];
    u32 scale[2];  // without OWN
};

// `row` is the block's own with OWN, else the tensor's.
__device__ __forceinline__ void load_quad(Quad& quad, const Rows& rows, int row, int at) {
    const ForwardParams& p = rows.p;
    if (OWN && row < p.resident_rows) {
        const u8* x = rows.x + rows.offset(row, at);
#pragma unroll
        for (int r = 0; r < 4; ++r) load_bytes<TC>(quad.word[r], x + r * rows.pitch, TC, true);
        return;
    }
    const i64 from = OWN ? rows.global(row) : i64(row);
    const u8* x = p.x + from * p.x_stride + at;
    if (from + 4 <= p.rows) {
#pragma unroll
        for (int r = 0; r < 4; ++r, x += p.x_stride) load_bytes<TC>(quad.word[r], x, p.columns - at, ALIGNED);
    } else {
#pragma unroll
        for (int r = 0; r < 4; ++r, x += p.x_stride) {
#pragma unroll
            for (int j = 0; j < TC / 4; ++j) quad.word[r][j] = 0;
            if (from + r < p.rows) load_bytes<TC>(quad.word[r], x, p.columns - at, ALIGNED);
        }
    }
    if (!OWN) load_scales(quad.scale, p, from, at);
}

struct Factors {
    u32 scale[2];
    float rstd[4];
};

// Of the four rows of a quad.
__device__ __forceinline__ void load_factors(Factors& factors, const Quad& quad, const Rows& rows, int row, int at) {
    const ForwardParams& p = rows.p;
    if (OWN && row >= p.known_rows) {
        const i64 from = rows.global(row);
        load_scales(factors.scale, p, from, at);
#pragma unroll
        for (int r = 0; r < 4; ++r) factors.rstd[r] = from + r < p.rows ? p.rstd[from + r] : 0.0f;
        return;
    }
    const int known = OWN ? row : int(threadIdx.x / 32) * TILE_ROWS + row % TILE_ROWS;
    const float4 rstd = *reinterpret_cast<const float4*>(rows.rstd + known);
    factors.rstd[0] = rstd.x, factors.rstd[1] = rstd.y, factors.rstd[2] = rstd.z, factors.rstd[3] = rstd.w;
    if (OWN) {
        const uint2 pair = *reinterpret_cast<const uint2*>(rows.scales + at / QB * p.known_rows + row);
        factors.scale[0] = pair.x, factors.scale[1] = pair.y;
    } else {
        factors.scale[0] = quad.scale[0], factors.scale[1] = quad.scale[1];
    }
}

__device__ __forceinline__ float normalised(float x, float scale, float rstd, float weight) {
    return __fmul_rn(__fmul_rn(__fmul_rn(x, scale), rstd), weight);
}

// The scale's bits if every maximum about as large as `estimate` has the same, else UNDECIDED.
__device__ __forceinline__ u32 decided_scale(u32 estimate) {
    const float most = __uint_as_float(estimate);
    if (!(most >= 0x1p-40f && most <= 0x1p100f)) return UNDECIDED;
    const u32 low = fp8_scale_bits<X>(__fmul_rn(most, 1.0f - 0x1p-21f));
    const u32 high = fp8_scale_bits<X>(__fmul_rn(most, 1.0f + 0x1p-21f));
    return low == high ? low : UNDECIDED;
}

// The largest |y| of this block's rows into `found`, as bits, by evaluating them all.
__device__ __forceinline__ void exact_maximum(const Rows& rows, u32* found) {
    const ForwardParams& p = rows.p;
    for (int local = threadIdx.x / 32; local < rows.count(); local += WARPS) {
        const i64 row = rows.global(local);
        if (row >= p.rows) break;
        const float rstd = p.rstd[row];
        float best = 0.0f;
        bool number = false;
        for (int at = threadIdx.x % 32; at < p.columns; at += 32) {
            const float value = X{p.x[row * p.x_stride + at]}, scale = p.scales[row * p.scale_stride + at / QB];
            const float y = fabsf(normalised(value, scale, rstd, p.weight[at]));
            number |= y == y;
            best = fmaxf(best, y);
        }
        number = __any_sync(0xffffffffu, number);
        const u32 most = number ? warp_max(__float_as_uint(best)) : NAN_BITS;
        if (threadIdx.x % 32 == 0) atomicMax(found, most);
    }
}

// A block's largest |y| as bits, and the grid's.
struct Largest {
    u32 own, all;
};

// Tells the other blocks what this one has found; a block barrier.
__device__ __forceinline__ void tell(GridWords* words, int round, const Largest& largest, const ScratchUse& use) {
    __syncthreads();
    if (gridDim.x > 1 && threadIdx.x == 0) leave_word(words->maxima[round] + blockIdx.x, use.epoch(), largest.own);
}

// Hears what all blocks have told; false, for all threads, if this block has given up.
__device__ __forceinline__ bool hear(GridWords* words, int round, Largest& largest, ScratchUse& use,
                                     const Scratch& scratch) {
    if (gridDim.x == 1) {
        if (threadIdx.x == 0) largest.all = largest.own;
        __syncthreads();
        return true;
    }
    u32 most = 0;
    bool given_up = use.aborted();
    Patience patience(scratch);
    for (u32 block = threadIdx.x; block < gridDim.x && !given_up; block += THREADS) {
        most = max(most, await_word(words->maxima[round] + block, use.epoch(), block, patience, given_up));
    }
    __syncwarp();
    most = warp_max(most);
    if (threadIdx.x % 32 == 0 && most != 0) atomicMax(&largest.all, most);
    return use.met(given_up);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_forward(const ForwardParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Largest estimate, exact;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int segments = (p.columns + SEGMENT - 1) / SEGMENT, pitch = (p.columns + 127) / 128 * 128;
    float* rstds = reinterpret_cast<float*>(dynamic);
    u8* x = reinterpret_cast<u8*>(rstds + (OWN ? p.known_rows : WARPS * TILE_ROWS));
    bf16* scales = reinterpret_cast<bf16*>(x + p.resident_rows * pitch);
    float* sums = reinterpret_cast<float*>(scales + p.known_rows * ((p.columns + QB - 1) / QB));
    u32* products = reinterpret_cast<u32*>(sums + segments * p.chunk_rows);  // both [segments, chunk_rows]
    float* alone = sums + 2 * segments * p.chunk_rows;  // of a single block without OWN: rstd of all rows
    const Rows rows{p, rstds, x, scales, pitch};
    const int count = rows.count();
    GridWords* words = reinterpret_cast<GridWords*>(p.scratch.state);

    const int tiles_across = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int tiles_down = OWN ? count / TILE_ROWS : (int(p.rows) + TILE_ROWS - 1) / TILE_ROWS;
    const int first_tile = OWN ? warp : int(blockIdx.x) * WARPS + warp;
    Place tile{first_tile % tiles_across, first_tile / tiles_across};
    // Own rows that are not resident were read last, so they come first.
    const auto tile_row = [&] { return (OWN ? tiles_down - 1 - tile.down : tile.down) * TILE_ROWS; };
    const auto lane_row = [&] { return tile_row() + lane / (32 / ROW_LANES) * TR; };
    const auto lane_column = [&] { return tile.across * TILE_COLUMNS + lane % (32 / ROW_LANES) * TC; };
    Quad quads[TR / 4];
    Pack<Weight, TC> weights;
    const auto load_tile_quad = [&](int q) {
        const int at = lane_column();
        load_quad(quads[q], rows, lane_row() + 4 * q, at < p.columns ? at : 0);
    };
    const auto load_first_tile = [&] {
        if (tile.down >= tiles_down) return;
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) load_tile_quad(q);
        load_weight_pack(weights, p, lane_column());
    };

    wait_for_producer();
    if (p.early_trigger) launch_dependents();
    ScratchUse use(p.scratch, gridDim.x > 1);
    if (threadIdx.x == 0) estimate = exact = Largest{0, 0};
    if (!OWN) load_first_tile();

    // Phase 1.
    u32 best = 0;
    bool strange = false;
    float w[PACK];
    int held = -1;
    const Place step{WARPS % segments, WARPS / segments * BATCH};
    for (int first = 0; first < count; first += p.chunk_rows) {
        const int end = min(first + p.chunk_rows, count);
        Place place{warp % segments, first + warp / segments * BATCH}, after;
        Batch batch, next;
        if (place.down < end) load_batch(batch, p, rows.global(place.down), place.across * SEGMENT + lane * PACK);
        for (; place.down < end; place = after, batch = next) {
            after = {place.across + step.across, place.down + step.down};
            if (after.across >= segments) after.across -= segments, after.down += BATCH;
            if (after.down < end) load_batch(next, p, rows.global(after.down), after.across * SEGMENT + lane * PACK);
            const int at = place.across * SEGMENT + lane * PACK;
            if (place.across != held) {
                held = place.across;
                Pack<Weight, PACK> raw;
                load_weight_pack(raw, p, at);
                to_float(w, raw);
#pragma unroll
                for (int i = 0; i < PACK; ++i) {
                    w[i] = fabsf(w[i]);
                    strange |= !(w[i] <= 0x1p20f);
                }
            }
            float squares[BATCH];
            u32 most[BATCH];
#pragma unroll
            for (int r = 0; r < BATCH; ++r) {
                squares[r] = 0.0f, most[r] = 0;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float v[4];
                    u32 product[4];
                    fp8_floats<X>(batch.word[r][j], v);
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        squares[r] = __fmaf_rn(v[k], v[k], squares[r]);
                        product[k] = __float_as_uint(__fmul_rn(fabsf(v[k]), w[4 * j + k]));
                    }
                    most[r] = max(max(most[r], product[0]), product[1]);  // of three, in one instruction
                    most[r] = max(max(most[r], product[2]), product[3]);
                }
                const float scale = bf16{batch.scale[r]};
                squares[r] = __fmul_rn(__fmul_rn(squares[r], scale), scale);
                most[r] = __float_as_uint(__fmul_rn(__uint_as_float(most[r]), fabsf(scale)));
            }
            if constexpr (OWN) {
                if (at < p.columns) keep_batch(batch, rows, place.down, at);
            }
            const int to = place.across * p.chunk_rows + place.down - first;
            const float sum = sum_lanes(squares);
            if (lane % (32 / BATCH) == 0) sums[to + lane / (32 / BATCH)] = sum;
#pragma unroll
            for (int r = 0; r < BATCH; ++r) most[r] = warp_max(most[r]);
            if (lane == 0) {
#pragma unroll
                for (int r = 0; r < BATCH; ++r) products[to + r] = most[r];
            }
        }
        __syncthreads();
        for (int local = first + threadIdx.x; local < end; local += THREADS) {
            const i64 row = rows.global(local);
            float rstd = 0.0f;
            if (row < p.rows) {
                float total = 0.0f;
                u32 most = 0;
                for (int s = 0; s < segments; ++s) {
                    total = __fadd_rn(total, sums[s * p.chunk_rows + local - first]);
                    most = max(most, products[s * p.chunk_rows + local - first]);
                }
                rstd = reciprocal_root(__fadd_rn(divide_full(total, float(p.columns)), p.epsilon));
                p.rstd[row] = rstd;
                if (!OWN && gridDim.x > 1) leave_word(words->rows + row, use.epoch(), __float_as_uint(rstd));
                if (!OWN && gridDim.x == 1) alone[row] = rstd;
                const bool usual = rstd >= 0x1p-20f && rstd <= 0x1p20f;
                best = max(best, usual ? __float_as_uint(__fmul_rn(__uint_as_float(most), rstd)) : UNDECIDED);
            }
            if (OWN && local < p.known_rows) rstds[local] = rstd;
        }
        if (end < count) __syncthreads();
    }
    best = warp_max(strange ? UNDECIDED : best);
    if (lane == 0) atomicMax(&estimate.own, best);

    // The rstd of a tile's rows, of which other blocks have reduced some.
    const auto await_rows = [&] {
        Patience patience(p.scratch);
        bool given_up = use.aborted();
        for (int r = lane; r < TILE_ROWS; r += 32) {
            const int row = tile_row() + r;
            u32 bits = 0;
            if (row < p.rows && gridDim.x == 1) {
                bits = __float_as_uint(alone[row]);
            } else if (row < p.rows && !given_up) {
                const u32 block = u32(row / BLOCK_ROWS) % gridDim.x;
                bits = await_word(words->rows + row, use.epoch(), block, patience, given_up);
            }
            rstds[warp * TILE_ROWS + r] = __uint_as_float(bits);
        }
        __syncwarp();
    };
    tell(words, 0, estimate, use);
    if (OWN) load_first_tile();
    if (!OWN && tile.down < tiles_down) await_rows();
    if (!hear(words, 0, estimate, use, p.scratch)) return;
    u32 scale_bits = decided_scale(estimate.all);
    if (scale_bits == UNDECIDED) {
        exact_maximum(rows, &exact.own);
        tell(words, 1, exact, use);
        if (!hear(words, 1, exact, use, p.scratch)) return;
        scale_bits = fp8_scale_bits<X>(__uint_as_float(exact.all));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = u16(scale_bits);
    const float inverse = reciprocal(bf16{u16(scale_bits)});

    // Phase 2.
    while (tile.down < tiles_down) {
        const int at = lane_column(), own = lane_row(), valid = p.columns - at;
        const i64 row0 = OWN ? rows.global(own) : i64(own);
        const int left = valid > 0 ? int(min(p.rows - row0, i64(TR))) : 0;
        tile.across += OWN ? WARPS : WARPS * int(gridDim.x);
        while (tile.across >= tiles_across) tile.across -= tiles_across, ++tile.down;
        const bool more = tile.down < tiles_down;
        float w[TC];
        to_float(w, weights);
        if (more) load_weight_pack(weights, p, lane_column());
        Turned<TR, TC> turned;
        u8* to = p.qy + row0 * p.columns + at;
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) {
            Factors factors;
            load_factors(factors, quads[q], rows, own + 4 * q, valid > 0 ? at : 0);
            u32 out[4][TC / 4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const u32 pair = factors.scale[r / 2];
                const float scale = __uint_as_float(r % 2 ? pair & 0xffff0000u : pair << 16);
                float v[TC];
#pragma unroll
                for (int j = 0; j < TC / 4; ++j) fp8_floats<X>(quads[q].word[r][j], v + 4 * j);
#pragma unroll
                for (int i = 0; i < TC; ++i) v[i] = rounded_to_bf16(normalised(v[i], scale, factors.rstd[r], w[i]));
                quantise<X, TC>(out[r], v, inverse);
            }
            // The next tile's bytes are asked for before this one's stores, which nothing can be moved across.
            if (more) load_tile_quad(q);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (4 * q + r < left) {
                    store_bytes<TC>(to + u64(u32(4 * q + r)) * u32(p.columns), out[r], valid, ALIGNED);
                }
            }
            turned.take(q, out);
        }
        store_turned<RUN, ALIGNED>(p.qy_t, turned, row0, p.rows, p.batch_rows, p.columns, at);
        if (!OWN && more) {
            __syncwarp();
            await_rows();
        }
    }
    if (gridDim.x > 1) use.finish();
    if (!p.early_trigger) launch_dependents();
}
