// SPDX-License-Identifier: Apache-2.0
// The products of rows of the weight with act, and their group sums, as cu/gemv/gemv_partial_norm.cu defines them.
#pragma once
#include "gemv/butterfly.cuh"
#include "gemv/packs.cuh"
#include "gemv/pipeline.cuh"
#include "gemv/result.cuh"

constexpr bool RESIDENT = M == 1 && !CHUNKED && PACKS * W <= 32;      // act stays in registers
constexpr bool AHEAD = !CHUNKED && PACKS * Pack<Act, W>::words <= 8;  // act's next row is loaded during the products
constexpr int TOGETHER = RESIDENT ? STEP : 2;                         // rows whose sums are reduced together
constexpr int SUMS = TOGETHER * PACKS;
constexpr int VALUES = SUMS > 8 ? 16 : SUMS > 4 ? 8 : SUMS > 2 ? 4 : SUMS;
static_assert(SUMS <= 16 && STEP % TOGETHER == 0, "plan");
static_assert(!DIRECT || (RESIDENT && VALUES == SUMS), "Products::put");

// The data of a row that a lane loads ahead of its use.
struct LoadedRow {
    u32 word[COPIED ? 1 : PACKS][4];
    float scale[SCALES == Scales::group ? PACKS : 1];
};

class Products {
public:
    __device__ __forceinline__ Products(const GemvParams& params, const Rows& rows_of_block,
                                        const Results& results_of_block)
        : p(params), rows(rows_of_block), results(results_of_block), lane(threadIdx.x % 32),
          column(threadIdx.x / 32 % WARPS_A_ROW) {}

    // Begins to load to registers what this lane needs of row `s` of a stage: the weights, unless COPIED, and the
    // weight's group scales.
    __device__ __forceinline__ void load(LoadedRow& loaded, const Stage& stage, int s) const {
        if constexpr (COPIED && SCALES != Scales::group) return;
        const int r = stage.first + s;
        if (r >= rows.count) return;
        const u32 row = rows[r];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int pack = pack_index(stage.chunk, i);
            const int valid = p.columns * int(sizeof(Weight)) - pack * 16;
            if constexpr (!COPIED) {
                const char* at = reinterpret_cast<const char*>(p.weight) + u64(row) * u32(p.weight_step);
                load_weight(loaded.word[i], at + i64(pack) * 16, valid > 0, valid);
            }
            if constexpr (SCALES == Scales::group) loaded.scale[i] = scale_of_weight(p, row, pack);
        }
    }

    // Loads this lane's elements of act's first row.
    __device__ __forceinline__ void load_act_ahead() {
        if constexpr (RESIDENT || AHEAD) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) load_act_pack(0, 0, i);
        }
    }

    __device__ __forceinline__ void widen_resident_act() {
        if constexpr (RESIDENT) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) to_float(act[i], raw_act[i]);
        }
    }

    // Multiplies a stage's rows by act. Stores the group sums in `parts` [STEP][M][GROUPS], or with DIRECT adds the
    // group sums, and stores the sums of the rows or publishes them with `tag`. With COPIED the stage's weights are at
    // `weights` in shared memory. When loaded[s] has been used, the load of row s of stage `next` to loaded[s] is
    // begun.
    __device__ __forceinline__ void multiply(LoadedRow (&loaded)[STEP], const Stage& stage, const Stage& next,
                                             u32 weights, float* parts, u32 tag) {
#pragma unroll
        for (int s0 = 0; s0 < STEP; s0 += TOGETHER) {
            float w[RESIDENT ? 1 : TOGETHER][PACKS][W];
            float scale[TOGETHER][PACKS];
            float sums[VALUES];
            clear(sums);
#pragma unroll
            for (int s = 0; s < TOGETHER; ++s) {
                LoadedRow& row = loaded[s0 + s];
                const int r = s0 + s;
                float (&wide)[PACKS][W] = w[RESIDENT ? 0 : s];
#pragma unroll
                for (int i = 0; i < PACKS; ++i) {
                    if constexpr (COPIED) {
                        u32 word[4];
                        const bool inside = (WHOLE || pack_index(stage.chunk, i) * W < p.columns) &&
                                            (STEP == 1 || r < rows.count - stage.first);
                        const u32 at = weights + r * SLICE + (i * WARPS_A_ROW + column) * 512 + lane * 16;
                        load_copied(word, at, inside);
                        widen<Weight>(wide[i], word);
                    } else {
                        widen<Weight>(wide[i], row.word[i]);
                    }
                    if constexpr (SCALES == Scales::group) scale[s][i] = row.scale[i];
                    if constexpr (RESIDENT) sums[s * PACKS + i] = pack_sum(act[i], wide[i], scale[s][i], act_scale[i]);
                }
                load(row, next, s0 + s);
            }
            if constexpr (DIRECT) {
                put(sums, stage.first + s0, tag);
            } else if constexpr (RESIDENT) {
                deposit(sums, s0, 0, parts);
            } else {
#pragma unroll 1
                for (int m = 0; m < M; ++m) {
#pragma unroll
                    for (int i = 0; i < PACKS; ++i) {
                        const bool inside = pack_index(stage.chunk, i) * W < p.columns;
                        float a[W];
                        if constexpr (!AHEAD) load_act_pack(stage.chunk, m, i);
                        const float of_act = act_scale[i];
                        to_float(a, raw_act[i]);
                        if constexpr (AHEAD) load_act_pack(stage.chunk, m + 1 < M ? m + 1 : 0, i);
#pragma unroll
                        for (int s = 0; s < TOGETHER; ++s) {
                            sums[s * PACKS + i] = inside ? pack_sum(a, w[s][i], scale[s][i], of_act) : 0.0f;
                        }
                    }
                    deposit(sums, s0, m, parts);
                }
            }
        }
    }

