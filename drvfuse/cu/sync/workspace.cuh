// SPDX-License-Identifier: Apache-2.0
// What every collective kernel gets by value, and where things lie in a rank's workspace and report block.
//
// The offsets are definitions (DRVFUSE_*_OFFSET, DRVFUSE_MAX_*, DRVFUSE_REPORT_MAGIC) that the host passes in; the host
// has the only copy. Words of a workspace: epoch (u64), arrived, abort, reporter (u32), flags[block][peer] (u64).
#pragma once
#include "common/prelude.cuh"

// Written by the thread that gives up; `magic` is written last. Lies in pinned host memory.
struct Report {
    u32 rank;
    u32 peer;
    u32 block;
    u32 phase;
    u64 expected;
    u64 seen;
    u32 magic;
};

// The part of the parameter block that all collectives share. drvfuse/ops/collectives/kernels.py has the same layout.
struct Call {
    const void* sources[DRVFUSE_MAX_RANKS];  // what to sum, by rank, where the kernel reads it in place
    char* workspaces[DRVFUSE_MAX_RANKS];     // by rank; entry `rank` is this device's own
    const void* input;                       // this rank's input
    Report* report;
    u64 timeout_ns;
    int rank;
    int early_trigger;  // 1: launch dependents at entry, 0: at the end
};

__device__ __forceinline__ u64* epoch_word(char* workspace) {
    return reinterpret_cast<u64*>(workspace + DRVFUSE_EPOCH_OFFSET);
}
__device__ __forceinline__ u32* arrived_word(char* workspace) {
    return reinterpret_cast<u32*>(workspace + DRVFUSE_ARRIVED_OFFSET);
}
__device__ __forceinline__ u32* abort_word(char* workspace) {
    return reinterpret_cast<u32*>(workspace + DRVFUSE_ABORT_OFFSET);
}
__device__ __forceinline__ u32* reporter_word(char* workspace) {
    return reinterpret_cast<u32*>(workspace + DRVFUSE_REPORTER_OFFSET);
}
__device__ __forceinline__ u64* flag_word(char* workspace, u32 block, int peer) {
    return reinterpret_cast<u64*>(workspace + DRVFUSE_FLAGS_OFFSET) + block * DRVFUSE_MAX_RANKS + peer;
}
__device__ __forceinline__ char* payload(char* workspace) { return workspace + DRVFUSE_PAYLOAD_OFFSET; }
