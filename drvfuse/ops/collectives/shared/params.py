# SPDX-License-Identifier: Apache-2.0
"""The parameters of the collectives' kernels, byte for byte as in the `.cu` files."""

from __future__ import annotations

import ctypes

from ....comm import workspace


class Call(ctypes.Structure):
    """`struct Call` of cu/sync/workspace.cuh, which every collective's parameters begin with."""

    _fields_ = (
        ("sources", ctypes.c_uint64 * workspace.MAX_RANKS),
        ("workspaces", ctypes.c_uint64 * workspace.MAX_RANKS),
        ("input", ctypes.c_uint64),
        ("report", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("hash", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("early_trigger", ctypes.c_int32),
    )


class CheckParams(ctypes.Structure):
    """`struct CheckParams` of cu/collectives/shared/check_call.cu."""

    _fields_ = (("call", Call),)


class AllreduceParams(ctypes.Structure):
    """`struct AllreduceParams` of cu/collectives/sums/packs.cuh."""

    _fields_ = (
        ("call", Call),
        ("output", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("chunk_packs", ctypes.c_int64),
    )


class FusedParams(ctypes.Structure):
    """`struct FusedParams` of cu/collectives/rows/form.cuh."""

    _fields_ = (
        ("call", Call),
        ("gamma", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("residual_output", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("rows", ctypes.c_int32),
        ("chunk_rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("weight_offset", ctypes.c_float),
        ("scale_ub", ctypes.c_float),
    )


class PushCall(ctypes.Structure):
    """`struct PushCall` of cu/sync/push.cuh."""

    _fields_ = (
        ("slots", ctypes.c_uint64 * workspace.MAX_RANKS),
        ("first_share", ctypes.c_uint64),
        ("share", ctypes.c_uint64),
        ("half_bytes", ctypes.c_uint32),
        ("rounds", ctypes.c_int32),
    )


class AllreducePushParams(AllreduceParams):
    """`struct AllreducePushParams` of cu/collectives/sums/allreduce_push.cu."""

    _fields_ = (("push", PushCall),)  # type: ignore[assignment]  # follow the fields of the base


class FusedPushParams(FusedParams):
    """`struct FusedPushParams` of cu/collectives/rows/push.cuh."""

    _fields_ = (("push", PushCall),)  # type: ignore[assignment]  # follow the fields of the base


class MultimemCall(ctypes.Structure):
    """`struct MultimemCall` of cu/collectives/shared/multimem_packs.cuh."""

    _fields_ = (
        ("inputs", ctypes.c_uint64),
        ("outputs", ctypes.c_uint64),
        ("staging", ctypes.c_uint64),
        ("all_staging", ctypes.c_uint64),
    )


class AllreduceMultimemParams(AllreduceParams):
    """`struct AllreduceMultimemParams` of cu/collectives/sums/allreduce_multimem.cu."""

    _fields_ = (("multimem", MultimemCall),)  # type: ignore[assignment]  # follow the fields of the base


class FusedMultimemParams(FusedParams):
    """`struct FusedMultimemParams` of cu/collectives/rows/allreduce_rmsnorm_fp8_multimem.cu."""

    _fields_ = (("multimem", MultimemCall),)  # type: ignore[assignment]  # follow the fields of the base


class NodeCall(ctypes.Structure):
    """`struct NodeCall` of cu/collectives/nodes/sums.cuh."""

    _fields_ = (
        ("sums", ctypes.c_uint64),
        ("progress", ctypes.c_uint64),
        ("stride", ctypes.c_int64),
        ("nodes", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class NodeSumsParams(ctypes.Structure):
    """`struct NodeSumsParams` of cu/collectives/nodes/node_sums.cu."""

    _fields_ = (
        ("call", Call),
        ("node", NodeCall),
        *((name, ctypes.c_int64) for name in ("columns", "row_packs", "items", "item_packs", "staging")),
    )


class AllreduceNodesParams(AllreduceParams):
    """`struct Params` of cu/collectives/sums/allreduce.cu with DRVFUSE_NODES."""

    _fields_ = (("node", NodeCall),)  # type: ignore[assignment]  # follow the fields of the base


class FusedNodesParams(FusedParams):
    """`struct Params` of cu/collectives/rows/allreduce_rmsnorm_fp8.cu with DRVFUSE_NODES."""

    _fields_ = (("node", NodeCall),)  # type: ignore[assignment]  # follow the fields of the base
