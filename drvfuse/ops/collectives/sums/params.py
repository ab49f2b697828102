# SPDX-License-Identifier: Apache-2.0
"""The parameters of the kernels of all-reduces and reduce-scatters, laid out as in the kernels' sources."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

from ....plans.limits import ceil_div
from ....structures import laid_out
from ..nodes.sums import NodeSumsParams
from ..shared.params import Call, MultimemCall, NodeCall, PushCall, of_collective

MOST_TENSORS = 64
_BEYOND = 1 << 62  # the first pack of each entry that has no tensor: larger than the index of any pack
_MANY = ("DRVFUSE_MANY",)


@of_collective("collectives/sums/packs.cuh", parts=(Call,))
class AllreduceParams(ctypes.Structure):
    """The parameters of one_stage and two_stage."""


@of_collective("collectives/sums/allreduce_push.cu", parts=(PushCall,))
class AllreducePushParams(AllreduceParams):
    """The parameters of the push algorithms."""


@of_collective("collectives/sums/allreduce_multimem.cu", parts=(MultimemCall,))
class AllreduceMultimemParams(AllreduceParams):
    """The parameters of the kernels that sum through multicast memory."""


@of_collective("collectives/sums/allreduce.cu", "Params", parts=(NodeCall,))
class AllreduceNodesParams(AllreduceParams):
    """The parameters of the kernel that adds the partial sums of nodes."""


@laid_out("collectives/sums/many.cuh", sizes={"MOST_TENSORS": MOST_TENSORS})
class ManyCall(ctypes.Structure):
    """The tensors of one launch."""

    @classmethod
    def of(cls, counts: Sequence[int], width: int, begin: int = 0) -> ManyCall:
        """Return the parameters for tensors with these numbers of elements, of which `width` fill a pack. Packs are
        numbered from 0 through all tensors, and the launch begins with pack `begin`."""
        made = cls()
        made.counts[: len(counts)] = counts
        first = [at - begin for at in itertools.accumulate((0, *(ceil_div(count, width) for count in counts[:-1])))]
        made.first[:] = [*first, *[_BEYOND] * (MOST_TENSORS - len(first))]
        return made


@of_collective("collectives/sums/allreduce_push.cu", "Params", _MANY, parts=(ManyCall,))
class AllreduceManyParams(AllreducePushParams):
    """The same for several tensors."""


@of_collective("collectives/nodes/node_sums.cu", "Params", _MANY, parts=(ManyCall,))
class NodeSumsManyParams(NodeSumsParams):
    """The same for several tensors."""


@of_collective("collectives/sums/allreduce.cu", "Params", _MANY, parts=(NodeCall, ManyCall))
class AllreduceNodesManyParams(AllreduceParams):
    """The same for several tensors."""


@of_collective("collectives/sums/parts.cuh")
class Range(ctypes.Structure):
    """Elements [begin, end) of a tensor."""


@of_collective("collectives/sums/parts.cuh", parts=(Call, Range))
class ScatterParams(ctypes.Structure):
    """The parameters of a reduce-scatter that pulls."""

    def own(self, parts: Sequence[tuple[int, int]]) -> None:
        """Write the indices [begin, end) of the elements of each rank's part to the parameters."""
        for rank, part in enumerate(parts):
            self.parts[rank] = Range(*part)


@of_collective("collectives/sums/reduce_scatter.cu", "Params", parts=(NodeCall,))
class ScatterNodesParams(ScatterParams):
    """The parameters of the kernel that adds the partial sums of nodes."""


@of_collective("collectives/sums/reduce_scatter_push.cu", parts=(PushCall,))
class ScatterPushParams(ScatterParams):
    """The parameters of a reduce-scatter that pushes."""
