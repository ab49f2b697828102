# SPDX-License-Identifier: Apache-2.0
"""The parameters of the kernels of the fused norms, laid out as in the kernels' sources."""

from __future__ import annotations

import ctypes
import functools

from ....structures import DEFINITIONS
from ..shared.params import Call, MultimemCall, NodeCall, PushCall, of_collective
from .kernel import NormForm


@of_collective("collectives/rows/form.cuh", parts=(Call,))
class RowsParams(ctypes.Structure):
    """The parameters of one_stage and two_stage."""


@of_collective("collectives/rows/form.cuh", "RowsParams", ("DRVFUSE_MORE",), parts=(Call,))
class RowsFormParams(ctypes.Structure):
    """The same for forms with beta, normed outputs, or scales in the layouts "column" and "tiles"."""


@of_collective("collectives/rows/push.cuh", parts=(PushCall,))
class RowsPushParams(RowsParams):
    """The parameters of the push algorithms."""


@of_collective("collectives/rows/allreduce_rmsnorm_fp8_multimem.cu", parts=(MultimemCall,))
class RowsMultimemParams(RowsParams):
    """The parameters of the kernel that sums through multicast memory."""


@of_collective("collectives/rows/allreduce_rmsnorm_fp8.cu", "Params", parts=(NodeCall,))
class RowsNodesParams(RowsParams):
    """The parameters of the kernel that adds the partial sums of nodes."""


@of_collective("collectives/rows/parts.cuh")
class RowParts(ctypes.Structure):
    """The rows that each rank owns."""


@of_collective("collectives/rows/reduce_scatter_rmsnorm_fp8.cu", parts=(RowParts,))
class OwnRowsParams(RowsParams):
    """The parameters of a reduce-scatter that pulls."""


@of_collective("collectives/rows/reduce_scatter_rmsnorm_fp8.cu", "Params", parts=(NodeCall,))
class OwnRowsNodesParams(OwnRowsParams):
    """The parameters of the kernel of a reduce-scatter that adds the partial sums of nodes."""


@of_collective("collectives/rows/reduce_scatter_rmsnorm_fp8_push.cu", parts=(RowParts, PushCall))
class OwnRowsPushParams(RowsParams):
    """The parameters of a reduce-scatter that pushes."""


@functools.cache
def params_of(base: type[RowsParams], form: NormForm) -> type[ctypes.Structure]:
    """Return the parameters `base` of a kernel of the form `form`."""
    if not form.has_more:
        return base
    if base is RowsParams:
        return RowsFormParams
    file, name, _, parts = DEFINITIONS[base]
    extended = params_of(base.__base__, form)
    return of_collective(file, name, parts=parts)(type(base.__name__, (extended,), {}))
