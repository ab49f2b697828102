// SPDX-License-Identifier: Apache-2.0
// The definitions that the kernels of all FP8 ops with group scales share.
#pragma once
#include "common/fp8_rows.cuh"
#include "sync/pdl.cuh"

using X = DRVFUSE_DTYPE;
using Weight = DRVFUSE_WEIGHT_DTYPE;
constexpr int QB = DRVFUSE_GROUP;          // elements of a group, which share a scale
constexpr bool ALIGNED = DRVFUSE_ALIGNED;  // whole packs, 16-byte aligned rows
constexpr u32 NAN_BITS = 0x7fffffff;
