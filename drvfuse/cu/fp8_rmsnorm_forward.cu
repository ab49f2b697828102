// SPDX-License-Identifier: Apache-2.0
// FP8 RMSNorm forward in one launch: x and its group scales are read, qy, its transpose, one scale and rstd written.
//
// Layout: x [rows, columns] FP8 with a row stride, s_x [rows, ceil(columns / QB)] bf16 with a row stride, w [columns].
// Grid: cooperative, at most as many blocks as are resident, WARPS warps each.
//   Phase 1  WARPS_A_ROW warps take a row: rstd, and the row's largest |y|, of which only the grid's maximum is kept.
//            A row's bytes are kept in shared memory where they fit (OWN: the block meets the same rows in phase 2).
//   Barrier  the grid's maximum, from which every block computes the one scale.
//   Phase 2  a warp takes a tile of ROW_LANES * TR rows by 32 / ROW_LANES * TC columns: each thread quantises TR x TC
//            elements, stores TC bytes of each row, and runs of TR bytes of each column.
//
// The sum of squares of a row is a tree on the columns alone: squares of 16 elements in order (they are exact), times
// the scale twice; lane l of segment k (512 columns) adds its packs of segments k, k + 8, ... in order; butterfly over
// the lanes, then over the 8 segments. Numerics otherwise as COAT's: y = (x * s * rstd) * w in fp32, its maximum of
// unrounded values, y rounded to bf16 before the quotient, which is a product with the approximate reciprocal, as
// div.full computes it.
//
// The maximum is exact though few elements are evaluated: rounding is monotone, so a pack's largest |x|, times scale,
// rstd and largest |w|, each rounded, is no less than any |y| of the pack, and only packs whose bound exceeds what the
// block has found are evaluated. NaN: a row whose y are all NaN (so one with a NaN rstd) makes the maximum a NaN;
// other NaN are dropped.
#include "fp8_rows.cuh"
#include "grid_barrier.cuh"
#include "pdl.cuh"

using X = DRVFUSE_DTYPE;
using Weight = DRVFUSE_WEIGHT_DTYPE;
constexpr int QB = DRVFUSE_GROUP;
constexpr int WARPS = DRVFUSE_WARPS;
constexpr int WARPS_A_ROW = DRVFUSE_WARPS_A_ROW;
constexpr int TR = DRVFUSE_TILE_ROWS, TC = DRVFUSE_TILE_COLUMNS, ROW_LANES = DRVFUSE_ROW_LANES;
constexpr int RUN = DRVFUSE_RUN;              // bytes of a column that one store of qy_t can take
constexpr bool ALIGNED = DRVFUSE_ALIGNED;     // whole packs, 16-byte aligned rows
constexpr bool OWN = DRVFUSE_OWN;             // a block quantises the rows that it has reduced

constexpr int THREADS = 32 * WARPS;
constexpr int TEAMS = WARPS / WARPS_A_ROW;
constexpr int SLOTS = DRVFUSE_SLOTS;  // packs of a row that a lane has in flight: 8 / WARPS_A_ROW, fewer for short rows
constexpr int SEGMENT = 32 * PACK;
constexpr int BLOCK_ROWS = OWN ? ROW_LANES * TR : TEAMS;
constexpr int TILE_ROWS = ROW_LANES * TR, TILE_COLUMNS = 32 / ROW_LANES * TC;

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
    int columns, resident_rows;
    float epsilon;
    int early_trigger;
};

template <bool>
struct Pick {
    using type = int;
};
template <>
struct Pick<false> {
    using type = i64;
};

struct Rows {
    const ForwardParams& p;
    u8* kept;           // resident rows, `pitch` bytes each
    bf16* kept_scales;  // their scales, `scale_pitch` elements each
    int pitch, scale_pitch;

    // Row `local` of this block.
    __device__ __forceinline__ i64 global(int local) const {
        return (i64(local / BLOCK_ROWS) * gridDim.x + blockIdx.x) * BLOCK_ROWS + local % BLOCK_ROWS;
    }
};

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, mask));
    return value;
}

