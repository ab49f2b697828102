// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch. Both are no-ops on devices before sm_90 and in a launch without the attribute.
#pragma once

// Returns when the preceding kernel of the stream has completed and its writes are visible. Nothing that a producer may
// write, the workspace's state included, is read before this.
__device__ __forceinline__ void wait_for_producer() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the dependent kernel become resident once every block has executed this or exited. It orders no memory.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
