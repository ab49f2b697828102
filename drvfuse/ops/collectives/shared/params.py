# SPDX-License-Identifier: Apache-2.0
"""The parameters that kernels of several families have, laid out as in the kernels' sources."""

from __future__ import annotations

import ctypes
import functools

from ....comm import workspace
from ....structures import laid_out

of_collective = functools.partial(laid_out, sizes=workspace.defines())


@of_collective("sync/workspace.cuh")
class Call(ctypes.Structure):
    """What every collective's parameters begin with."""


@of_collective("collectives/shared/check_call.cu", parts=(Call,))
class CheckParams(ctypes.Structure):
    """The parameters of the kernel that compares calls."""


@of_collective("sync/push.cuh")
class PushCall(ctypes.Structure):
    """What the parameters of every push kernel end with."""


@of_collective("collectives/shared/multimem_packs.cuh")
class MultimemCall(ctypes.Structure):
    """The addresses of a call's arrays and staging in multicast memory."""


@of_collective("collectives/nodes/sums.cuh")
class NodeCall(ctypes.Structure):
    """Where the partial sums of nodes lie."""
