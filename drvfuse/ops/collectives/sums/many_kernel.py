# SPDX-License-Identifier: Apache-2.0
"""The compile-time settings of the kernels of `allreduce_many`, and their parameters, byte for byte as in the `.cu`
files."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import replace

from ....plans.limits import ceil_div
from ...call.specialisation import Specialisation
from ..shared.kernel import CollectiveKernel
from ..shared.params import AllreduceNodesParams, AllreducePushParams, NodeSumsParams

MOST_TENSORS = 64
_BEYOND = 1 << 62  # the first pack of each entry that has no tensor: larger than the index of any pack


class ManyCall(ctypes.Structure):
    """`struct ManyCall` of cu/collectives/sums/many.cuh."""

    _fields_ = (
        ("inputs", ctypes.c_uint64 * MOST_TENSORS),
        ("outputs", ctypes.c_uint64 * MOST_TENSORS),
        ("counts", ctypes.c_int64 * MOST_TENSORS),
        ("first", ctypes.c_int64 * MOST_TENSORS),
    )

    @classmethod
    def of(cls, counts: Sequence[int], width: int, begin: int = 0) -> ManyCall:
        """Return the parameters for tensors with these numbers of elements, of which `width` fill a pack. Packs are
        numbered from 0 through all tensors, and the launch begins with pack `begin`."""
        made = cls()
        made.counts[: len(counts)] = counts
        first = [at - begin for at in itertools.accumulate((0, *(ceil_div(count, width) for count in counts[:-1])))]
        made.first[:] = [*first, *[_BEYOND] * (MOST_TENSORS - len(first))]
        return made


class AllreduceManyParams(AllreducePushParams):
    """`struct Params` of cu/collectives/sums/allreduce_push.cu with DRVFUSE_MANY."""

    _fields_ = (("many", ManyCall),)  # type: ignore[assignment]  # after the fields of the base class


class NodeSumsManyParams(NodeSumsParams):
    """`struct Params` of cu/collectives/nodes/node_sums.cu with DRVFUSE_MANY."""

    _fields_ = (("many", ManyCall),)  # after the fields of the base class


class AllreduceNodesManyParams(AllreduceNodesParams):
    """`struct Params` of cu/collectives/sums/allreduce.cu with DRVFUSE_NODES and DRVFUSE_MANY."""

    _fields_ = (("many", ManyCall),)  # type: ignore[assignment]  # after the fields of the base class


class ManyKernel(CollectiveKernel):
    """A kernel that reduces the packs of several tensors: an all-reduce by push, or a kernel of a call over several
    nodes."""

    @property
    def name(self) -> str:
        found = super().name
        return found.replace("allreduce", "allreduce_many") if self.pushes else found

    @property
    def specialisation(self) -> Specialisation:
        found = super().specialisation
        return replace(found, defines=(*found.defines, ("DRVFUSE_MANY", MOST_TENSORS)))
