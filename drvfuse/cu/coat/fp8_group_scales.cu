// SPDX-License-Identifier: Apache-2.0
// A residual addition, RMSNorm, or both, whose results are FP8 with group scales. Each byte of an operand is read once,
// and each byte of a result is written once.
//
// Computes, in fp32, where s is the scale of the element's group of QB columns:
//   with ADD   total = a + b, for a and b [rows, columns] in bf16
//              sum = bf16(total)                                                       [rows, columns]
//              x, s_x = total, quantised                                               FP8 with bf16 scales
//   with NORM  rstd = 1 / sqrt(mean of (x * s)^2 over the row + epsilon)               [rows] fp32
//              y = (x * s * rstd) * w
//              qy, s_y = y, quantised                                                  FP8 with bf16 scales
// Scales have the shape [rows, ceil(columns / QB)]. A group of values v is quantised with scale = (max|v| + 1e-10) /
// fp8_max to FP8(v / scale), by div.full. The division takes the unrounded scale, and the stored scale is rounded to
// bf16. NaN elements are ignored in the maximum, which is NaN only if all elements of the group are NaN. With ADD and
// NORM the norm takes x and s_x as they are stored, so one launch gives the same bytes as two launches.
//
// Division. The grid may have any size. Team t (teams.cuh) of all teams takes rows t, t + teams, ... Each thread has
// PACKS packs of 16 columns of the row. A group is held by QB / 16 neighbouring lanes.
//
// Storage. Registers: a team's row, and its next row, which is in flight; with HOLD the weights. A lane's pack of bf16
// has 32 bytes. Two neighbouring lanes are a pair. With ALIGNED they load the pack of the first lane together, one half
// each, then the pack of the second lane, and exchange halves by shuffles. Before stores they exchange halves too, and
// store each pack together. So every access has whole sectors. Shared memory: the sums of the warps of a team.
//
// Memory ordering. Blocks exchange no data and do not wait for one another. Warps of a team exchange sums as teams.cuh
// describes.
//
// PDL. Before the wait for the producer, a block reads only the weights that stay in registers. It triggers right after
// the wait (early_trigger) or after its last store.
#include "coat/kernel.cuh"
#include "coat/teams.cuh"

constexpr bool ADD = DRVFUSE_ADD;                   // the kernel adds a and b
constexpr bool NORM = DRVFUSE_NORM;                 // the kernel normalises x
constexpr bool HOLD = PACKS * sizeof(Weight) <= 8;  // the weights stay in registers

// The kernel's parameters. drvfuse/ops/coat/group_scales.py reads this definition. Strides are in elements.
struct GroupParams {
    const u16* a;          // [rows, columns], bf16, with row stride `a_stride`; only if ADD
    const u16* b;          // [rows, columns], bf16, with row stride `b_stride`; only if ADD
    u16* sum;              // [rows, columns], bf16, contiguous; only if ADD
    u8* x;                 // [rows, columns]: if ADD a contiguous result, else an operand with row stride `x_stride`
    u16* scales;           // s_x, bf16: if ADD a contiguous result, else an operand with row stride `scale_stride`
    const Weight* weight;  // w [columns]; only if NORM
    u8* qy;                // [rows, columns], contiguous; only if NORM
    u16* out_scales;       // s_y, bf16, contiguous; only if NORM
    float* rstd;           // [rows]; only if NORM
    i64 rows;              // rows of all tensors
    i64 a_stride;          // distance between two rows of a
    i64 b_stride;          // distance between two rows of b
    i64 x_stride;          // distance between two rows of x
    i64 scale_stride;      // distance between two rows of s_x
    int columns;           // columns of all tensors except scales
    float epsilon;         // the number added to the mean of squares
    int early_trigger;     // 1: trigger dependent launches early, 0: after the last store
    int unused;            // padding to a multiple of 8 bytes
};

using Bf16Pack = Pack<bf16, PACK>;
using WeightPack = Pack<Weight, PACK>;

