// SPDX-License-Identifier: Apache-2.0
// fp32 arithmetic for which the compiler has no function of its own.
#pragma once

namespace ptx {

// div.full.f32: within two units in the last place
__device__ __forceinline__ float divide_full(float a, float b) {
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}

// rcp.approx.ftz.f32
__device__ __forceinline__ float reciprocal_approx(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// sqrt.approx.ftz.f32
__device__ __forceinline__ float root_approx(float value) {
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(value));
    return root;
}

// max.NaN.f32: NaN if one of the operands is a NaN
__device__ __forceinline__ float max_nan(float a, float b) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
}

}  // namespace ptx
