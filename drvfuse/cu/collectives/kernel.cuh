// SPDX-License-Identifier: Apache-2.0
// What the kernels of all collectives begin with: what they are compiled for, and their place in the stream.
#pragma once
#include "common/faults.cuh"
#include "common/quantise.cuh"
#include "sync/pdl.cuh"
#include "sync/workspace.cuh"
#include "trace/trace.cuh"

using In = DRVFUSE_DTYPE;
using Out = DRVFUSE_OUT_DTYPE;
constexpr int RANKS = DRVFUSE_RANKS;
constexpr int PACKS = DRVFUSE_PACKS;
constexpr bool RAGGED = DRVFUSE_RAGGED;
constexpr bool STAGED = DRVFUSE_STAGED;
constexpr bool NODES = DRVFUSE_NODES;                           // sources are the partial sums of nodes (nodes.cuh)
constexpr int SOURCES = DRVFUSE_MULTIMEM || NODES ? 1 : RANKS;  // loads that a sum takes
constexpr int W = 16 / sizeof(In);
using InPack = Pack<In, W>;
using OutPack = Pack<Out, W>;
#if DRVFUSE_NODES
using SourcePack = Pack<float, W>;
#else
using SourcePack = InPack;
#endif

// A kernel's place in its stream, by all threads: `begin` comes first, then what reads nothing that a producer writes, then
// `follow_producer`, the work, and `end`.
__device__ __forceinline__ void begin(const Call& call) {
    if (FAULT("trigger-always-at-entry") || (call.early_trigger && !FAULT("no-trigger-at-entry"))) launch_dependents();
}

__device__ __forceinline__ void follow_producer(Trace& trace) {
    if (!FAULT("state-before-pdl-wait")) wait_for_producer();
    trace.start();
}

__device__ __forceinline__ void end(const Call& call, Trace& trace) {
    if (FAULT("state-before-pdl-wait")) wait_for_producer();
    if (!call.early_trigger && !FAULT("no-trigger-at-end")) launch_dependents();
    trace.exit();
}
