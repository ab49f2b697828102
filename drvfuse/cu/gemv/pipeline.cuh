// SPDX-License-Identifier: Apache-2.0
// The stages of cu/gemv/gemv_partial_norm.cu: some rows of the weight each, or a chunk of them.
//
// STAGES of them are under way. A stage has one of SLOTS places for its group sums, and with COPIED one for its weights, in
// a ring in shared memory that the copy engine writes; else the warps that multiply load weights to registers. TEAMS of warps
// take turns at stages, and so do SUM_WARPS warps: such a warp begins stages, and sums those that are done:
//
//     it begins a stage         -> full[slot]   the stage's weights are there, and its group sums may be written
//     a team multiplies it      -> done[slot]   the group sums are written, and the weights read
//
// When the weights of stage s are there, the warp whose turn s is begins stage s + STAGES, so that as many bytes are under way
// whether or not the products keep up, then waits until s is done, and sums it. SLOTS is more than STAGES, and it and STAGES are
// multiples of SUM_WARPS: the warp begins and sums all stages of a slot, and begins one when it has summed the one before. That
// is done, so its weights are read, and summed, so its group sums are.
//
// Invariant: a waiter is at most one phase from its mbarrier, so the parity is unambiguous. A waiter cannot fall two phases
// behind: the next phase of full[slot] begins only after its warp has seen done[slot], at which all warps of the team arrive
// behind their wait for full[slot]; and the next phase of done[slot] begins only with the next stage in the slot. A waiter cannot
// run ahead, where its wait would return at once: SLOTS is a multiple of TEAMS too, so whoever waits for a stage of a slot, of
// either kind, has waited for the stage before it.
#pragma once
#include "gemv/params.cuh"
#include "sync/mbarrier.cuh"

struct Stage {
    int index, first, chunk;  // its first row in the block

    static __device__ __forceinline__ Stage at(int index, const GemvParams& p) {
        return CHUNKED ? Stage{index, index / p.chunks * STEP, index % p.chunks} : Stage{index, index * STEP, 0};
    }

    __device__ __forceinline__ int slot() const { return index % SLOTS; }
    __device__ __forceinline__ u32 parity() const { return index / SLOTS % 2; }
};

// The addresses of a stage's weights and of its group sums.
__device__ __forceinline__ int weights_slot(const Stage& stage) {
    return FAULT("gemv-copy-over-weights-in-use") ? stage.index % STAGES : stage.slot();
}
__device__ __forceinline__ int sums_slot(const Stage& stage) {
    return FAULT("gemv-sums-without-spare-slots") ? stage.index % STAGES : stage.slot();
}

struct Pipeline {
    Mbarrier full[SLOTS], done[SLOTS];
    Mbarrier epoch_read;  // `tag` is written
    Mbarrier published;   // enough of the block's sums are for the last block to poll
    u32 tag;

    // By one thread, before a __syncthreads().
    __device__ __forceinline__ void init() {
        for (int i = 0; i < SLOTS; ++i) {
            full[i].init(1);
            done[i].init(WARPS_A_ROW);
        }
        epoch_read.init(1);
        published.init(DIRECT ? PRODUCT_WARPS : SUM_WARPS);
        if constexpr (COPIED) bulk_copies_from_here();
    }

    // By one thread of a block with normed rows: the launch number that their words carry.
    __device__ __forceinline__ void tell(u32 epoch) {
        tag = next_epoch(epoch) + (FAULT("block-3-of-another-launch") && blockIdx.x == 3);
        epoch_read.arrive();
    }

    // By one warp. `ring` is the address in shared memory of SLOTS x STEP x SLICE bytes.
    __device__ __forceinline__ void begin(const Stage& stage, const GemvParams& p, const Rows& rows, u32 ring) {
        Mbarrier& barrier = full[stage.slot()];
        const int lane = threadIdx.x % 32;
        const int count = min(rows.count - stage.first, STEP);
        if (count <= 0) return;
        __syncwarp();  // all lanes have read the group sums that may be written behind this
        if constexpr (!COPIED) {
            if (lane == 0) barrier.arrive();
        } else {
#if __CUDA_ARCH__ >= 900
            const u32 offset = CHUNKED ? stage.chunk * SLICE : 0;
            const u32 bytes = min(u32(SLICE), u32(p.columns) * u32(sizeof(Weight)) - offset);
            if (lane == 0) barrier.expect(count * bytes);
            __syncwarp();
            for (int r = lane; r < count; r += 32) {
                const char* row =
                    reinterpret_cast<const char*>(p.weight) + u64(u32(rows[stage.first + r])) * u32(p.weight_step);
                barrier.copy_once(ring + (weights_slot(stage) * STEP + r) * SLICE, row + offset, bytes);
            }
#endif
        }
    }
};
