# SPDX-License-Identifier: Apache-2.0
"""Functions for streams, events and graph nodes that need other parameters than their counterparts in the driver, or
the same ones in another order.
"""

from __future__ import annotations

import inspect
from typing import Any

from ..bindings import T
from ..wire.arguments import host_address
from .state import State, function
from .structs import set_side, sides
from .types import RT


@function(1)
def cudaStreamCreate(state: State) -> Any:
    return RT.cudaStream_t(int(state.cu.cuStreamCreate(0)))


@function(1)
def cudaEventCreate(state: State) -> Any:
    return RT.cudaEvent_t(int(state.cu.cuEventCreate(0)))


# Nodes of graphs ---------------------------------------------------------------------------------------------------


def _row(dst: Any, src: Any, count: Any, kind: Any) -> Any:
    copy, (source, destination) = T.CUDA_MEMCPY3D(), sides(kind)
    set_side(copy, "src", source, host_address(src), count)
    set_side(copy, "dst", destination, host_address(dst), count)
    copy.WidthInBytes, copy.Height, copy.Depth = count, 1, 1
    return copy


@function(1)
def cudaGraphAddMemcpyNode1D(
    state: State, graph: Any, pDependencies: Any, numDependencies: Any, dst: Any, src: Any, count: Any, kind: Any
) -> Any:
    row = _row(dst, src, count, kind)
    node = state.cu.cuGraphAddMemcpyNode(graph, pDependencies, numDependencies, row, state.context())
    return RT.cudaGraphNode_t(int(node))


@function()
def cudaGraphMemcpyNodeSetParams1D(state: State, node: Any, dst: Any, src: Any, count: Any, kind: Any) -> None:
    state.cu.cuGraphMemcpyNodeSetParams(node, _row(dst, src, count, kind))


@function()
def cudaGraphExecMemcpyNodeSetParams1D(
    state: State, hGraphExec: Any, node: Any, dst: Any, src: Any, count: Any, kind: Any
) -> None:
    row = _row(dst, src, count, kind)
    state.cu.cuGraphExecMemcpyNodeSetParams(hGraphExec, node, row, state.context())


@function()
def cudaGraphKernelNodeCopyAttributes(state: State, *args: Any, **kwargs: Any) -> None:
    """Copies attributes. The first parameter is the source in the bindings of CUDA 12. In the bindings of CUDA 13 and
    in the driver, the first parameter is the destination.
    """
    nodes = inspect.signature(RT.cudaGraphKernelNodeCopyAttributes).bind(*args, **kwargs).arguments
    state.cu.cuGraphKernelNodeCopyAttributes(nodes["hDst"], nodes["hSrc"])
