// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch. Both are no-ops on devices before sm_90 and in a launch without the attribute.
#pragma once
#include "ptx/special.cuh"

// Returns when the preceding kernel of the stream has completed and its writes are visible. Nothing that a producer may
// write, the workspace's state included, is read before this.
__device__ __forceinline__ void wait_for_producer() { ptx::wait_for_grids(); }

// Lets the dependent kernel become resident once every block has executed this or exited. It orders no memory.
__device__ __forceinline__ void launch_dependents() { ptx::launch_grids(); }

// The entry of a kernel that reads nothing before its producer has completed. With an early trigger its dependents may
// start right after that.
template <typename Params>
__device__ __forceinline__ void enter_stream(const Params& p) {
    wait_for_producer();
    if (p.early_trigger) launch_dependents();
}

// The end of a kernel. Without an early trigger its dependents may start here.
template <typename Params>
__device__ __forceinline__ void leave_stream(const Params& p) {
    if (!p.early_trigger) launch_dependents();
}
