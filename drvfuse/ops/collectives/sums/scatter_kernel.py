# SPDX-License-Identifier: Apache-2.0
"""The compile-time settings of the kernels of reduce-scatters, and their parameters, byte for byte as in the `.cu`
files."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

from ....comm import workspace
from ...call.specialisation import Specialisation
from ..shared.kernel import CollectiveKernel
from ..shared.params import Call, FusedParams, NodeCall, PushCall


class ScatterKernel(CollectiveKernel):
    """The kernel of a reduce-scatter. Only its source file and its name differ from those of an all-reduce kernel with
    the same fields.

    `work` describes the sum of the largest part, which is computed as an all-reduce computes the sum of a tensor. With
    `nodes` the kernel adds the partial sums of nodes; it has the form "one_stage", and reads this device's memory only
    (`local`).
    """

    def _may_add_nodes(self) -> bool:
        return self.local

    @property
    def name(self) -> str:
        return _renamed(super().name)

    @property
    def specialisation(self) -> Specialisation:
        found = super().specialisation
        return replace(found, name=_renamed(found.name))


def _renamed(name: str) -> str:
    return name.replace("allreduce", "reduce_scatter")


class Range(ctypes.Structure):
    """`struct Range` of cu/collectives/sums/parts.cuh."""

    _fields_ = (("begin", ctypes.c_int64), ("end", ctypes.c_int64))


class ScatterParams(ctypes.Structure):
    """`struct ScatterParams` of cu/collectives/sums/parts.cuh."""

    _fields_ = (
        ("call", Call),
        ("output", ctypes.c_uint64),
        ("columns", ctypes.c_int64),
        ("most_packs", ctypes.c_int64),
        ("chunk_packs", ctypes.c_int64),
        ("parts", Range * workspace.MAX_RANKS),
    )

    def own(self, parts: Sequence[tuple[int, int]]) -> None:
        """Write the indices [begin, end) of the elements of each rank's part to the parameters."""
        for rank, part in enumerate(parts):
            self.parts[rank] = Range(*part)


class ScatterNodesParams(ScatterParams):
    """`struct Params` of cu/collectives/sums/reduce_scatter.cu with DRVFUSE_NODES."""

    _fields_ = (("node", NodeCall),)  # type: ignore[assignment]  # follow the fields of the base


class ScatterPushParams(ScatterParams):
    """`struct ScatterPushParams` of cu/collectives/sums/reduce_scatter_push.cu."""

    _fields_ = (("push", PushCall),)  # type: ignore[assignment]  # follow the fields of the base


class RowParts(ctypes.Structure):
    """`struct RowParts` of cu/collectives/rows/parts.cuh."""

    _fields_ = (("starts", ctypes.c_int32 * (workspace.MAX_RANKS + 1)), ("most", ctypes.c_int32))


class FusedScatterParams(FusedParams):
    """`struct FusedScatterParams` of cu/collectives/rows/reduce_scatter_rmsnorm_fp8.cu."""

    _fields_ = (("parts", RowParts),)  # type: ignore[assignment]  # follow the fields of the base


class FusedScatterNodesParams(FusedParams):
    """`struct Params` of cu/collectives/rows/reduce_scatter_rmsnorm_fp8.cu with DRVFUSE_NODES."""

    _fields_ = (("parts", RowParts), ("node", NodeCall))  # type: ignore[assignment]  # follow the fields of the base


class FusedScatterPushParams(FusedParams):
    """`struct FusedScatterPushParams` of cu/collectives/rows/reduce_scatter_rmsnorm_fp8_push.cu."""

    _fields_ = (("parts", RowParts), ("push", PushCall))  # type: ignore[assignment]  # follow the fields of the base
