// SPDX-License-Identifier: Apache-2.0
// Types and constants that all COAT kernels whose x is FP8 with group scales share.
#pragma once
#include "common/fp8_rows.cuh"
#include "sync/pdl.cuh"

using X = DRVFUSE_DTYPE;                   // the FP8 type of x, and of the quantised results
using Weight = DRVFUSE_WEIGHT_DTYPE;       // the type of w and b
constexpr int QB = DRVFUSE_GROUP;          // columns of a group: the group's elements share one scale
constexpr bool ALIGNED = DRVFUSE_ALIGNED;  // every row begins at a multiple of 16 bytes and consists of whole packs
constexpr u32 NAN_BITS = 0x7fffffff;       // the canonical NaN of fp32
