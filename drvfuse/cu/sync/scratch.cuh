// SPDX-License-Identifier: Apache-2.0
// The workspace of an op on one device, by which its blocks wait for one another with a time-out.
//
// `epoch` numbers the launches. Words by which blocks exchange values contain the epoch, so nothing is reset between
// launches, and a workspace that was zeroed once serves any number of launches in stream order. The epoch skips 0 when
// it wraps, since words that were never written contain 0. A word would be mistaken for a word of the current launch
// only if it was written 2^32 - 1 launches ago and not overwritten since. `users` is the number of running launches, at
// most one.
//
// Failure. A wait is bounded by `timeout_ns` of %globaltimer, read at most once in 64 polls, and ends early when the
// abort word is set. The first thread that gives up writes the report, in pinned host memory, and sets the abort word.
// A thread that gives up continues to its block's next barrier, which informs the block. Launches that find the abort
// word set wait for nothing, until the host has zeroed the workspace. If the host has read the report, these launches
// write it again.
#pragma once
#include "common/faults.cuh"
#include "ptx/ordered.cuh"
#include "ptx/special.cuh"

// The words at offset 0 of a workspace.
struct ScratchState {
    u32 epoch;     // the number of the last launch that has finished
    u32 abort;     // 1: a launch has given up, and later launches wait for nothing
    u32 reporter;  // 1: a thread has written, or is writing, the report
    u32 users;     // the number of running launches
};

// The report of a launch that has failed. drvfuse/ops/call/scratch.py reads this definition. `magic` is written last.
struct ScratchReport {
    u32 reason;    // GAVE_UP, IN_USE, NOT_ZEROED, or a reason that only the op uses
    u32 block;     // the block that reports
    u32 peer;      // the block for whose word it waited
    u32 expected;  // the awaited epoch
    u32 seen;      // the epoch that was read last
    u32 unused;    // padding to a multiple of 8 bytes
    u64 state;     // the workspace's address
    u32 magic;     // SCRATCH_MAGIC: the report is complete
};

constexpr u32 SCRATCH_MAGIC = 0x44525653;
constexpr u32 GAVE_UP = 1;     // a wait has timed out
constexpr u32 IN_USE = 2;      // another launch used the workspace at the same time
constexpr u32 NOT_ZEROED = 3;  // the workspace was not zeroed after a launch had given up

// The part of a kernel's parameters that describes its workspace.
struct Scratch {
    ScratchState* state;    // the workspace
    ScratchReport* report;  // the report, in pinned host memory
    u64 timeout_ns;         // the bound of a wait
};

// Writes the report. The members of ScratchReport describe the arguments; `awaited` becomes `peer`.
__device__ __forceinline__ void write_report(const Scratch& scratch, u32 reason, u32 awaited, u32 expected, u32 seen) {
    ScratchReport* report = scratch.report;
    report->reason = reason;
    report->block = blockIdx.x;
    report->peer = awaited;
    report->expected = expected;
    report->seen = seen;
    report->state = reinterpret_cast<u64>(scratch.state);
    ptx::fence_sys();
    ptx::store_relaxed_sys(&report->magic, SCRATCH_MAGIC);
}

// Writes the report and sets the abort word, if no other thread has done so.
__device__ __forceinline__ void give_up(const Scratch& scratch, u32 reason, u32 awaited, u32 expected, u32 seen) {
    if (atomicCAS(&scratch.state->reporter, 0u, 1u) != 0) return;
    write_report(scratch, reason, awaited, expected, seen);
    ptx::store_relaxed_gpu(&scratch.state->abort, 1);
}

// Called by one thread of a launch that has found the abort word set. Writes the report again if the host has read it.
__device__ __forceinline__ void report_abort(const Scratch& scratch) {
    if (ptx::load_relaxed_sys(&scratch.report->magic) == 0) write_report(scratch, NOT_ZEROED, 0, 0, 0);
}

