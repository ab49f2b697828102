// SPDX-License-Identifier: Apache-2.0
// Steps of a norm that several kernels share. Each operation is rounded once.
#pragma once
#include "common/pack16.cuh"

// Divides the sums of a row by the number of its columns. If that number is a power of two, the sums are multiplied
// by its inverse, which gives the same bits in a fraction of the time.
class Mean {
public:
    __device__ __forceinline__ explicit Mean(int columns)
        : share_((columns & (columns - 1)) == 0 ? __float_as_uint(__frcp_rn(float(columns))) : 0) {}

    // Hides the inverse's origin from the compiler, so that it stays in a register instead of being computed again.
    __device__ __forceinline__ void keep() { ptx::forget(share_); }

    __device__ __forceinline__ float of(float sum, int columns) const {
        return share_ != 0 ? __fmul_rn(sum, __uint_as_float(share_)) : __fdiv_rn(sum, float(columns));
    }

private:
    u32 share_;  // the bits of 1 / columns where that is exact, else 0
};

// Returns 1 / sqrt(mean + epsilon).
__device__ __forceinline__ float inverse_root(float mean, float epsilon) {
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, epsilon)));
}

// Multiplies every value by the factor.
template <int N>
__device__ __forceinline__ void multiply(float (&x)[N], float factor) {
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = __fmul_rn(x[k], factor);
}

// The bits of |x|, whose order as an integer is that of the numbers, with NaN above infinity.
__device__ __forceinline__ u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }
