// SPDX-License-Identifier: Apache-2.0
// A residual add, RMSNorm, or both, whose results are FP8 with group scales. Each byte is read and written once.
//
//   ADD   a + b (bf16) in fp32. It stores the sum rounded to bf16, and x and s_x, which quantise the unrounded sum.
//   NORM  y = (x * s_x * rstd) * w in fp32. It stores qy and s_y, which quantise the unrounded y, and rstd. After ADD
//         it takes x and s_x as they were stored, so one launch gives the same bytes as two launches.
// A group's scale is (max + 1e-10) / fp8_max in fp32. It is rounded to bf16 when it is stored; the quotient, by
// div.full, takes the unrounded scale. NaN elements do not enter a group's maximum, which is NaN only if all elements
// are.
//
// Layout. a, b, x (without ADD) and its s_x have row strides; results are contiguous.
// Grid. Any size. A team takes rows team, team + teams, ...; the next row is in flight while a row is processed. Blocks
// share no memory, so there is nothing to order and nothing to wait for.
// A lane's pack of bf16 has 32 bytes. The two lanes of a pair load and store the halves of one pack, then those of the
// other, and exchange them, so that every access has whole sectors.
#include "coat/kernel.cuh"
#include "coat/teams.cuh"

constexpr bool ADD = DRVFUSE_ADD;
constexpr bool NORM = DRVFUSE_NORM;
constexpr bool HOLD = PACKS * sizeof(Weight) <= 8;  // the weights stay in registers

struct GroupParams {
    const u16* a;
    const u16* b;
    u16* sum;
    u8* x;
    u16* scales;
    const Weight* weight;
    u8* qy;
    u16* out_scales;
    float* rstd;
    i64 rows, a_stride, b_stride, x_stride, scale_stride;
    int columns;
    float epsilon;
    int early_trigger;
    int unused;
};

using Bf16Pack = Pack<bf16, PACK>;
using WeightPack = Pack<Weight, PACK>;

// The lanes of a pair exchange halves of their packs. A second call restores the packs.
__device__ __forceinline__ void trade(Bf16Pack& pack) {
    const bool odd = threadIdx.x % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 got = __shfl_xor_sync(0xffffffffu, odd ? pack.word[i] : pack.word[4 + i], 1);
        pack.word[i] = odd ? got : pack.word[i];
        pack.word[4 + i] = odd ? pack.word[4 + i] : got;
    }
}

// For a lane of a pair: the column at which its half of the pair's pack `which` begins.
__device__ __forceinline__ int half_at(int at, int which) {
    const int odd = threadIdx.x % 2;
    return at + PACK * (which - odd) + PACK / 2 * odd;
}

// The halves that the lanes of a pair load; `trade` exchanges them so that each lane has its pack.
__device__ __forceinline__ void load_halves(Bf16Pack& pack, const u16* row, int at, int columns) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const int begin = half_at(at, which);
        if (begin < columns) load_words<4>(pack.word + 4 * which, row + begin);
    }
}

__device__ __forceinline__ void store_halves(const Bf16Pack& pack, u16* row, int at, int columns) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const int begin = half_at(at, which);
        if (begin < columns) store_words<4>(row + begin, pack.word + 4 * which);
    }
}

// A row as loaded from memory; elements beyond its end are 0.
struct Loaded {
    Bf16Pack a[PACKS], b[PACKS];
    Fp8Row x;
};

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
            const int at = team.column(i);
            clear(pack.word);
            if constexpr (ALIGNED) {
                load_halves(pack, rows[which], at, columns);
            } else if (at < columns) {
                load_elements<bf16, PACK>(pack, rows[which] + at, columns - at);
            }
        }
    }
}

// Quantises this lane's pack, whose first `valid` elements exist. Called by all lanes of a warp; 1 to 8 neighbouring
// lanes form a group. `scale` gets the bits of the scale to store.
__device__ __forceinline__ void quantise(const float (&v)[PACK], int valid, u32 (&word)[4], u16& scale) {
    float most = __uint_as_float(0x7fffffff);  // a NaN, which fmaxf ignores if the other operand is a number
#pragma unroll
    for (int i = 0; i < PACK; ++i) {
        if (ALIGNED ? valid > 0 : i < valid) most = fmaxf(most, fabsf(v[i]));
    }
#pragma unroll
    for (int mask = 1; mask < QB / PACK; mask *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, mask));
    const float unrounded = ptx::divide_full(__fadd_rn(most, 1e-10f), Finite<X>::max);
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

// Stores a quantised pack, and, in the first lane of its group, the scale.
__device__ __forceinline__ void store_group(const GroupParams& p, u8* to, u16* scales, i64 row, int at,
                                            const u32 (&word)[4], u16 scale) {
    if (at >= p.columns) return;
    store_bytes<PACK>(to + row * p.columns + at, word, p.columns - at, ALIGNED);
    if (at % QB == 0) scales[row * ((p.columns + QB - 1) / QB) + at / QB] = scale;
}

// Stores the sum of pack `i`, and quantises it into `word` and `scale`.
__device__ __forceinline__ void add_pack(const GroupParams& p, Bf16Pack& a, Bf16Pack& b, i64 row, int at,
                                         u32 (&word)[4], u16& scale) {
    if constexpr (ALIGNED) trade(a), trade(b);
    float v[PACK], other[PACK];
    to_float(v, a);
    to_float(other, b);
#pragma unroll
    for (int k = 0; k < PACK; ++k) v[k] = __fadd_rn(v[k], other[k]);
    Bf16Pack sum;
    from_float(sum, v);
    u16* to = p.sum + row * p.columns;
    if constexpr (ALIGNED) {
        trade(sum);
        store_halves(sum, to, at, p.columns);
    } else if (at < p.columns) {
        store_elements<bf16, PACK>(to + at, sum, p.columns - at);
    }
    quantise(v, p.columns - at, word, scale);
    store_group(p, p.x, p.scales, row, at, word, scale);
    if (at >= p.columns) word[0] = word[1] = word[2] = word[3] = 0, scale = 0;
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
                    for (int k = 0; k < 4; ++k) squares = __fmaf_rn(v[k], v[k], squares);  // exact products
                }
                const float by = bf16{x.scale[i]};
                sums[i] = __fmul_rn(__fmul_rn(squares, by), by);
            }
            const float mean = ptx::divide_full(team.sum(scratch, sums), float(p.columns));
            const float rstd = reciprocal_root(__fadd_rn(mean, p.epsilon));
            if (team.member == 0 && team.lane == 0) p.rstd[row] = rstd;
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const int at = team.column(i);
                const float by = bf16{x.scale[i]};
                float v[PACK], w[PACK];
                WeightPack& own = weight[HOLD ? i : 0];
                if constexpr (!HOLD) load_columns<ALIGNED>(own, p.weight, at, p.columns);
                if constexpr (PACKS > 1) x.forget(i), forget(own);
                to_float(w, own);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float four[4];
                    Word<X>::unpack(x.word[i][j], four);
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        v[4 * j + k] = __fmul_rn(__fmul_rn(__fmul_rn(four[k], by), rstd), w[4 * j + k]);
                    }
                }
                u32 out[4];
                u16 out_scale;
                quantise(v, p.columns - at, out, out_scale);
                store_group(p, p.qy, p.out_scales, row, at, out, out_scale);
            }
        }
    }
    leave_stream(p);
}
