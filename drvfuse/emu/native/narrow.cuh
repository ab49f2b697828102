// SPDX-License-Identifier: Apache-2.0
// Conversions between fp16, FP8 and fp32, for reductions and matrix instructions. Narrow values are in the low bits.
#pragma once

#include "common.cuh"

FN float of_half(u32 x) {
    float r;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(x));
    return r;
}

FN u32 to_half(float x) {
    u32 r;
    asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
    return r;
}

FN u32 half_of_fp8(u32 x, u32 is_e4m3) {
    u32 pair;
    if (is_e4m3) asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(pair) : "r"(x));
    else asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e5m2x2 %0, h;}" : "=r"(pair) : "r"(x));
    return pair & 0xFFFF;
}
