// SPDX-License-Identifier: Apache-2.0
// Complete sums of rows of the weight from their group sums, by one warp, as cu/gemv/gemv_partial_norm.cu defines them.
#pragma once
#include "gemv/pipeline.cuh"
#include "gemv/result.cuh"

class Sums {
public:
    __device__ __forceinline__ Sums(const GemvParams& params, const Rows& rows_of_block,
                                    const Results& results_of_block)
        : p(params), rows(rows_of_block), results(results_of_block), lane(threadIdx.x % 32) {}

    // Adds a stage's group sums, and publishes or stores the sums of the rows that are complete. SUM_LANES lanes add a
    // row's groups: with fewer than 32 groups the other lanes of the butterfly would add zeros.
    __device__ __forceinline__ void add(const Stage& stage, u32 tag, const float* parts) {
        const int groups = p.groups - (CHUNKED ? stage.chunk * GROUPS : 0), part = lane % SUM_LANES;
        const int values = min(rows.count - stage.first, STEP) * M;
#pragma unroll 1
        for (int first = 0; first < VALUES_AT_A_TIME * ROUNDS && first < values; first += VALUES_AT_A_TIME) {
            if (!CHUNKED || stage.chunk == 0) {
                clear(sums);
            }
#pragma unroll
            for (int k = 0; k < TURNS; ++k) {
                const int value = first + k * VALUES_A_TURN + lane / SUM_LANES;
                for (int group = part; group < min(groups, GROUPS); group += 32) {
                    if (value < values) sums[k] = __fadd_rn(sums[k], parts[value * GROUPS + group]);
                }
            }
            if (CHUNKED && stage.chunk + 1 < p.chunks) return;
            float total[TURNS];
#pragma unroll
            for (int k = 0; k < TURNS; ++k) total[k] = sums[k];
#pragma unroll
            for (int mask = SUM_LANES / 2; mask > 0; mask /= 2) {
#pragma unroll
                for (int k = 0; k < TURNS; ++k) {
                    total[k] = __fadd_rn(total[k], __shfl_xor_sync(0xffffffffu, total[k], mask));
                }
            }
#pragma unroll
            for (int k = 0; k < TURNS; ++k) {
                const int value = first + k * VALUES_A_TURN + lane / SUM_LANES;
                if (part == 0 && value < values) results.put(stage.first + value / M, value % M, total[k], tag);
            }
        }
    }

private:
    // A value is the sum of one row of the weight and one row of act. In a turn the warp adds VALUES_A_TURN values of a
    // stage.
    static constexpr int VALUES_A_TURN = 32 / SUM_LANES;
    static constexpr int ALL_TURNS = (STEP * M + VALUES_A_TURN - 1) / VALUES_A_TURN;  // turns of a stage
    static constexpr int TURNS = CHUNKED || ALL_TURNS < 4 ? ALL_TURNS : 4;  // turns whose loads are in flight together
    static constexpr int ROUNDS = (ALL_TURNS + TURNS - 1) / TURNS;
    static constexpr int VALUES_AT_A_TIME = TURNS * VALUES_A_TURN;

    const GemvParams& p;
    const Rows& rows;
    const Results& results;
    const int lane;
    float sums[TURNS];  // [turn]: the groups that the lane has added for its value of the turn
};