__device__ __forceinline__ u32 warp_max(u32 value) {
    u32 result;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
    return result;
}

// The packs of one row that a warp has in flight: segments first, first + WARPS_A_ROW, ...
struct Batch {
    u32 word[SLOTS][4];
    u16 scale[SLOTS];
};

__device__ __forceinline__ void load_batch(Batch& batch, const ForwardParams& p, i64 row, int column) {
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        int at = column + i * WARPS_A_ROW * SEGMENT;
        batch.scale[i] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) batch.word[i][j] = 0;
        if (row < p.rows && at < p.columns) {
            if constexpr (ALIGNED) {
                stream_pack(batch.word[i], p.x + row * p.x_stride + at);
            } else {
                load_bytes<PACK>(batch.word[i], p.x + row * p.x_stride + at, p.columns - at, false);
            }
            batch.scale[i] = p.scales[row * p.scale_stride + at / QB].bits;
        }
    }
}

__device__ __forceinline__ float normalised(float x, float scale, float rstd, float weight) {
    return __fmul_rn(__fmul_rn(__fmul_rn(x, scale), rstd), weight);
}

// TC columns of four rows; what does not exist is 0.
struct Quad {
    u32 word[4][TC / 4];
    u16 scale[4];
};

__device__ __forceinline__ void load_quad(Quad& quad, const ForwardParams& p, const Rows& rows, i64 row, int local,
                                          int at) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        quad.scale[r] = 0;
#pragma unroll
        for (int j = 0; j < TC / 4; ++j) quad.word[r][j] = 0;
        if (row + r < p.rows) {
            if (OWN && local + r < p.resident_rows) {
                load_bytes<TC>(quad.word[r], rows.kept + i64(local + r) * rows.pitch + at, TC, true);
                quad.scale[r] = rows.kept_scales[(local + r) * rows.scale_pitch + at / QB].bits;
            } else {
                load_bytes<TC>(quad.word[r], p.x + (row + r) * p.x_stride + at, p.columns - at, ALIGNED);
                quad.scale[r] = p.scales[(row + r) * p.scale_stride + at / QB].bits;
            }
        }
    }
}

constexpr u32 NAN_BITS = 0x7fffffff;

// The largest |y| of one pack into `best`; true if it has a y that is a number. The pack is this lane's own: it is taken
// from the shared memory at `kept` where that is not null.
__device__ __forceinline__ bool evaluate(const ForwardParams& p, i64 row, int at, const u8* kept,
                                         const bf16* kept_scales, const Weight* weight, float rstd, float& best) {
    const int valid = p.columns - at;
    u32 word[4];
    float scale;
    if (kept != nullptr) {
        load_bytes<PACK>(word, kept + at, PACK, true);
        scale = kept_scales[at / QB];
    } else {
        load_bytes<PACK>(word, p.x + row * p.x_stride + at, valid, ALIGNED);
        scale = p.scales[row * p.scale_stride + at / QB];
    }
    float w[PACK];
    load_weights<Weight, PACK>(w, weight + at, PACK, true);
    bool number = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float v[4];
        fp8_floats<X>(word[j], v);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float y = fabsf(normalised(v[k], scale, rstd, w[4 * j + k]));
            if (4 * j + k < valid && y == y) {
                number = true;
                best = fmaxf(best, y);
            }
        }
    }
    return number;
}

