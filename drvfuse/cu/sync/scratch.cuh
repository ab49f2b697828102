// SPDX-License-Identifier: Apache-2.0
// The workspace of an op on one device: what its blocks need to wait for one another, for a bounded time.
//
// `epoch` numbers the launches; words that blocks leave for one another carry it, so nothing is reset between launches,
// and a workspace that was zeroed once serves any number of them in stream order. It wraps past 0, which words that were
// never written carry: a word that the launch 2^32 - 1 before this one has written, and none since, would be taken for
// this one's. `users` is the number of launches at work, which must never be two.
//
// Failure. A wait is bounded by `timeout_ns` of %globaltimer, read at most once in 64 polls, and ends early when the abort
// word is set. The first thread to give up writes the report, in pinned host memory, and sets the abort word. A thread
// that gives up goes on to its block's next barrier, where the block learns of it. Launches that find the abort word
// wait for nothing, until the host has zeroed the workspace; those that find the report read say so again.
#pragma once
#include "common/faults.cuh"
#include "ptx/ordered.cuh"
#include "ptx/special.cuh"

struct ScratchState {
    u32 epoch, abort, reporter, users;
};

// ops/call/scratch.py has the same layout. `magic` is written last.
struct ScratchReport {
    u32 reason;
    u32 block, peer;     // `block` waited for what block `peer` should have left
    u32 expected, seen;  // epochs
    u32 unused;
    u64 state;  // the workspace's address
    u32 magic;
};

constexpr u32 SCRATCH_MAGIC = 0x44525653;
constexpr u32 GAVE_UP = 1, IN_USE = 2, NOT_ZEROED = 3;

struct Scratch {
    ScratchState* state;
    ScratchReport* report;
    u64 timeout_ns;
};

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

__device__ __forceinline__ void give_up(const Scratch& scratch, u32 reason, u32 awaited, u32 expected, u32 seen) {
    if (atomicCAS(&scratch.state->reporter, 0u, 1u) != 0) return;
    write_report(scratch, reason, awaited, expected, seen);
    ptx::store_relaxed_gpu(&scratch.state->abort, 1);
}

// Called by one thread of a launch that has found the abort word set: writes the report again if the host has already
// read it.
__device__ __forceinline__ void report_abort(const Scratch& scratch) {
    if (ptx::load_relaxed_sys(&scratch.report->magic) == 0) write_report(scratch, NOT_ZEROED, 0, 0, 0);
}

// The epoch of the launch after that of `epoch`.
__device__ __forceinline__ u32 next_epoch(u32 epoch) { return epoch == 0xffffffffu ? 1u : epoch + 1; }

// The wait of one thread for words of this epoch. One for a block that itself waits for others is `longer`, by an eighth,
// so that those name the block that is missing.
class Patience {
public:
    __device__ __forceinline__ explicit Patience(const Scratch& scratch, bool longer = false)
        : scratch_(scratch), polls_(0), start_(0), longer_(longer) {}

    // Called after a poll that read `seen` where block `awaited` should store `expected`: false if the wait has timed
    // out.
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

// Every thread, once, after wait_for_producer(): the workspace's words, which marks it as in use. With `wanted` false
// the launch does not touch the workspace.
class ScratchUse {
public:
    __device__ __forceinline__ explicit ScratchUse(const Scratch& scratch, bool wanted = true)
        : scratch_(scratch), previous_(0), aborted_(0), users_(0) {
        if (!wanted) return;
        ptx::load_relaxed_gpu_v2(previous_, aborted_, scratch.state);
        // atomicAdd would wait for its result here, which it passes to the other lanes.
        if (leads()) users_ = ptx::increment_relaxed_gpu(&scratch.state->users);
    }

    // What this launch's words carry. The first call waits for the workspace, so other loads should be under way.
    __device__ __forceinline__ u32 epoch() const { return next_epoch(previous_); }

    // Whether an earlier launch gave up, so that nothing may be waited for.
    __device__ __forceinline__ bool aborted() const { return aborted_ != 0; }

    // All threads of the block, after their waits, a block barrier: false for all if one of them failed.
    __device__ __forceinline__ bool met(bool failed) {
        if (leads() && aborted_ != 0) report_abort(scratch_);
        return FAULT("no-block-barrier-after-grid-spin") ? !failed : !__syncthreads_or(failed);
    }

    // In the leading thread, how many launches were at work when this one began.
    __device__ __forceinline__ u32 users() const { return users_; }

    // Once, when every block has read the epoch. Says so if another launch was at work when this one began: only here,
    // since waiting for that word at the start would delay the launch.
    __device__ __forceinline__ void finish() { finish(epoch(), users_); }

    // The same for a kernel that lacks registers for these numbers, so that its leading thread has stored them
    // elsewhere.
    __device__ __forceinline__ void finish(u32 epoch, u32 users) {
        if (!leads()) return;
        ptx::store_relaxed_gpu(&scratch_.state->epoch, epoch);
        atomicSub(&scratch_.state->users, 1u);
        if (users != 0) give_up(scratch_, IN_USE, 0, epoch, users);
    }

private:
    __device__ __forceinline__ bool leads() const { return blockIdx.x == 0 && threadIdx.x == 0; }

    const Scratch& scratch_;
    u32 previous_, aborted_, users_;
};
