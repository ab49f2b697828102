// SPDX-License-Identifier: Apache-2.0
// The barrier between the blocks with one index on all ranks, its bound in time, and what happens at the bound.
//
// State, in each rank's workspace: `epoch`, the number of barriers all calls before this one had; flags[block][peer],
// written by that peer alone with the ordinal of the last barrier it arrived at. Ordinals are epoch + 1, 2, ... and
// never decrease, so nothing is reset between calls, a grid may change from call to call, and a graph replays
// unchanged.
//
// Ordering. Thread t < ranks releases (st.release.sys) the ordinal into peer t's flag and acquires (ld.acquire.sys) its
// own flag of peer t. `publish` puts a block barrier before the release, so that what any thread of this block did
// before (stores to be read by peers, loads of what peers will overwrite) happens before the release by cumulativity;
// the block barrier after the acquire hands the peers' writes to every thread of the block. Together: all that the
// paired blocks did before their arrival happens before all that this block does afterwards. A start barrier needs no
// `publish`: what it guards was done by earlier kernels of the stream.
//
// Aliases. With Aliases the ranks' kernels access memory by its own address and by a multicast address. Two accesses of
// which one precedes the other are ordered by that only if a fence.proxy.alias stands on the way between them. Every
// way from what precedes a barrier to what follows it passes a thread that releases a flag, so these execute the fence
// right before: after the block barrier of `publish`, or, at a start barrier, after the wait for the producer.
//
// Progress needs the blocks with one index to be resident together; devices place blocks in index order.
//
// Calls that differ between ranks are found here too (calls.cuh). A barrier that is told to `publish`, any but the start
// barrier, also waits for the peers' words.
//
// Failure. A wait is bounded by `timeout_ns` of %globaltimer, read once in 1024 polls, and ends early when this rank's
// abort word is set. The first thread of a rank to give up writes the report and sets the abort word of every rank. A
// thread that gives up goes on to the block barrier, and the whole block learns of it there: `arrive_and_wait` is false
// for every thread or for none. The caller then skips its work. The abort word stays set until the host clears it.
#pragma once
#include "common/faults.cuh"
#include "ptx/multimem.cuh"
#include "ptx/ordered.cuh"
#include "ptx/special.cuh"
#include "sync/calls.cuh"
#include "sync/flags.cuh"
#include "sync/workspace.cuh"
#include "trace/trace.cuh"

template <int Ranks, bool Aliases = false>
class Barrier {
public:
    // After wait_for_producer(); every thread of the block. Reads the workspace's state.
    __device__ __forceinline__ Barrier(const Call& call, Trace& trace)
        : call_(call), trace_(trace), calls_(call), ordinal_(0), epoch_(0) {
        char* own = call.workspaces[call.rank];
        aborted_ = false;
        if (threadIdx.x < Ranks) {
            epoch_ = *epoch_word(own) / EPOCH_UNIT;
            if (!FAULT("abort-not-read-at-entry")) aborted_ = ptx::load_relaxed_sys(abort_word(own)) != 0;
        }
        calls_.start();
    }

    // All threads of the block. False, for all of them, if the call is aborted; then nothing may be assumed of peers.
    __device__ __forceinline__ bool arrive_and_wait(bool publish) {
        const bool unordered = FAULT("no-block-barrier-before-release") ||
                               (FAULT("no-block-barrier-before-even-releases") && ordinal_ % 2 == 1);
        if (FAULT("fence-before-relaxed-flag")) __threadfence_system();
        if (publish && !unordered) __syncthreads();
        if (publish) trace_.lap(TraceRole::sync);
        ++ordinal_;
        u64 met = 0;
        if (threadIdx.x < Ranks && !aborted_) {
            if constexpr (Aliases && !FAULT("multimem-no-alias-fence")) ptx::fence_aliases();
            set_flag(flag_word(call_.workspaces[threadIdx.x], blockIdx.x, call_.rank), epoch_ + ordinal_);
        }
        if (!publish) calls_.tell();  // behind the flag, whose release would wait for it
        if (threadIdx.x < Ranks && !aborted_) aborted_ = !wait(threadIdx.x, epoch_ + ordinal_, publish, met);
        trace_.waits(ordinal_ - 1, Ranks, met);
        const bool all = FAULT("no-block-barrier-after-spin") ? !aborted_ : !__syncthreads_or(aborted_);
        trace_.lap(TraceRole::barrier);
        return all;
    }

    // All threads of the block, once, after the last barrier of a call that was not aborted: the last block to get here
    // advances the epoch by the number of barriers passed. Every other block has read the epoch long before. Returns the
    // new epoch to the one thread that has written it, and 0 to all others.
    __device__ __forceinline__ u64 finish() {
        if (threadIdx.x == 0) {
            char* own = call_.workspaces[call_.rank];
            const u32 before = FAULT("last-arriver-relaxed") ? ptx::increment_relaxed_gpu(arrived_word(own))
                                                             : ptx::increment_acq_rel_gpu(arrived_word(own));
            if (before == gridDim.x - 1) {
                *arrived_word(own) = 0;
                if (!FAULT("ordinals-of-the-host")) *epoch_word(own) = (epoch_ + ordinal_) * EPOCH_UNIT;
                return epoch_ + ordinal_;
            }
        }
        return 0;
    }

    // The epoch with which the kernel began, to the threads t < Ranks.
    __device__ __forceinline__ u64 epoch() const { return epoch_; }

private:
    __device__ __forceinline__ bool wait(int peer, u64 expected, bool hear, u64& met) {
        char* own = call_.workspaces[call_.rank];
        const u64* flag = flag_word(own, blockIdx.x, peer);
        u64 deadline = 0;
        Listener listener = calls_.listener();
        for (u32 polls = 1;; ++polls) {
            const bool listens = listener.listen() && hear;
            u64 seen = read_flag(flag);
            trace_.stamp(met, seen >= expected);
            if (FAULT("ordinals-of-32-bits") ? u32(seen) >= u32(expected) : seen >= expected && !listens) return true;
            if (FAULT("rank-not-launched-unbounded")) continue;
            if (!FAULT("abort-not-polled") && polls % 32 == 0 && ptx::load_relaxed_sys(abort_word(own)) != 0)
                return false;
            const bool differs = polls % 32 == 0 && listener.differs();
            if (polls % 1024 == 0 || differs) {
                u64 now = ptx::nanoseconds();
                if (differs || (deadline != 0 && now > deadline)) {
                    give_up<Ranks>(call_, [&](Report* report) {
                        if (differs || seen >= expected) return calls_.describe(report, listener);
                        report->peer = peer;
                        report->phase = ordinal_;
                        report->expected = expected;
                        report->seen = seen;
                        report->leg = 0;
                    });
                    return false;
                }
                if (deadline == 0) deadline = now + call_.timeout_ns;
            }
        }
    }

    const Call& call_;
    Trace& trace_;
    Calls<Ranks> calls_;
    u32 ordinal_;
    u64 epoch_;
    bool aborted_;
};
