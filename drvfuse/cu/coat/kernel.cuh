// SPDX-License-Identifier: Apache-2.0
// What the kernels of all FP8 ops with group scales begin with: what they are compiled for.
#pragma once
#include "common/fp8_rows.cuh"
#include "sync/pdl.cuh"

using X = DRVFUSE_DTYPE;
using Weight = DRVFUSE_WEIGHT_DTYPE;
constexpr int QB = DRVFUSE_GROUP;          // elements that have a scale
constexpr bool ALIGNED = DRVFUSE_ALIGNED;  // whole packs, 16-byte aligned rows
constexpr u32 NAN_BITS = 0x7fffffff;