// Exchanges halves of packs between the two lanes of a pair. After load_halves() this makes whole packs of the halves.
// Before store_halves() it divides whole packs into the halves that each lane stores.
__device__ __forceinline__ void exchange_halves(Bf16Pack& pack) {
    const bool odd = threadIdx.x % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 received = __shfl_xor_sync(0xffffffffu, odd ? pack.word[i] : pack.word[4 + i], 1);
        pack.word[i] = odd ? received : pack.word[i];
        pack.word[4 + i] = odd ? pack.word[4 + i] : received;
    }
}

// Returns the first column of this lane's half of pack `which`, 0 or 1, of the pair. `column` is the first column of
// this lane's own pack.
__device__ __forceinline__ int half_column(int column, int which) {
    const int odd = threadIdx.x % 2;
    return column + PACK * (which - odd) + PACK / 2 * odd;
}

// Loads this lane's halves of the two packs of a pair of lanes. exchange_halves() then makes whole packs of the halves.
__device__ __forceinline__ void load_halves(Bf16Pack& pack, const u16* row, int column, int columns) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const int begin = half_column(column, which);
        if (begin < columns) load_words<4>(pack.word + 4 * which, row + begin);
    }
}

// Stores this lane's halves of the two packs of a pair of lanes, after exchange_halves() has divided the whole packs.
__device__ __forceinline__ void store_halves(const Bf16Pack& pack, u16* row, int column, int columns) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const int begin = half_column(column, which);
        if (begin < columns) store_words<4>(row + begin, pack.word + 4 * which);
    }
}

// A thread's packs of a row, as loaded from memory. Elements that do not exist are 0.
struct Loaded {
    Bf16Pack a[PACKS], b[PACKS];  // only if ADD: halves from load_halves() if ALIGNED, else whole packs of a and b
    Fp8Row x;                     // x and its scales, unless ADD
};

// Starts to load a row. The row need not exist.
__device__ __forceinline__ void load_row(Loaded& loaded, const GroupParams& p, const Team& team, i64 row) {
    const int columns = row < p.rows ? p.columns : 0;
    if constexpr (!ADD) {
        loaded.x.load<QB, ALIGNED>(team, p.x + row * p.x_stride, p.scales + row * p.scale_stride, columns);
        return;
    }
    const u16* rows[2] = {p.a + row * p.a_stride, p.b + row * p.b_stride};
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            Bf16Pack& pack = which ? loaded.b[i] : loaded.a[i];
            const int column = team.column(i);
            clear(pack.word);
            if constexpr (ALIGNED) {
                load_halves(pack, rows[which], column, columns);
            } else if (column < columns) {
                load_elements<bf16, PACK>(pack, rows[which] + column, columns - column);
            }
        }
    }
}

// Quantises this lane's pack, whose first `valid` elements exist. Sets `word` to the FP8 elements, and `scale` to the
// bf16 bits of the scale of the lane's group. Called by all lanes of a warp.
__device__ __forceinline__ void quantise(const float (&v)[PACK], int valid, u32 (&word)[4], u16& scale) {
    // Starts with NaN: fmaxf ignores a NaN if the other operand is a number, so the maximum is NaN only if all v are.
    float largest = __uint_as_float(NAN_BITS);
#pragma unroll
    for (int i = 0; i < PACK; ++i) {
        if (ALIGNED ? valid > 0 : i < valid) largest = fmaxf(largest, fabsf(v[i]));
    }
#pragma unroll
    for (int mask = 1; mask < QB / PACK; mask *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    }
    const float unrounded = ptx::divide_full(__fadd_rn(largest, 1e-10f), Finite<X>::max);
    const float inverse = ptx::reciprocal_approx(unrounded);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float quotient[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) quotient[k] = __fmul_rn(v[4 * j + k], inverse);
        word[j] = Word<X>::pack(quotient);
    }
    const float pair[2] = {unrounded, 0.0f};
    scale = u16(Word<bf16>::pack(pair));
}

