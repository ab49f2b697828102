// SPDX-License-Identifier: Apache-2.0
// The addition of several values over the lanes of a warp at the same time.
#pragma once
#include "common/prelude.cuh"

// Adds each of V values over the lanes of a warp, in the order of a butterfly. Lane l returns the sum of value
// l / (32 / V).
template <int V, int MASK = 16>
__device__ __forceinline__ float butterfly_sums(const float (&v)[V], int lane) {
    if constexpr (MASK == 0) {
        return v[0];
    } else {
        constexpr int KEPT = V > 1 ? V / 2 : 1;
        const bool upper = lane & MASK;
        float kept[KEPT];
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            const float own = V > 1 && upper ? v[V - KEPT + k] : v[k], given = V > 1 && upper ? v[k] : v[V - KEPT + k];
            kept[k] = __fadd_rn(own, __shfl_xor_sync(0xffffffffu, given, MASK));
        }
        return butterfly_sums<KEPT, MASK / 2>(kept, lane);
    }
}
