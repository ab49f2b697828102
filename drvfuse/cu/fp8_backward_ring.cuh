// SPDX-License-Identifier: Apache-2.0
// A team's rows on their way through shared memory: RING slots, each filled by bulk copies while the rows before it are
// worked at, so that what is in flight does not depend on registers.
//
// A slot has a row's x, its g one after another, and its scales, whole: all of them must be on 16 bytes and of a multiple
// of 16 bytes. The team's first thread copies. A slot is filled again behind the barrier of the row that was read from it.
#pragma once
#include "bulk_copy.cuh"
#include "fp8_backward_rows.cuh"

class Ring {
public:
    // By all threads of the team; `slots` and `barriers` are the team's own.
    __device__ __forceinline__ Ring(const BackwardParams& p, u8* slots, u64* barriers, bool copies)
        : p_(p), slots_(slots), barriers_(barriers), slot_(0), parity_(0), copies_(copies) {
        if (copies_) {
            for (int i = 0; i < RING; ++i) make_arrivals(barriers + i);
            arrivals_are_made();
        }
    }

    // Starts on `count` rows, the first of which is `first`, the others `jump` apart. All slots must be free.
    __device__ __forceinline__ void begin(i64 first, i64 jump, int count) {
        next_ = first, jump_ = jump, left_ = count;
        if (!copies_) return;
        int slot = slot_;
        for (int i = 0; i < RING; ++i) {
            copy(slot);
            slot = slot + 1 == RING ? 0 : slot + 1;
        }
    }

    // The next row, in registers.
    __device__ __forceinline__ void take(Row& row, int column) const {
        await_bytes(barriers_ + slot_, parity_);
        const u8* from = slots_ + slot_ * bytes();
        const u16* scales = reinterpret_cast<const u16*>(from + columns() * (1 + 2 * GRADIENTS));
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int at = column + i * SPAN;
            row.x[i][0] = row.x[i][1] = row.scale[i] = 0;
            if (FULL || at < columns()) {
                const uint2 x = *reinterpret_cast<const uint2*>(from + at);
                row.x[i][0] = x.x, row.x[i][1] = x.y;
                row.scale[i] = scales[at / QB];
            }
#pragma unroll
            for (int k = 0; k < GRADIENTS; ++k) {
                uint4 g = {};
                if (FULL || at < columns()) {
                    g = *reinterpret_cast<const uint4*>(from + columns() * (1 + 2 * k) + 2 * at);
                }
                row.g[k][i][0] = g.x, row.g[k][i][1] = g.y, row.g[k][i][2] = g.z, row.g[k][i][3] = g.w;
            }
        }
    }

    // Behind a barrier of the team, when all of it have taken the row: fills its slot with a later one.
    __device__ __forceinline__ void refill() {
        if (copies_) copy(slot_);
        if (++slot_ == RING) slot_ = 0, parity_ ^= 1;
    }

private:
    __device__ __forceinline__ int columns() const { return FULL ? PACKS * SPAN : p_.columns; }
    __device__ __forceinline__ int bytes() const { return columns() * (1 + 2 * GRADIENTS) + columns() / QB * 2; }

    __device__ __forceinline__ void copy(int slot) {
        if (left_ <= 0) return;
        u64* barrier = barriers_ + slot;
        u8* to = slots_ + slot * bytes();
        expect_bytes(barrier, bytes());
        copy_bytes(to, p_.x + next_ * p_.x_stride, columns(), barrier);
        to += columns();
#pragma unroll
        for (int k = 0; k < GRADIENTS; ++k) {
            copy_bytes(to, p_.g[k] + next_ * p_.g_stride[k], 2 * columns(), barrier);
            to += 2 * columns();
        }
        copy_bytes(to, p_.scales + next_ * p_.scale_stride, 2 * (columns() / QB), barrier);
        next_ += jump_, --left_;
    }

    const BackwardParams& p_;
    u8* slots_;
    u64* barriers_;
    int slot_;
    u32 parity_;
    bool copies_;
    i64 next_, jump_;
    int left_;
};
