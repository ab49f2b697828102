// SPDX-License-Identifier: Apache-2.0
// The stages of cu/gemv/gemv_partial_norm.cu. A stage is some rows of the weight, or a chunk of these rows.
//
// STAGES stages are in flight. A stage uses one of SLOTS slots. A slot has room for the stage's group sums, and with
// COPIED for its weights, in a ring in shared memory that bulk copies fill. Otherwise the warps that multiply load
// weights to registers. Team s % TEAMS multiplies stage s. Sum warp s % SUM_WARPS begins stage s and adds its group
// sums. A slot has two barriers:
//
//     a sum warp begins a stage -> full[slot]   the stage's weights have arrived, and its group sums may be written
//     a team multiplies it      -> done[slot]   the group sums are written, and the weights were read
//
// When the weights of stage s have arrived, the sum warp of stage s begins stage s + STAGES, so that the number of
// bytes in flight does not depend on the speed of the products. Then it waits until stage s is done, and adds its group
// sums. SLOTS is greater than STAGES, and both are multiples of SUM_WARPS. So all stages of a slot are begun and added
// by one warp. The warp begins a stage only after it has added the slot's previous stage, so the weights and the group
// sums of the previous stage have been read by then.
//
// Invariant: a warp waits for the current phase of an mbarrier or for the phase before it, so the parity is
// unambiguous. The warp cannot wait for an older phase: the next phase of full[slot] begins only after the sum warp has
// seen done[slot], at which all warps of the team arrive after their wait for full[slot]; and the next phase of
// done[slot] begins only with the next stage in the slot. The warp cannot wait for a later phase, which would make its
// wait return at once: SLOTS is also a multiple of TEAMS, so each warp that waits for a stage of a slot, at full[slot]
// or done[slot], has waited at this mbarrier for the slot's previous stage.
#pragma once
#include "gemv/params.cuh"
#include "sync/mbarrier.cuh"

struct Stage {
    int index;  // the index of the stage in the block
    int first;  // the first row of the stage, as a row of the block
    int chunk;  // which chunk of its rows the stage is, from 0

    static __device__ __forceinline__ Stage at(int index, const GemvParams& p) {
        return CHUNKED ? Stage{index, index / p.chunks * STEP, index % p.chunks} : Stage{index, index * STEP, 0};
    }

    __device__ __forceinline__ int slot() const { return index % SLOTS; }
    __device__ __forceinline__ u32 parity() const { return index / SLOTS % 2; }
};

// The slots of a stage's weights and of its group sums: stage.slot(), except with a planted fault.
__device__ __forceinline__ int weights_slot(const Stage& stage) {
    return FAULT("gemv-copy-over-weights-in-use") ? stage.index % STAGES : stage.slot();
}
__device__ __forceinline__ int sums_slot(const Stage& stage) {
    return FAULT("gemv-sums-without-spare-slots") ? stage.index % STAGES : stage.slot();
}

struct Pipeline {
    Mbarrier full[SLOTS], done[SLOTS];  // the two barriers of each slot
    Mbarrier epoch_read;                // its phase ends when `tag` is written
    Mbarrier published;                 // its phase ends when this block has published its first `polled_from` rows
    u32 tag;                            // the tag of this block's published words, valid once epoch_read's phase ends

    // Initialises the mbarriers. Called by one thread, before a __syncthreads().
    __device__ __forceinline__ void init() {
        for (int i = 0; i < SLOTS; ++i) {
            full[i].init(1);
            done[i].init(WARPS_A_ROW);
        }
        epoch_read.init(1);
        published.init(DIRECT ? PRODUCT_WARPS : SUM_WARPS);
        if constexpr (COPIED) bulk_copies_from_here();
    }

    // Sets the tag of the block's words to the epoch after `epoch`. Called by one thread of a block with normed rows.
    __device__ __forceinline__ void set_tag(u32 epoch) {
        tag = next_epoch(epoch) + (FAULT("block-3-of-another-launch") && blockIdx.x == 3);
        epoch_read.arrive();
    }

    // Begins a stage: if COPIED, starts the copies of its weights; otherwise only arrives at full[slot], which says
    // that the slot is free. Called by one warp. `ring` is the address in shared memory of the ring, SLOTS x STEP x
    // SLICE bytes.
    __device__ __forceinline__ void begin(const Stage& stage, const GemvParams& p, const Rows& rows, u32 ring) {
        Mbarrier& barrier = full[stage.slot()];
        const int lane = threadIdx.x % 32;
        const int count = min(rows.count - stage.first, STEP);
        if (count <= 0) return;
        __syncwarp();  // all lanes have read the group sums, which may be overwritten from here on
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
