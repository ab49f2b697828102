// SPDX-License-Identifier: Apache-2.0
// dx of a row, which a team of TEAM_WARPS warps computes in three steps: the products of this thread's packs, the sums
// of the products over the row, and dx from the products and the sums. fp8_rmsnorm_backward.cu has the formulas.
#pragma once
#include "coat/backward_rows.cuh"
#include "ptx/threads.cuh"

constexpr int SUMS = CENTRED ? 2 : 1;  // number of sums over a row (c1, c2), and of sums over all rows (dw, db)

// The weights of all columns, which LOADERS threads copy from global memory to shared memory, in fp32. The l-th of
// these threads (loader l) copies packs l, l + LOADERS, ...
template <int LOADERS>
struct Weights {
    static constexpr int ALL = PACKS * TEAM_THREADS;              // packs of a row
    static constexpr int ROUNDS = (ALL + LOADERS - 1) / LOADERS;  // the most packs that one thread loads
    Pack<Weight, WIDTH> pack[ROUNDS];

    __device__ static __forceinline__ bool beyond(int place) { return ALL % LOADERS != 0 && place >= ALL; }

    // Loads the packs of loader `loader`. Weights beyond the last column are 0.
    __device__ __forceinline__ void load(const BackwardParams& p, int loader) {
#pragma unroll
        for (int k = 0; k < ROUNDS; ++k) {
            const int place = loader + k * LOADERS, valid = p.columns - place * WIDTH;
            clear(pack[k].word);
            if (beyond(place) || (!FULL && valid <= 0)) continue;
            if constexpr (ALIGNED) {
                load_pack(pack[k], p.weight + place * WIDTH);
            } else {
                load_elements<Weight, WIDTH>(pack[k], p.weight + place * WIDTH, valid);
            }
        }
    }

    // Stores the loaded weights in `weights` [PACKS][2][TEAM_THREADS], four columns per element, so that a warp reads
    // contiguous memory.
    __device__ __forceinline__ void keep(float4* weights, int loader) const {
#pragma unroll
        for (int k = 0; k < ROUNDS; ++k) {
            const int place = loader + k * LOADERS;
            if (beyond(place)) continue;
            float v[WIDTH];
            to_float(v, pack[k]);
            float4* to = weights + place / TEAM_THREADS * (2 * TEAM_THREADS) + place % TEAM_THREADS;
            to[0] = make_float4(v[0], v[1], v[2], v[3]);
            to[TEAM_THREADS] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
};

// Calls over_rows(i, at, g, xhat) for each element `at` of each pack i of this thread, with g and xhat of the element.
// over_rows() adds the element to this thread's sums over all rows (dw, db).
template <typename F>
__device__ __forceinline__ void add_row(const Row& row, const Saved& saved, F over_rows) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
        for (int j = 0; j < WIDTH / 4; ++j) {
            float v[4], g[4];
            normalised(v, row.pack[i], j, saved);
            gradient(g, row.pack[i], 2 * j);
#pragma unroll
            for (int k = 0; k < 4; ++k) over_rows(i, 4 * j + k, g[k], v[k]);
        }
    }
}

// This thread's part of a row.
struct Products {
    float xhat[PACKS][WIDTH];  // xhat of each element
    float wdy[PACKS][WIDTH];   // w * g of each element
    float sums[SUMS] = {};     // the sums of xhat * wdy and, with CENTRED, of wdy: this thread's, later the row's

    // Computes xhat, wdy and this thread's sums of a row. Also calls over_rows(i, at, g, xhat) for each element `at` of
    // each pack i, with g and xhat of the element.
    template <typename F>
    __device__ __forceinline__ void take(const Row& row, const Saved& saved, const float4* weights, int columns,
                                         int member, F over_rows) {
        clear(sums);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int column = member * WIDTH + i * SPAN;
            float own[SUMS] = {};
#pragma unroll
            for (int j = 0; j < WIDTH / 4; ++j) {
                float weight[4] = {1.0f, 1.0f, 1.0f, 1.0f};
                if constexpr (WEIGHTED) {
                    const float4 w = weights[(2 * i + j) * TEAM_THREADS + member];
                    weight[0] = w.x, weight[1] = w.y, weight[2] = w.z, weight[3] = w.w;
                }
                float v[4], g[4];
                normalised(v, row.pack[i], j, saved);
                gradient(g, row.pack[i], 2 * j);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int at = 4 * j + k;
                    xhat[i][at] = v[k];
                    wdy[i][at] = __fmul_rn(weight[k], g[k]);
                    over_rows(i, at, g[k], v[k]);
                    if (ALIGNED || column + at < columns) {
                        own[0] = __fadd_rn(own[0], __fmul_rn(v[k], wdy[i][at]));
                        if constexpr (CENTRED) own[1] = __fadd_rn(own[1], wdy[i][at]);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < SUMS; ++k) {
                if (FULL || column < columns) sums[k] = __fadd_rn(sums[k], own[k]);
            }
        }
    }

    // Adds `sums` over all threads of the team. All threads of the team call it. If the team has several warps, it
    // contains a barrier of the team, and the warps exchange their sums in `words`. The caller passes two such arrays
    // alternately, row by row. So a warp that stores to an array has passed the barrier of the previous row, and every
    // warp arrived at that barrier after it had read the sums that the array held two rows before.
    __device__ __forceinline__ void add_over_team(float (&words)[TEAMS][SUMS][TEAM_WARPS], int team, int warp) {
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
            for (int k = 0; k < SUMS; ++k) sums[k] = __fadd_rn(sums[k], __shfl_xor_sync(0xffffffffu, sums[k], mask));
        }
        if constexpr (TEAM_WARPS > 1) {
#pragma unroll
            for (int k = 0; k < SUMS; ++k) {
                if (threadIdx.x % 32 == 0) words[team][k][warp % TEAM_WARPS] = sums[k];
            }
            ptx::bar_sync(1 + team, TEAM_THREADS);  // each team has a barrier of its own
#pragma unroll
            for (int k = 0; k < SUMS; ++k) {
                sums[k] = 0.0f;
#pragma unroll
                for (int i = 0; i < TEAM_WARPS; ++i) sums[k] = __fadd_rn(sums[k], words[team][k][i]);
            }
        } else {
            __syncwarp();
        }
    }

    // Stores dx. `to` is the address of this thread's first column of the row, and `inverse` is 1 / columns.
    __device__ __forceinline__ void store(u16* to, float rstd, float inverse, int columns, int member) const {
        const float c1 = __fmul_rn(sums[0], inverse);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            float v[WIDTH];
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                if constexpr (CENTRED) {
                    const float c2 = __fmul_rn(sums[SUMS - 1], inverse);
                    v[j] = __fmul_rn(__fsub_rn(wdy[i][j], __fmaf_rn(xhat[i][j], c1, c2)), rstd);
                } else {
                    v[j] = __fmul_rn(__fmaf_rn(-xhat[i][j], c1, wdy[i][j]), rstd);
                }
            }
            store_dx(to + i * SPAN, v, columns - member * WIDTH - i * SPAN);
        }
    }
};