// The epoch of the launch after the launch with `epoch`.
__device__ __forceinline__ u32 next_epoch(u32 epoch) { return epoch == 0xffffffffu ? 1u : epoch + 1; }

// Bounds the wait of one thread for words of this epoch. With `longer` the bound is an eighth larger: for waits for a
// block that itself waits for others. So waits for a block that never arrives end first, and the report names that
// block.
class Patience {
public:
    __device__ __forceinline__ explicit Patience(const Scratch& scratch, bool longer = false)
        : scratch_(scratch), polls_(0), start_(0), longer_(longer) {}

    // Called after a poll that read `seen`, where block `awaited` will store `expected`. Returns false after the
    // time-out, or if the abort word is set.
    __device__ __forceinline__ bool goes_on(u32 awaited, u32 expected, u32 seen) {
        ++polls_;
        if (polls_ % 16 == 0 && ptx::load_relaxed_gpu(&scratch_.state->abort) != 0) return false;
        if (polls_ % 64 == 0) {
            const u64 now = ptx::nanoseconds();
            if (start_ == 0) {
                start_ = now;
            } else if (now - start_ > scratch_.timeout_ns + (longer_ ? scratch_.timeout_ns / 8 : 0)) {
                give_up(scratch_, GAVE_UP, awaited, expected, seen);
                return false;
            }
        }
        return true;
    }

private:
    const Scratch& scratch_;
    u32 polls_;
    u64 start_;
    bool longer_;
};

// A launch's use of the workspace. Every thread makes such an object, after wait_for_producer(). From then on the
// workspace counts as in use. If `wanted` is false, the launch does not access the workspace.
class ScratchUse {
public:
    __device__ __forceinline__ explicit ScratchUse(const Scratch& scratch, bool wanted = true)
        : scratch_(scratch), previous_(0), aborted_(0), users_(0) {
        if (!wanted) return;
        ptx::load_relaxed_gpu_v2(previous_, aborted_, scratch.state);
        // In place of atomicAdd(), with which the compiler would wait here for the result, to pass it to the other
        // lanes.
        if (leads()) users_ = ptx::increment_relaxed_gpu(&scratch.state->users);
    }

    // The epoch in this launch's words. The first call waits for a load of the workspace, so issue other loads before
    // it.
    __device__ __forceinline__ u32 epoch() const { return next_epoch(previous_); }

    // Whether an earlier launch gave up. Then this launch must not wait for other blocks.
    __device__ __forceinline__ bool aborted() const { return aborted_ != 0; }

    // A block barrier, called by all threads of the block after their waits. Returns false to all if the wait of one of
    // them has `failed`.
    __device__ __forceinline__ bool met(bool failed) {
        if (leads() && aborted_ != 0) report_abort(scratch_);
        return FAULT("no-block-barrier-after-grid-spin") ? !failed : !__syncthreads_or(failed);
    }

    // The number of launches that were running when this launch began. Only the leading thread has this number.
    __device__ __forceinline__ u32 users() const { return users_; }

    // Ends this launch's use of the workspace. Called once, when every block has read the epoch. Writes a report if
    // another launch was using the workspace when this launch began. This is tested here and not at the start, where
    // the launch would have to wait for the old value of `users`.
    __device__ __forceinline__ void finish() { finish(epoch(), users_); }

    // As finish(), for a kernel that keeps the epoch and the number of users elsewhere, to save registers.
    __device__ __forceinline__ void finish(u32 epoch, u32 users) {
        if (!leads()) return;
        ptx::store_relaxed_gpu(&scratch_.state->epoch, epoch);
        atomicSub(&scratch_.state->users, 1u);
        if (users != 0) give_up(scratch_, IN_USE, 0, epoch, users);
    }

private:
    __device__ __forceinline__ bool leads() const { return blockIdx.x == 0 && threadIdx.x == 0; }

    const Scratch& scratch_;
    u32 previous_;  // the epoch that the workspace had when this launch began
    u32 aborted_;   // the abort word when this launch began
    u32 users_;     // launches that were running when this launch began; only the leading thread has this number
};
