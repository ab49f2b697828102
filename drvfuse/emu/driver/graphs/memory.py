# SPDX-License-Identifier: Apache-2.0
"""Allocation and free nodes of graphs, and the memory that a device keeps for them (`machine/graphs/memory.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...bindings import R, T
from ...machine.graphs.graph import Edge, Graph, Node
from ...machine.graphs.memory import GraphMemory, Reserve
from ...machine.process.process import Process
from ...machine.run.work import Allocate, Free
from ...wire.node_params import elements
from ...wire.structs import Structure
from ..entry import check, entry, present
from ..pool import access_list, located_device
from .nodes import handle, insert, of_kind, place

_N = T.CUgraphNodeType
_A = T.CUgraphMem_attribute
_ATTRIBUTES = {
    _A.CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: "used",
    _A.CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: "used_high",
    _A.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: "reserved",
    _A.CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: "reserved_high",
}
_PARAMS = Structure("CUDA_MEM_ALLOC_NODE_PARAMS")
Where = tuple[Graph, Mapping[Node, Edge]]


def add_allocation(proc: Process, where: Where, p: Any) -> Node:
    """Add an allocation node that CUDA_MEM_ALLOC_NODE_PARAMS describe, and write the address of its memory to these
    parameters.
    """
    check(p is not None and where[0].parent is None)
    props = p.poolProps
    check(props.allocType == T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED and p.bytesize > 0)
    none = T.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    check(props.handleTypes == none, R.CUDA_ERROR_NOT_SUPPORTED)
    device = located_device(proc, props.location)
    check(p.accessDescCount <= len(proc.machine.devices))
    raw = _PARAMS.plain(p)
    granted = present(elements("CUmemAccessDesc", raw.accessDescs, raw.accessDescCount))
    access = access_list(proc, granted, len(granted))
    check(all(other is device or proc.machine.can_reach(other, device) for other, _ in access))
    context = proc.current()
    memory = proc.graph_memory.create(where[0], device, p.bytesize, {other.index: flags for other, flags in access})
    node = insert(proc, where, Allocate(context, memory))
    p.dptr = T.CUdeviceptr(memory.allocation.base)
    return node


def describe_allocation(node: Node, p: Any) -> None:
    """Describe an allocation node in the CUDA_MEM_ALLOC_NODE_PARAMS `p`."""
    command = node.command
    assert isinstance(command, Allocate)
    memory, kinds = command.memory, T.CUmemLocationType
    device = memory.allocation.device
    assert device is not None
    p.poolProps.allocType = T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.poolProps.location.type, p.poolProps.location.id = kinds.CU_MEM_LOCATION_TYPE_DEVICE, device.index
    p.bytesize, p.dptr = memory.allocation.nbytes, T.CUdeviceptr(memory.allocation.base)
    granted = []
    for index, flags in memory.access.items():
        item = T.CUmemAccessDesc()
        item.location.type, item.location.id = kinds.CU_MEM_LOCATION_TYPE_DEVICE, index
        item.flags = T.CUmemAccess_flags(flags)
        granted.append(item)
    p.accessDescs, p.accessDescCount = granted, len(granted)


def memory_at(proc: Process, address: int) -> GraphMemory:
    """The memory of a graph that begins at an address. Raises Failure if there is none."""
    found = proc.memory.at(address)
    if found is None or found.graph is None:
        raise proc.memory.stray("a free node needs the address that an allocation node returned", address)
    return found.graph


def add_free(proc: Process, where: Where, address: int) -> Node:
    """Add a free node for the memory at `address`. A graph may have one free node for each allocation. If the graph of
    the allocation has one, no other graph may have one.
    """
    graph, memory = where[0], memory_at(proc, address)
    check(graph.parent is None and memory.freeable_in(graph))
    node = insert(proc, where, Free(proc.current(), memory.allocation))
    memory.freed_in.add(graph)
    return node


def freed_address(node: Node) -> Any:
    command = node.command
    assert isinstance(command, Free)
    return T.CUdeviceptr(command.allocation.base)


@entry(1)
def cuGraphAddMemAllocNode(proc: Process, hGraph: Any, dependencies: Any, numDependencies: int, nodeParams: Any) -> Any:
    """Adds an allocation node. Writes the address, which is the same in all launches, to `nodeParams.dptr`."""
    return handle(add_allocation(proc, place(proc, hGraph, dependencies, numDependencies), nodeParams))


@entry(1)
def cuGraphMemAllocNodeGetParams(proc: Process, hNode: Any) -> Any:
    p = T.CUDA_MEM_ALLOC_NODE_PARAMS()
    describe_allocation(of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_MEM_ALLOC), p)
    return p


@entry(1)
def cuGraphAddMemFreeNode(proc: Process, hGraph: Any, dependencies: Any, numDependencies: int, dptr: Any) -> Any:
    return handle(add_free(proc, place(proc, hGraph, dependencies, numDependencies), dptr))


@entry(1)
def cuGraphMemFreeNodeGetParams(proc: Process, hNode: Any) -> Any:
    return freed_address(of_kind(proc, hNode, _N.CU_GRAPH_NODE_TYPE_MEM_FREE))


@entry()
def cuDeviceGraphMemTrim(proc: Process, device: Any) -> None:
    """Gives the memory back that no queued graph and no live allocation uses."""
    proc.graph_memory.trim(proc.device(device))


def _reserve(proc: Process, device: Any) -> Reserve:
    return proc.graph_memory.reserve(proc.device(device))


@entry(1)
def cuDeviceGetGraphMemAttribute(proc: Process, device: Any, attr: Any) -> Any:
    found = _reserve(proc, device)
    check(attr in _ATTRIBUTES)
    return T.cuuint64_t(getattr(found, _ATTRIBUTES[attr]))


@entry()
def cuDeviceSetGraphMemAttribute(proc: Process, device: Any, attr: Any, value: Any) -> None:
    """Sets an attribute. Only the high-water marks can be set, and only to 0, which resets them to the present
    value.
    """
    found = _reserve(proc, device)
    check(attr in _ATTRIBUTES and _ATTRIBUTES[attr].endswith("_high") and int(value) == 0)
    name = _ATTRIBUTES[attr]
    setattr(found, name, getattr(found, name.removesuffix("_high")))