// Raise `found`, the block's largest |y| as bits, by this warp's packs of a row: those whose bound exceeds it are
// evaluated, the lane with the largest bound first, as what it finds rules most others out. `limits[i]` is the largest
// bound, without rstd, of the lane's packs in slot i; `column` is that of its pack of slot 0. Returns whether any y is a
// number.
__device__ __forceinline__ bool raise_maximum(const ForwardParams& p, u32* found, i64 row, int column, const u8* kept,
                                              const bf16* kept_scales, const Weight* weight, float rstd,
                                              const float (&limits)[SLOTS]) {
    const int lane = threadIdx.x % 32;
    u32 best = *(volatile u32*)found;  // magnitudes as bits: ordered like the numbers, and NaN above all
    u32 done = 0;                      // slots evaluated, or without packs
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) done |= u32(column + i * WARPS_A_ROW * SEGMENT >= p.columns) << i;
    bool number = false;
    for (bool first = true;; first = false) {
        u32 top = best;
        int slot = -1;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            const float limit = __fmul_rn(__fmul_rn(limits[i], rstd), 1.000001f);
            const u32 magnitude = __float_as_uint(limit) & NAN_BITS;
            if (!(done >> i & 1)) {
                number |= magnitude <= best;
                if (magnitude > top) top = magnitude, slot = i;
            }
        }
        if (!__any_sync(0xffffffffu, slot >= 0)) break;
        const u32 leader = warp_max(top);
        if (slot >= 0 && (!first || top == leader)) {
            float more = __uint_as_float(best);
            for (int at = column + slot * WARPS_A_ROW * SEGMENT; at < p.columns; at += 8 * SEGMENT) {
                number |= evaluate(p, row, at, kept, kept_scales, weight, rstd, more);
            }
            best = __float_as_uint(more);
            done |= 1u << slot;
        }
        best = warp_max(best);
    }
    if (lane == 0 && best > *(volatile u32*)found) atomicMax(found, best);
    return __any_sync(0xffffffffu, number);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_forward(const ForwardParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ u32 found;  // the largest |y| so far, as bits
    __shared__ float partial[TEAMS][8];
    __shared__ u8 numbers[TEAMS][8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int team = warp / WARPS_A_ROW, member = warp % WARPS_A_ROW;
    const int packs = (p.columns + PACK - 1) / PACK;
    float* bounds = reinterpret_cast<float*>(dynamic);                                   // largest |w| of each pack
    Weight* weight = reinterpret_cast<Weight*>(dynamic + (packs * 4 + 15) / 16 * 16);  // w, ended with zeros
    u8* kept = reinterpret_cast<u8*>(weight + packs * PACK);
    bf16* kept_scales = reinterpret_cast<bf16*>(kept + i64(p.resident_rows) * packs * PACK);
    const Rows rows{p, kept, kept_scales, packs * PACK, (packs * PACK / QB + 8) / 8 * 8};

    wait_for_producer();
    if (p.early_trigger) launch_dependents();
    ScratchUse use(p.scratch, gridDim.x > 1);
    const int column = (member * 32 + lane) * PACK;
    const int stride = 8 * SEGMENT;
    Batch batch;
    load_batch(batch, p, rows.global(team), column);

    if (threadIdx.x == 0) found = 0;
    for (int pack = threadIdx.x; pack < packs; pack += THREADS) {
        float w[PACK];
        load_weights<Weight, PACK>(w, p.weight + pack * PACK, p.columns - pack * PACK, ALIGNED);
        float most = fabsf(w[0]);
#pragma unroll
        for (int i = 1; i < PACK; ++i) most = fmaxf(most, fabsf(w[i]));
        bounds[pack] = most;
        Pack<Weight, PACK> raw;
#pragma unroll
        for (int i = 0; i < raw.words; ++i) raw.word[i] = Word<Weight>::pack(w + i * Word<Weight>::per_word);  // exact
#pragma unroll
        for (int i = 0; i < raw.words; i += 4) {
            *reinterpret_cast<uint4*>(reinterpret_cast<u32*>(weight + pack * PACK) + i) =
                make_uint4(raw.word[i], raw.word[i + 1], raw.word[i + 2], raw.word[i + 3]);
        }
    }
    __syncthreads();

    // Phase 1.
    for (int first = 0; rows.global(first) < p.rows; first += BLOCK_ROWS) {
        for (int local = first + team; local < first + BLOCK_ROWS; local += TEAMS) {
            const i64 row = rows.global(local);
            if (WARPS_A_ROW == 1 && row >= p.rows) break;
            const bool keep = OWN && local < p.resident_rows;
            float sums[SLOTS];
#pragma unroll
            for (int i = 0; i < SLOTS; ++i) sums[i] = 0.0f;
            float limits[SLOTS];  // without rstd; two roundings more or less than the bound itself
#pragma unroll
            for (int i = 0; i < SLOTS; ++i) limits[i] = 0.0f;
            for (int start = 0; start < p.columns; start += stride) {
                Batch next;
                if (start + stride < p.columns) {
                    load_batch(next, p, row, column + start + stride);
                } else {
                    const int after = local + TEAMS < first + BLOCK_ROWS ? local + TEAMS : first + BLOCK_ROWS + team;
                    load_batch(next, p, rows.global(after), column);
                }
#pragma unroll
                for (int i = 0; i < SLOTS; ++i) {
                    const int at = column + start + i * WARPS_A_ROW * SEGMENT;
                    const float scale = bf16{batch.scale[i]};  // a pack that does not exist is all zeros
                    float squares = 0.0f;
                    u32 most = 0;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        u32 low, high;
                        fp8_halves<X>(batch.word[i][j], low, high);
                        most = max_magnitudes(most, max_magnitudes(low, high));
                        float v[4];
                        half_pair(low, v);
                        half_pair(high, v + 2);
#pragma unroll
                        for (int k = 0; k < 4; ++k) squares = __fmaf_rn(v[k], v[k], squares);
                    }
                    sums[i] = __fadd_rn(sums[i], __fmul_rn(__fmul_rn(squares, scale), scale));
                    const float top = __fmul_rn(fmaxf(low_half(most), low_half(most >> 16)), fabsf(scale));
                    const float limit = __fmul_rn(top, bounds[min(at / PACK, packs - 1)]);
                    if (at < p.columns) limits[i] = limit <= limits[i] ? limits[i] : limit;  // a NaN stays
                    if (keep && at < p.columns) {
                        *reinterpret_cast<uint4*>(rows.kept + i64(local) * rows.pitch + at) =
                            make_uint4(batch.word[i][0], batch.word[i][1], batch.word[i][2], batch.word[i][3]);
                        if (at % QB == 0) kept_scales[local * rows.scale_pitch + at / QB].bits = batch.scale[i];
                    }
                }
                batch = next;
            }
            float eight[8];
            if constexpr (WARPS_A_ROW == 1) {
#pragma unroll
                for (int i = 0; i < 8; ++i) eight[i] = i < SLOTS ? sums[i < SLOTS ? i : 0] : 0.0f;
#pragma unroll
                for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
                    for (int i = 0; i < SLOTS; ++i) {
                        eight[i] = __fadd_rn(eight[i], __shfl_xor_sync(0xffffffffu, eight[i], mask));
                    }
                }
            } else {
                float sum = warp_sum(sums[0]);
                __syncthreads();
                if (lane == 0) partial[team][member] = sum;
                __syncthreads();
#pragma unroll
                for (int i = 0; i < 8; ++i) eight[i] = partial[team][i];
            }
            const float total = __fadd_rn(__fadd_rn(__fadd_rn(eight[0], eight[4]), __fadd_rn(eight[2], eight[6])),
                                          __fadd_rn(__fadd_rn(eight[1], eight[5]), __fadd_rn(eight[3], eight[7])));
            const float rstd = reciprocal_root(__fadd_rn(divide_full(total, float(p.columns)), p.epsilon));
            if (row < p.rows && lane == 0 && member == 0) p.rstd[row] = rstd;
            const u8* own = keep ? rows.kept + i64(local) * rows.pitch : nullptr;
            const bf16* own_scales = kept_scales + local * rows.scale_pitch;
            __syncwarp();  // a scale may have been kept by another lane
            const bool number =
                row >= p.rows || raise_maximum(p, &found, row, column, own, own_scales, weight, rstd, limits);
            if constexpr (WARPS_A_ROW == 1) {
                if (!number && lane == 0) atomicMax(&found, NAN_BITS);
            } else {
                if (lane == 0) numbers[team][member] = number;
                __syncthreads();
                if (member == 0 && lane == 0) {
                    int count = 0;
                    for (int i = 0; i < WARPS_A_ROW; ++i) count += numbers[team][i];
                    if (count == 0) atomicMax(&found, NAN_BITS);
                }
            }
        }
    }

    if (!grid_maximum(p.scratch, use, &found)) return;
    const u32 maximum = found;
    const u16 scale_bits = fp8_scale_bits<X>(__uint_as_float(maximum));
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = scale_bits;
    const float inverse = reciprocal(bf16{scale_bits});

    // Phase 2.
    const int tiles_across = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const i64 tiles_down = (p.rows + TILE_ROWS - 1) / TILE_ROWS;
    // A block's own tiles are few; those of the grid may be more than 2^31.
    using Tile = typename Pick<OWN>::type;
    Tile tile, tiles, step;
    if constexpr (OWN) {
        const int own = int((tiles_down + gridDim.x - 1 - blockIdx.x) / gridDim.x);
        tile = warp, tiles = own * tiles_across, step = WARPS;
    } else {
        tile = Tile(warp) * gridDim.x + blockIdx.x, tiles = tiles_down * tiles_across, step = Tile(WARPS) * gridDim.x;
    }
    const int row_lane = lane / (32 / ROW_LANES), column_lane = lane % (32 / ROW_LANES);
    for (; tile < tiles; tile += step) {
        // Own rows that are not resident were read last, so they come first.
        const i64 down = OWN ? tiles / tiles_across - 1 - tile / tiles_across : tile / tiles_across;
        const int local = OWN ? int(down) * TILE_ROWS + row_lane * TR : 0;
        const i64 row0 = (OWN ? down * gridDim.x + blockIdx.x : down) * TILE_ROWS + row_lane * TR;
        const int at = int(tile % tiles_across) * TILE_COLUMNS + column_lane * TC;
        if (at >= p.columns || row0 >= p.rows) continue;
        const int valid = p.columns - at;
        float w[TC];
        load_weights<Weight, TC>(w, weight + at, TC, true);
        float rstd[TR];
#pragma unroll
        for (int r = 0; r < TR; ++r) rstd[r] = row0 + r < p.rows ? p.rstd[row0 + r] : 0.0f;
        u32 column_words[TC][TR / 4];
        Quad quad;
        load_quad(quad, p, rows, row0, local, at);
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) {
            Quad next;  // loaded before this one's stores, which nothing can be moved across
            if (q + 1 < TR / 4) load_quad(next, p, rows, row0 + 4 * (q + 1), local + 4 * (q + 1), at);
            u32 out[4][TC / 4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
#pragma unroll
                for (int j = 0; j < TC / 4; ++j) {
                    float v[4];
                    fp8_floats<X>(quad.word[r][j], v);
                    const float scale = bf16{quad.scale[r]};
#pragma unroll
                    for (int k = 0; k < 4; ++k) v[k] = normalised(v[k], scale, rstd[4 * q + r], w[4 * j + k]);
                    u32 pair[2] = {Word<bf16>::pack(v), Word<bf16>::pack(v + 2)};
                    Word<bf16>::unpack(pair[0], v);
                    Word<bf16>::unpack(pair[1], v + 2);
#pragma unroll
                    for (int k = 0; k < 4; ++k) v[k] = __fmul_rn(v[k], inverse);
                    out[r][j] = Word<X>::pack(v);
                }
                const i64 row = row0 + 4 * q + r;
                if (row < p.rows) store_bytes<TC>(p.qy + row * p.columns + at, out[r], valid, ALIGNED);
            }
#pragma unroll
            for (int j = 0; j < TC / 4; ++j) {
                const u32 four[4] = {out[0][j], out[1][j], out[2][j], out[3][j]};
                u32 turned[4];
                transpose_bytes(four, turned);
#pragma unroll
                for (int k = 0; k < 4; ++k) column_words[4 * j + k][q] = turned[k];
            }
            if (q + 1 < TR / 4) quad = next;
        }
#pragma unroll
        for (int c = 0; c < TC; ++c) {
            if (c < valid) store_column<TR, RUN>(p.qy_t, column_words[c], row0, p.rows, p.batch_rows, p.columns, at + c);
        }
    }
    if (!p.early_trigger) launch_dependents();
}
