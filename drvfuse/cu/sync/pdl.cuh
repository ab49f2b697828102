// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch. All functions do nothing on devices before sm_90 and in a launch without the
// attribute.
#pragma once
#include "ptx/special.cuh"

// Returns when the preceding kernel of the stream has completed and its writes are visible. A kernel must
// not read anything that a producer may write, such as the workspace's state, before this wait.
__device__ __forceinline__ void wait_for_producer() { ptx::wait_for_grids(); }

// Triggers: the dependent kernel may start once every block has triggered or exited. A trigger orders no memory.
__device__ __forceinline__ void launch_dependents() { ptx::launch_grids(); }

// Waits for the producer, and then triggers if the trigger is early. Called at the entry of kernels that read nothing
// before the producer has completed.
template <typename Params>
__device__ __forceinline__ void enter_stream(const Params& p) {
    wait_for_producer();
    if (p.early_trigger) launch_dependents();
}

// Triggers at the end of a kernel, unless it has triggered early.
template <typename Params>
__device__ __forceinline__ void leave_stream(const Params& p) {
    if (!p.early_trigger) launch_dependents();
}
