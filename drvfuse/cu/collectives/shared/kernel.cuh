// SPDX-License-Identifier: Apache-2.0
// The compile-time definitions of kernels that sum over ranks or nodes, as C++ types and constants.
#pragma once
#include "collectives/shared/order.cuh"
#include "common/quantise.cuh"

using In = DRVFUSE_DTYPE;
using Out = DRVFUSE_OUT_DTYPE;
constexpr int RANKS = DRVFUSE_RANKS;
constexpr int PACKS = DRVFUSE_PACKS;
constexpr bool RAGGED = DRVFUSE_RAGGED;
constexpr bool STAGED = DRVFUSE_STAGED;
constexpr bool NODES = DRVFUSE_NODES;  // the sources are partial sums of nodes (nodes/sums.cuh)
constexpr int SOURCES = DRVFUSE_MULTIMEM || NODES ? 1 : RANKS;  // loads per sum
constexpr int W = 16 / sizeof(In);
using InPack = Pack<In, W>;
using OutPack = Pack<Out, W>;
#if DRVFUSE_NODES
using SourcePack = Pack<float, W>;
#else
using SourcePack = InPack;
#endif