private:
    __device__ __forceinline__ int pack_index(int chunk, int i) const {
        return ((CHUNKED ? chunk * GROUPS : 0) + i * WARPS_A_ROW + column) * 32 + lane;
    }

    __device__ __forceinline__ void load_act_pack(int chunk, int m, int i) {
        load_act(raw_act[i], p, m, pack_index(chunk, i));
        act_scale[i] = scale_of_act(p, m, pack_index(chunk, i));
    }

    static __device__ __forceinline__ void load_copied(u32 (&word)[4], u32 at, bool wanted) {
        if constexpr (WHOLE && STEP == 1) {
            ptx::load_shared_v4(word, at);
        } else {
            clear(word);
            ptx::load_shared_v4_if(wanted, word, at);
        }
    }

    __device__ __forceinline__ void deposit(float (&sums)[VALUES], int s0, int m, float* parts) const {
        const float total = butterfly_sums(sums, lane);
        const int value = lane / (32 / VALUES);
        if (lane % (32 / VALUES) == 0 && value < SUMS) {
            const int r = s0 + value / PACKS;
            parts[(r * M + m) * GROUPS + value % PACKS * WARPS_A_ROW + column] = total;
        }
    }

    // Adds the group sums of rows, and stores or publishes the sums of the rows. In a butterfly over 32 lanes, the
    // lanes without a group would only add zeros. So a butterfly with fewer steps gives the same bits.
    __device__ __forceinline__ void put(float (&sums)[VALUES], int first, u32 tag) const {
        constexpr int LANES = 32 / VALUES;  // lanes that have the same value
        float total = __fadd_rn(0.0f, butterfly_sums(sums, lane));
#pragma unroll
        for (int mask = PACKS / 2 * LANES; mask >= LANES; mask /= 2) {
            total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, mask));
        }
        const int r = first + lane / (PACKS * LANES);
        if (lane % (PACKS * LANES) == 0 && lane / LANES < SUMS && r < rows.count) results.put(r, 0, total, tag);
    }

    const GemvParams& p;
    const Rows& rows;
    const Results& results;
    const int lane, column;
    Pack<Act, W> raw_act[PACKS];
    float act_scale[PACKS];
    float act[RESIDENT ? PACKS : 1][W];
};
