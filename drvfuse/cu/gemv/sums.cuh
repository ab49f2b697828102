// SPDX-License-Identifier: Apache-2.0
// One warp adds the group sums of each row of the weight, in the order that cu/gemv/gemv_partial_norm.cu defines.
#pragma once
#include "gemv/pipeline.cuh"
#include "gemv/result.cuh"

class Sums {
public:
    __device__ __forceinline__ Sums(const GemvParams& params, const Rows& rows_of_block,
                                    const Results& results_of_block)
        : p(params), rows(rows_of_block), results(results_of_block), lane(threadIdx.x % 32) {}

    // Adds a stage's group sums, and publishes or stores the sums of the rows that are complete. Only SUM_LANES lanes
    // add a row's groups: with fewer than 32 groups, the other lanes of a butterfly over 32 lanes would add zeros.
    __device__ __forceinline__ void add(const Stage& stage, u32 tag, const float* parts) {
        const int groups = p.groups - (CHUNKED ? stage.chunk * GROUPS : 0), part = lane % SUM_LANES;
        const int values = min(rows.count - stage.first, STEP) * M;
#pragma unroll 1
        for (int first = 0; first < VALUES_AT_A_TIME * ROUNDS && first < values; first += VALUES_AT_A_TIME) {
            if (!CHUNKED || stage.chunk == 0) {
                clear(sums);
            }
#pragma unroll
            for (int k = 0; k < LANE_VALUES; ++k) {
                const int value = first + k * WARP_VALUES + lane / SUM_LANES;
                for (int group = part; group < min(groups, GROUPS); group += 32) {
                    if (value < values) sums[k] = __fadd_rn(sums[k], parts[value * GROUPS + group]);
                }
            }
            if (CHUNKED && stage.chunk + 1 < p.chunks) return;
            float total[LANE_VALUES];
#pragma unroll
            for (int k = 0; k < LANE_VALUES; ++k) total[k] = sums[k];
#pragma unroll
            for (int mask = SUM_LANES / 2; mask > 0; mask /= 2) {
#pragma unroll
                for (int k = 0; k < LANE_VALUES; ++k) {
                    total[k] = __fadd_rn(total[k], __shfl_xor_sync(0xffffffffu, total[k], mask));
                }
            }
#pragma unroll
            for (int k = 0; k < LANE_VALUES; ++k) {
                const int value = first + k * WARP_VALUES + lane / SUM_LANES;
                if (part == 0 && value < values) results.put(stage.first + value / M, value % M, total[k], tag);
            }
        }
    }

private:
    // A value is the dot product of a row of the weight and a row of act. SUM_LANES lanes add the groups of one value,
    // so the warp computes WARP_VALUES values at once.
    static constexpr int WARP_VALUES = 32 / SUM_LANES;
    static constexpr int ALL_VALUES = (STEP * M + WARP_VALUES - 1) / WARP_VALUES;  // values per lane and stage
    // Values per lane whose loads are in flight together.
    static constexpr int LANE_VALUES = CHUNKED || ALL_VALUES < 4 ? ALL_VALUES : 4;
    static constexpr int ROUNDS = (ALL_VALUES + LANE_VALUES - 1) / LANE_VALUES;
    static constexpr int VALUES_AT_A_TIME = LANE_VALUES * WARP_VALUES;

    const GemvParams& p;
    const Rows& rows;
    const Results& results;
    const int lane;
    float sums[LANE_VALUES];  // [k]: the sum of the groups that this lane has added for its k-th value
};
