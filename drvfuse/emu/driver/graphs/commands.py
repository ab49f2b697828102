# SPDX-License-Identifier: Apache-2.0
"""The commands of nodes: made from the structures that describe nodes, and converted back to those structures.

A command is complete and checked when it is made, and holds copies of all parameters. Host memory that a copy names is
read or written when the node runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...bindings import R, T
from ...machine.graphs.graph import Node
from ...machine.objects import Context, Event, Function
from ...machine.process.process import Process
from ...machine.run.values import ValueOps, WaitValue, WriteValue
from ...machine.run.work import Command, Copy, Copy3D, Fill, HostCall, Launch, Record, Wait
from ...space import mapped
from ...wire.node_params import elements
from ...wire.parameters import lay_out, pack
from ...wire.structs import Structure
from ..copy import END_KEYS, copy_3d
from ..entry import check, host_address, number, present
from ..launch import Attributes, layout_of, make
from ..module import resolve
from ..values import value_operations

_BATCH = Structure("CUDA_BATCH_MEM_OP_NODE_PARAMS")
_OPERATION = Structure("CUstreamBatchMemOpParams")
_KINDS = T.CUmemorytype


def context_of(proc: Process, value: Any) -> Context:
    """The context that a structure names. NULL means the current context."""
    context = proc.get(value, Context, R.CUDA_ERROR_INVALID_CONTEXT) if number(value) else proc.current()
    proc.healthy(context)
    return context


# Kernels ------------------------------------------------------------------------------------------------------------


def kernel(proc: Process, p: Any, former: Command | None = None, *, strict: bool = False) -> Launch:
    """The launch that CUDA_KERNEL_NODE_PARAMS describe, with the attributes of `former` if that is a launch. With
    `strict`, a context in the parameters must be the context of the function.
    """
    check(p is not None)
    function = proc.get(p.func if number(p.func) else p.kern, Function, R.CUDA_ERROR_INVALID_VALUE)
    if function.library is not None:
        function = resolve(proc, function, context_of(proc, p.ctx))
    elif strict and number(p.ctx):
        assert function.module is not None
        check(context_of(proc, p.ctx) is function.module.context, R.CUDA_ERROR_INVALID_CONTEXT)
    attributes = Attributes.of(former) if isinstance(former, Launch) else Attributes()
    given, extra = number(p.kernelParams), number(p.extra)
    check(not (extra and (given or attributes.cooperative)))
    params = present(pack(layout_of(function), given, extra))
    grid, block = (p.gridDimX, p.gridDimY, p.gridDimZ), (p.blockDimX, p.blockDimY, p.blockDimZ)
    return make(proc, function, grid, block, p.sharedMemBytes, params, attributes)


def with_attributes(proc: Process, launch: Launch, attributes: Attributes) -> Launch:
    """The same launch with other attributes."""
    function, grid, block = launch.function, launch.grid, launch.block
    return make(proc, function, grid, block, launch.smem, launch.params, attributes)


def describe_kernel(node: Node, p: Any) -> None:
    """Describe the launch of a node in the CUDA_KERNEL_NODE_PARAMS `p`. The node owns the memory of the kernel's
    parameters.
    """
    launch = node.command
    assert isinstance(launch, Launch)
    p.func, p.sharedMemBytes = T.CUfunction(launch.function.handle), launch.smem
    p.gridDimX, p.gridDimY, p.gridDimZ = launch.grid
    p.blockDimX, p.blockDimY, p.blockDimZ = launch.block
    p.kernelParams, node.lent = lay_out(launch.params, [p.offset for p in launch.function.code.params])


# Copies and fills ---------------------------------------------------------------------------------------------------


def copy(proc: Process, p: Any, context: Context) -> Copy3D:
    """The copy that a CUDA_MEMCPY3D describes. Raises Failure if it is empty."""
    check(p is not None)
    return present(copy_3d(proc, p, context))


def describe_copy(proc: Process, node: Node, p: Any) -> None:
    """Describe the copy of a node in the CUDA_MEMCPY3D `p`."""
    command = node.command
    assert isinstance(command, Copy | Copy3D)
    if isinstance(command, Copy):
        assert isinstance(command.source, int)
        p.WidthInBytes, p.Height, p.Depth = command.nbytes, 1, 1
        ends = {"src": _row(proc, command.source), "dst": _row(proc, command.destination)}
    else:
        p.WidthInBytes, p.Height, p.Depth = command.width, command.height, command.depth
        ends = {"src": command.source.given, "dst": command.destination.given}
    for end, given in ends.items():
        for key in END_KEYS:
            if key in given:
                setattr(p, end + key, given[key])


def _row(proc: Process, address: int) -> Mapping[str, Any]:
    """The fields of a CUDA_MEMCPY3D for an address, by their names without "src" or "dst"."""
    found = proc.memory.find(address)
    if found is None or found.device is None:
        return {"MemoryType": _KINDS.CU_MEMORYTYPE_HOST, "Host": address}
    return {"MemoryType": _KINDS.CU_MEMORYTYPE_DEVICE, "Device": T.CUdeviceptr(address)}


def fill(proc: Process, p: Any, context: Context) -> Fill:
    """The fill that CUDA_MEMSET_NODE_PARAMS describe."""
    check(p is not None)
    size, width, height, address = p.elementSize, p.width, p.height, number(p.dst)
    check(size in (1, 2, 4) and width > 0 and height > 0 and address % size == 0)
    pitch = p.pitch if height > 1 else 0
    check(height == 1 or (pitch >= width * size and pitch % size == 0))
    span = (height - 1) * pitch + width * size
    proc.memory.require("a fill writes", address, span, context, direct=True)
    return Fill(context, address, p.value & (1 << 8 * size) - 1, size, width, height, pitch)


def describe_fill(node: Node, p: Any) -> None:
    """Describe the fill of a node in the CUDA_MEMSET_NODE_PARAMS `p`."""
    command = node.command
    assert isinstance(command, Fill)
    p.dst, p.value, p.elementSize = T.CUdeviceptr(command.destination), command.value, command.size
    p.width, p.height, p.pitch = command.count, command.rows, command.pitch


# Host functions and events ------------------------------------------------------------------------------------------


def host(proc: Process, p: Any) -> HostCall:
    """The call that CUDA_HOST_NODE_PARAMS describe."""
    check(p is not None and number(p.fn) != 0 and (proc.foreign is not None or mapped.executable(number(p.fn))))
    argument, keep = host_address(p.userData)
    return HostCall(proc.current(), number(p.fn), argument, (keep, p))


def describe_host(node: Node, p: Any) -> None:
    """Describe the host function of a node in the CUDA_HOST_NODE_PARAMS `p`."""
    command = node.command
    assert isinstance(command, HostCall)
    p.fn, p.userData = T.CUhostFn(command.function), command.argument


def event_in(node: Node) -> Event:
    """The event of a node that records an event or waits for one."""
    assert isinstance(node.command, Record | Wait)
    return node.command.event


def event_of(proc: Process, value: Any) -> Event:
    return proc.get(value, Event, R.CUDA_ERROR_INVALID_VALUE)


def record(proc: Process, value: Any) -> Record:
    event = event_of(proc, value)
    return Record(event.context, event)


def wait(proc: Process, value: Any) -> Wait:
    event = event_of(proc, value)
    return Wait(event.context, event)


# Memory operations --------------------------------------------------------------------------------------------------


def batch(proc: Process, p: Any) -> ValueOps:
    """The operations that CUDA_BATCH_MEM_OP_NODE_PARAMS describe."""
    check(p is not None and p.flags == 0)
    context = context_of(proc, p.ctx)
    return ValueOps(context, value_operations(proc, context, _operations(p), p.count))


def given_batch(p: Any) -> tuple[bytes, ...]:
    """Each CUstreamBatchMemOpParams of a CUDA_BATCH_MEM_OP_NODE_PARAMS, as bytes."""
    return tuple(_OPERATION.bytes_of(item) for item in _operations(p))


def _operations(p: Any) -> list[Any]:
    raw = _BATCH.plain(p)
    return present(elements(_OPERATION.c, raw.paramArray, raw.count))


def describe_batch(node: Node, p: Any) -> None:
    """Describe the operations of a node in the CUDA_BATCH_MEM_OP_NODE_PARAMS `p`."""
    command = node.command
    assert isinstance(command, ValueOps)
    items = [_OPERATION.made_of(content) for content in node.given] or [_described(o) for o in command.operations]
    p.ctx, p.count, p.paramArray = T.CUcontext(command.context.handle), len(items), items


def _described(operation: WriteValue | WaitValue) -> Any:
    """The CUstreamBatchMemOpParams of an operation that was captured."""
    p = T.CUstreamBatchMemOpParams()
    waits = isinstance(operation, WaitValue)
    member, verb = (p.waitValue, "WAIT") if waits else (p.writeValue, "WRITE")
    member.operation = getattr(T.CUstreamBatchMemOpType, f"CU_STREAM_MEM_OP_{verb}_VALUE_{8 * operation.size}")
    member.address = T.CUdeviceptr(operation.address)
    member.value64 = T.cuuint64_t(operation.value)
    member.flags = operation.condition if isinstance(operation, WaitValue) else int(not operation.barrier)
    return p
