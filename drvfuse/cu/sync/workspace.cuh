// SPDX-License-Identifier: Apache-2.0
// The parameters that all collective kernels share, and the layout of a rank's workspace and report block.
//
// The host defines the offsets and passes them as definitions (DRVFUSE_*_OFFSET, DRVFUSE_MAX_*, DRVFUSE_REPORT_MAGIC).
// A workspace has the u64 words epoch, abort, flags[block][peer], calls[2][peer] and nodes[node], and the u32 words
// arrived, reporter and numbers[peer]. The epoch counts, in units of EPOCH_UNIT, the barriers of all earlier calls and
// the earlier push calls with an odd number of rounds. calls.cuh describes `numbers` and `calls`.
#pragma once
#include "common/faults.cuh"
#include "common/prelude.cuh"
#include "ptx/ordered.cuh"

// The report block in pinned host memory. The thread that gives up writes it, `magic` last.
struct Report {
    u32 rank;      // the rank that reports
    u32 peer;      // the rank for which it waited
    u32 block;     // the block that waited
    u32 phase;     // the number of the barrier or round within the call, from 1; for kind 3 the number of the call
    u64 expected;  // the awaited flag, epoch or word
    u64 seen;      // the value that was read last
    u32 magic;     // DRVFUSE_REPORT_MAGIC: the report is complete
    // What the thread waited for. 0: a barrier, 1: push, 2: gather (push.cuh), 3: the comparison of calls
    // (calls.cuh), 4: the exchange between nodes (nodes/failure.cuh)
    u32 kind;
    u32 word;  // the missing word, for kinds 1 and 2: its offset in the slots, in units of 16 bytes
};

// The part of the parameter block that all collectives share. drvfuse/ops/collectives/shared/params.py reads this definition.
struct Call {
    const void* sources[DRVFUSE_MAX_RANKS];  // the inputs by rank, if the kernel reads them in place
    char* workspaces[DRVFUSE_MAX_RANKS];     // the workspaces by rank; entry `rank` is this device's own
    const void* input;                       // this rank's input
    Report* report;
    u64 timeout_ns;
    u64 hash;  // the hash of the call in the upper 48 bits; 0: calls are not compared (calls.cuh)
    int rank;
    int early_trigger;  // 1: trigger dependent launches at entry, 0: at the end
};

constexpr u64 EPOCH_UNIT = u64(1) << DRVFUSE_EPOCH_BITS;

__device__ __forceinline__ u64* epoch_word(char* workspace) {
    return reinterpret_cast<u64*>(workspace + DRVFUSE_EPOCH_OFFSET);
}
__device__ __forceinline__ u32* arrived_word(char* workspace) {
    return reinterpret_cast<u32*>(workspace + DRVFUSE_ARRIVED_OFFSET);
}
__device__ __forceinline__ u64* abort_word(char* workspace) {
    return reinterpret_cast<u64*>(workspace + DRVFUSE_ABORT_OFFSET);
}
__device__ __forceinline__ u32* reporter_word(char* workspace) {
    return reinterpret_cast<u32*>(workspace + DRVFUSE_REPORTER_OFFSET);
}
__device__ __forceinline__ u64* flag_word(char* workspace, u32 block, int peer) {
    return reinterpret_cast<u64*>(workspace + DRVFUSE_FLAGS_OFFSET) + block * DRVFUSE_MAX_RANKS + peer;
}
__device__ __forceinline__ u32* number_word(char* workspace, int peer) {
    return reinterpret_cast<u32*>(workspace + DRVFUSE_NUMBERS_OFFSET) + peer;
}
__device__ __forceinline__ u64* call_word(char* workspace, u32 generation, int peer) {
    return reinterpret_cast<u64*>(workspace + DRVFUSE_CALLS_OFFSET) + generation * DRVFUSE_MAX_RANKS + peer;
}
__device__ __forceinline__ u64* nodes_word(char* workspace, int node) {
    return reinterpret_cast<u64*>(workspace + DRVFUSE_NODES_OFFSET) + node;
}
__device__ __forceinline__ char* payload(char* workspace) { return workspace + DRVFUSE_PAYLOAD_OFFSET; }

// Called by a thread that gives up. The first thread of a rank that calls it writes the report and sets the abort words
// of all ranks. For later threads of the rank nothing happens. `describe(report)` writes peer, phase, expected, seen,
// kind and word.
template <int Ranks, typename Describe>
__device__ __forceinline__ void give_up(const Call& call, const Describe& describe) {
    if (atomicCAS(reporter_word(call.workspaces[call.rank]), 0u, 1u) != 0) return;
    Report* report = call.report;
    report->rank = call.rank;
    report->block = blockIdx.x;
    describe(report);
    ptx::fence_sys();
    ptx::store_relaxed_sys(&report->magic, DRVFUSE_REPORT_MAGIC);
#pragma unroll 1
    for (int rank = 0; rank < Ranks; ++rank) {
        if (FAULT("abort-of-own-rank-only") && rank != call.rank) continue;
        ptx::store_relaxed_sys(abort_word(call.workspaces[rank]), u64(1));
    }
}
