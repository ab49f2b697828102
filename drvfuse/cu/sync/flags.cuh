// SPDX-License-Identifier: Apache-2.0
// The store and the load of a rank's flag for a peer: release and acquire at system scope. All other code in this file
// is planted faults (common/faults.cuh).
#pragma once
#include "common/faults.cuh"
#include "ptx/ordered.cuh"

__device__ __forceinline__ void set_flag(u64* flag, u64 ordinal) {
    if constexpr (FAULT("gpu-scope-release")) {
        ptx::store_release_gpu(flag, ordinal);
    } else if constexpr (FAULT("relaxed-flag-store") || FAULT("fence-before-relaxed-flag")) {
        ptx::store_relaxed_sys(flag, ordinal);
    } else if constexpr (FAULT("volatile-flag-store")) {
        ptx::store_volatile(flag, ordinal);
    } else {
        ptx::store_release_sys(flag, ordinal);
    }
}

__device__ __forceinline__ u64 read_flag(const u64* flag) {
    if constexpr (FAULT("gpu-scope-acquire")) {
        return ptx::load_acquire_gpu(flag);
    } else if constexpr (FAULT("relaxed-flag-load")) {
        return ptx::load_relaxed_sys(flag);
    } else if constexpr (FAULT("volatile-flag-store") || FAULT("volatile-flag-load")) {
        return ptx::load_volatile(flag);
    } else {
        return ptx::load_acquire_sys(flag);
    }
}
