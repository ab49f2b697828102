// SPDX-License-Identifier: Apache-2.0
// Rows of the weight that all blocks share, so that none has a row more than others (cu/gemv/gemv_partial_norm.cu).
//
// Where the rows are no multiple of the blocks, the last shared_rows of them are cut into their groups of 32 packs, which the
// warps that finish in the last block share out in the others, where they have nothing else to do: early in the launch,
// beside the first rows of the block. A group's sum is what it is elsewhere, and the sums of a row are added in the same
// order by the warp that counts the last of them: nobody waits.
//
// Memory ordering. A lane stores its sums of a group for all rows of act, then increments the row's counter by atom.acq_rel:
// the release makes the sums visible to whoever sees this count or a later one. The warp that sees the last has acquired
// all of them, in lane 0, and the other lanes by the __syncwarp() behind it. It sets the counter to 0, for the next launch,
// which reads it after this one's end. So counters are 0 between launches of any shape; they stand in front of the words.
#pragma once
#include "gemv/packs.cuh"
#include "gemv/result.cuh"
#include "common/reduce.cuh"

class SharedRows {
public:
    __device__ __forceinline__ SharedRows(const GemvParams& params, const Results& results_of_block)
        : p(params), results(results_of_block), lane(threadIdx.x % 32),
          first(params.n_normed + params.n_unnormed - params.shared_rows),
          counters(reinterpret_cast<u32*>(params.words) - MOST_SHARED_ROWS),
          sums(reinterpret_cast<u32*>(params.words + i64(M) * params.padded)) {}

    // By the warps that do not finish, after the wait for the producer.
    __device__ __forceinline__ void add() const {
        const int blocks = gridDim.x - (p.n_normed != 0), warp = (threadIdx.x - FIRST_NORM_THREAD) / 32;
#pragma unroll 1
        for (int unit = warp * blocks + blockIdx.x; unit < p.shared_rows * p.groups; unit += NORM_WARPS * M * blocks) {
            const int r = unit / p.groups;
            add_group(r, unit % p.groups);
            u32 before = 0;
            if (lane == 0) before = count(r);
            before = __shfl_sync(0xffffffffu, before, 0);
            __syncwarp();
            if (before + 1 == p.groups) add_row(r);
        }
    }

private:
    __device__ __forceinline__ u32 count(int r) const {
        return FAULT("gemv-shared-sums-counted-relaxed") ? ptx::increment_relaxed_gpu(counters + r)
                                                         : ptx::increment_acq_rel_gpu(counters + r);
    }

    __device__ __forceinline__ u32* sum_of(int r, int m, int group) const {
        return sums + (i64(m) * p.shared_rows + r) * p.groups + group;
    }

    __device__ __forceinline__ void add_group(int r, int group) const {
        const i64 row = first + r;
        const int pack = group * 32 + lane, valid = p.columns * int(sizeof(Weight)) - pack * 16;
        u32 word[4] = {};
        float w[W];
        load_weight(word, reinterpret_cast<const char*>(p.weight) + row * p.weight_step + i64(pack) * 16, valid > 0,
                    valid);
        const float scale = scale_of_weight(p, row, pack);
        widen<Weight>(w, word);
#pragma unroll 1
        for (int m = 0; m < M; ++m) {
            Pack<Act, W> packed;
            float a[W];
            load_act(packed, p, m, pack);
            to_float(a, packed);
            const float sum = valid > 0 ? pack_sum(a, w, scale, scale_of_act(p, m, pack)) : 0.0f;
            const float total = butterfly_sum(sum);
            if (lane == 0) ptx::store_u32(sum_of(r, m, group), __float_as_uint(total));
        }
    }

    __device__ __forceinline__ void add_row(int r) const {
        const int row = first + r;
        const bool normed = row < p.n_normed;
        const u32 tag = normed ? next_epoch(ptx::load_relaxed_gpu(&p.scratch.state->epoch)) : 0;
#pragma unroll 1
        for (int m = 0; m < M; ++m) {
            float sum = 0.0f;
            for (int group = lane; group < p.groups; group += 32) {
                sum = __fadd_rn(sum, __uint_as_float(ptx::load_u32(sum_of(r, m, group))));
            }
            const float total = butterfly_sum(sum);
            if (lane == 0) results.put(row, normed, m, total, tag);
        }
        if (lane == 0) ptx::store_relaxed_gpu(counters + r, 0u);
    }

    const GemvParams& p;
    const Results& results;
    const int lane, first;
    u32* const counters;
    u32* const sums;  // [M][shared_rows][groups]
};
