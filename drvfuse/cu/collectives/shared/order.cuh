// SPDX-License-Identifier: Apache-2.0
// Orders a collective kernel after its producer and before its dependent kernel. All threads call `begin` first, then
// `follow_producer`, and `end` last. Only after `follow_producer` may the kernel read what a producer writes.
#pragma once
#include "common/faults.cuh"
#include "sync/pdl.cuh"
#include "sync/workspace.cuh"
#include "trace/trace.cuh"

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
