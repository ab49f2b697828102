// SPDX-License-Identifier: Apache-2.0
// A ring of RING slots in shared memory, through which a team loads its rows. Bulk copies fill a slot while earlier
// rows are processed, so the number of bytes in flight is not limited by the number of registers.
//
// A slot holds a whole row: x, the arrays g, then the scales. In global memory each of these parts must be aligned to
// 16 bytes, and its size must be a multiple of 16. Slots are aligned to SLOT_ALIGNMENT bytes, since copies to slots
// that are aligned only to 16 bytes took a tenth longer.
//
// Memory ordering. The team's first thread issues the copies. A copy completes on the slot's mbarrier, and a thread
// reads the slot after it has waited for the mbarrier's phase. A slot is filled again only after a barrier of the team,
// at which all threads have read the slot.
#pragma once
#include "coat/backward_rows.cuh"
#include "sync/mbarrier.cuh"

constexpr int RING = DRVFUSE_RING;  // ring slots of a team; 0: rows are loaded to registers, without a ring
constexpr int SLOT_ALIGNMENT = 128;

class Ring {
public:
    // Bytes of a slot, a multiple of SLOT_ALIGNMENT.
    __device__ static __forceinline__ int slot_bytes(const BackwardParams& p) {
        return (bytes(p) + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
    }

    // Called by all threads of the team, with the team's slots and mbarriers. The thread for which `copies` is true
    // initialises the mbarriers, and later issues the copies.
    __device__ __forceinline__ Ring(const BackwardParams& p, u8* slots, Mbarrier* barriers, bool copies)
        : p_(p), slots_(slots), barriers_(barriers), slot_(0), parity_(0), copies_(copies) {
        if (copies_) {
            for (int i = 0; i < RING; ++i) barriers[i].init(1);
            bulk_copies_from_here();
        }
    }

    // Starts to copy rows first, first + jump, ..., `count` rows in all. All slots must be free.
    __device__ __forceinline__ void begin(i64 first, i64 jump, int count) {
        next_ = first, jump_ = jump, left_ = count;
        if (!copies_) return;
        int slot = slot_;
        for (int i = 0; i < RING; ++i) {
            copy(slot);
            slot = slot + 1 == RING ? 0 : slot + 1;
        }
    }

    // Waits for a row and loads it from its slot to registers: the next row, or the row that is `ahead` (less than
    // RING) rows after the next one.
    __device__ __forceinline__ void take(Row& row, int column, int ahead = 0) const {
        const bool wraps = slot_ + ahead >= RING;
        const int slot = slot_ + ahead - wraps * RING;
        barriers_[slot].wait(parity_ ^ u32(wraps));
        const u8* from = slots_ + slot * slot_bytes(p_);
        const u16* scales = reinterpret_cast<const u16*>(from + columns(p_) * (1 + 2 * GRADIENTS));
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int at = column + i * SPAN;
            Octet& pack = row.pack[i];
            pack.x[0] = pack.x[1] = pack.scale = 0;
            if (FULL || at < columns(p_)) {
                const uint2 x = *reinterpret_cast<const uint2*>(from + at);
                pack.x[0] = x.x, pack.x[1] = x.y;
                pack.scale = scales[at / QB];
            }
#pragma unroll
            for (int k = 0; k < GRADIENTS; ++k) {
                uint4 g = {};
                if (FULL || at < columns(p_)) {
                    g = *reinterpret_cast<const uint4*>(from + columns(p_) * (1 + 2 * k) + 2 * at);
                }
                pack.g[k][0] = g.x, pack.g[k][1] = g.y, pack.g[k][2] = g.z, pack.g[k][3] = g.w;
            }
        }
    }

    // Starts to copy row `next_` to slot `slot_`, whose row is no longer needed, and proceeds to the following slot.
    // Called after a barrier of the team, when all of its threads have read slot `slot_`.
    __device__ __forceinline__ void refill() {
        if (copies_) copy(slot_);
        pass();
    }

    // Proceeds from slot `slot_` to the following slot, without starting a copy.
    __device__ __forceinline__ void pass() {
        if (++slot_ == RING) slot_ = 0, parity_ ^= 1;
    }

private:
    __device__ static __forceinline__ int columns(const BackwardParams& p) { return FULL ? PACKS * SPAN : p.columns; }
    __device__ static __forceinline__ int bytes(const BackwardParams& p) {
        return columns(p) * (1 + 2 * GRADIENTS) + columns(p) / QB * 2;
    }

    // Starts to copy row `next_` to a slot, if the team has such a row.
    __device__ __forceinline__ void copy(int slot) {
        if (left_ <= 0) return;
#if __CUDA_ARCH__ >= 900
        Mbarrier& barrier = barriers_[slot];
        u32 to = u32(__cvta_generic_to_shared(slots_ + slot * slot_bytes(p_)));
        barrier.expect(bytes(p_));
        barrier.copy(to, p_.x + next_ * p_.x_stride, columns(p_));
        to += columns(p_);
#pragma unroll
        for (int k = 0; k < GRADIENTS; ++k) {
            barrier.copy(to, p_.g[k] + next_ * p_.g_stride[k], 2 * columns(p_));
            to += 2 * columns(p_);
        }
        barrier.copy(to, p_.scales + next_ * p_.scale_stride, 2 * (columns(p_) / QB));
#endif
        next_ += jump_, --left_;
    }

    const BackwardParams& p_;
    u8* slots_;           // the ring slots of this team, in shared memory
    Mbarrier* barriers_;  // the mbarrier of each ring slot
    int slot_;            // the slot of the next row that take() reads
    u32 parity_;          // the parity of the phase in which slot `slot_` is filled
    bool copies_;         // whether this thread issues the copies
    i64 next_;            // the next row to copy
    i64 jump_;            // distance between two rows of the team
    int left_;            // rows that are not copied yet
};
