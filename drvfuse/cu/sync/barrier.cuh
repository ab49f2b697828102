// SPDX-License-Identifier: Apache-2.0
// The barrier between the blocks of the same index on all ranks, its time-out, and what follows the time-out.
//
// State in each rank's workspace: `epoch` counts the barriers of all earlier calls, and earlier push calls with an odd
// number of rounds (push.cuh). Only `peer` writes flags[block][peer]: the ordinal of the last barrier at which the
// peer's block of that index has arrived. The barriers of a call have the ordinals epoch + 1, epoch + 2, ... Ordinals
// never decrease, so nothing is reset between calls, the grid may differ from call to call, and a graph replays
// unchanged.
//
// Ordering. Thread t < ranks releases (st.release.sys) the ordinal into peer t's flag and acquires (ld.acquire.sys) its
// own flag of peer t. `publish` adds a block barrier before the release. By cumulativity all earlier accesses of all
// threads of this block (stores for peers, loads of memory that peers will overwrite) then happen before the release.
// The block barrier after the acquire orders the peers' writes before the later accesses of every thread of the block.
// Together: everything that the blocks of the same index did on all ranks before their arrival happens before
// everything that this block does after the barrier. A start barrier needs no `publish`, since it guards accesses of
// earlier kernels of the stream.
//
// Aliases. With Aliases the ranks' kernels access the same memory by its unicast address (the ordinary address on its
// own device) and by a multicast address. Of two such accesses one happens before the other only if there is a
// fence.proxy.alias on the path between them. Every path across a barrier passes a thread that releases a flag, so
// these threads execute the fence directly before the release: after the block barrier of `publish`, or, at a start
// barrier, after the wait for the producer.
//
// Progress needs the blocks of the same index on all ranks to be resident together; devices place blocks in index
// order.
//
// The barrier also detects calls that differ between ranks (calls.cuh). Every barrier except the start barrier, so
// every barrier with `publish`, also waits for the words of the peers' calls.
//
// Failure. A wait is bounded by `timeout_ns` of %globaltimer, read once in 1024 polls, and ends early when this rank's
// abort word is set. The first thread of a rank to give up writes the report and sets the abort word of every rank. A
// thread that gives up continues to the block barrier, which informs the whole block: `arrive_and_wait` returns false
// on all threads or on none. The caller then skips its work. The abort word stays set until the host clears it.
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
    // Reads the epoch and the abort word. Called by every thread of the block, after wait_for_producer().
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

    // Arrives at the next barrier and waits for the peers' blocks of the same index. `publish`: the barrier also orders
    // this block's earlier accesses in this kernel. Called by all threads of the block. Returns false to all of them if
    // the call is aborted; then the peers may not have arrived.
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
        if (!publish) calls_.tell();  // after the flag, whose release would otherwise wait for this store
        if (threadIdx.x < Ranks && !aborted_) aborted_ = !wait(threadIdx.x, epoch_ + ordinal_, publish, met);
        trace_.waits(ordinal_ - 1, Ranks, met);
        const bool all = FAULT("no-block-barrier-after-spin") ? !aborted_ : !__syncthreads_or(aborted_);
        trace_.lap(TraceRole::barrier);
        return all;
    }

    // Ends the use of the barrier. Called by all threads of the block, once, after the last barrier of a call that was
    // not aborted. The last block that calls it advances the epoch by the number of barriers; all blocks have read the
    // epoch by then. Returns the new epoch to the thread that has written it, and 0 to all others.
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

    // The epoch at the start of the kernel. Only threads t < Ranks have it.
    __device__ __forceinline__ u64 epoch() const { return epoch_; }
    // Whether the rank was aborted at the start of the kernel, or a barrier has given up since. Only for threads t <
    // Ranks.
    __device__ __forceinline__ bool aborted() const { return aborted_; }

private:
    __device__ __forceinline__ bool wait(int peer, u64 expected, bool with_calls, u64& met) {
        char* own = call_.workspaces[call_.rank];
        const u64* flag = flag_word(own, blockIdx.x, peer);
        u64 deadline = 0;
        Listener listener = calls_.listener();
        for (u32 polls = 1;; ++polls) {
            const bool listens = listener.listen() && with_calls;
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
                        report->kind = 0;
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