// Stores this lane's quantised pack in `values` and, in the first lane of a group, the group's scale in `scales`.
__device__ __forceinline__ void store_group(const GroupParams& p, u8* values, u16* scales, i64 row, int column,
                                            const u32 (&word)[4], u16 scale) {
    if (column >= p.columns) return;
    store_bytes<PACK>(values + row * p.columns + column, word, p.columns - column, ALIGNED);
    if (column % QB == 0) scales[row * ((p.columns + QB - 1) / QB) + column / QB] = scale;
}

// Adds this lane's packs of a and b at `column`, and stores their sum, in bf16 as `sum` and quantised as x with its
// scale. Sets `word` and `scale` to the FP8 elements of x and the bf16 bits of their scale, or to 0 if the pack does
// not exist.
__device__ __forceinline__ void add_pack(const GroupParams& p, Bf16Pack& a, Bf16Pack& b, i64 row, int column,
                                         u32 (&word)[4], u16& scale) {
    if constexpr (ALIGNED) exchange_halves(a), exchange_halves(b);
    float v[PACK], other[PACK];
    to_float(v, a);
    to_float(other, b);
#pragma unroll
    for (int k = 0; k < PACK; ++k) v[k] = __fadd_rn(v[k], other[k]);
    Bf16Pack sum;
    from_float(sum, v);
    u16* sum_row = p.sum + row * p.columns;
    if constexpr (ALIGNED) {
        exchange_halves(sum);
        store_halves(sum, sum_row, column, p.columns);
    } else if (column < p.columns) {
        store_elements<bf16, PACK>(sum_row + column, sum, p.columns - column);
    }
    quantise(v, p.columns - column, word, scale);
    store_group(p, p.x, p.scales, row, column, word, scale);
    if (column >= p.columns) word[0] = word[1] = word[2] = word[3] = 0, scale = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) fp8_group_scales(const GroupParams p) {
    __shared__ TeamScratch scratch;
    Team team;
    i64 row = i64(blockIdx.x) * TEAMS + team.index;
    const i64 step = i64(gridDim.x) * TEAMS;

    WeightPack weight[HOLD ? PACKS : 1];
    if constexpr (NORM && HOLD) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) load_columns<ALIGNED>(weight[i], p.weight, team.column(i), p.columns);
    }
    enter_stream(p);
    Loaded loaded;
    load_row(loaded, p, team, row);
    for (; row < p.rows; row += step) {
        Fp8Row x;
        if constexpr (ADD) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                add_pack(p, loaded.a[i], loaded.b[i], row, team.column(i), x.word[i], x.scale[i]);
            }
        } else {
            x = loaded.x;
        }
        load_row(loaded, p, team, row + step);
        if constexpr (NORM) {
            float sums[PACKS];
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                float squares = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float v[4];
                    Word<X>::unpack(x.word[i][j], v);
#pragma unroll
                    for (int k = 0; k < 4; ++k) squares = __fmaf_rn(v[k], v[k], squares);  // products are exact
                }
                const float scale = bf16{x.scale[i]};
                sums[i] = __fmul_rn(__fmul_rn(squares, scale), scale);
            }
            const float mean = ptx::divide_full(team.sum(scratch, sums), float(p.columns));
            const float rstd = reciprocal_root(__fadd_rn(mean, p.epsilon));
            if (team.member == 0 && team.lane == 0) p.rstd[row] = rstd;
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const int column = team.column(i);
                const float scale = bf16{x.scale[i]};
                float y[PACK], w[PACK];
                WeightPack& weight_pack = weight[HOLD ? i : 0];
                if constexpr (!HOLD) load_columns<ALIGNED>(weight_pack, p.weight, column, p.columns);
                if constexpr (PACKS > 1) x.forget(i), forget(weight_pack);
                to_float(w, weight_pack);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float v[4];
                    Word<X>::unpack(x.word[i][j], v);
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        y[4 * j + k] = __fmul_rn(__fmul_rn(__fmul_rn(v[k], scale), rstd), w[4 * j + k]);
                    }
                }
                u32 out[4];
                u16 out_scale;
                quantise(y, p.columns - column, out, out_scale);
                store_group(p, p.qy, p.out_scales, row, column, out, out_scale);
            }
        }
    }
    leave_stream(p);
}
