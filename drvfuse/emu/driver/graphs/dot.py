# SPDX-License-Identifier: Apache-2.0
"""A graph as text for Graphviz."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...bindings import R
from ...machine.graphs.graph import Graph, Node
from ...machine.process.failure import Failure
from ...machine.process.process import Process
from ...machine.run.values import ValueOps
from ...machine.run.work import Allocate, Copy, Copy3D, Fill, Free, HostCall, Launch, Record, Wait
from ..entry import check, entry, text
from .graph import graph_of

_VERBOSE, _EXTRA = 1 << 0, 1 << 14
_DETAILS = {
    Launch: 1 << 2,
    Copy: 1 << 3,
    Copy3D: 1 << 3,
    Fill: 1 << 4,
    HostCall: 1 << 5,
    Record: 1 << 6,
    Wait: 1 << 6,
    Allocate: 1 << 11,
    Free: 1 << 12,
    ValueOps: 1 << 13,
}
_ATTRIBUTES, _HANDLES = 1 << 9, 1 << 10
_FLAGS = (1 << 16) - 1


@entry()
def cuGraphDebugDotPrint(proc: Process, hGraph: Any, path: Any, flags: int) -> None:
    """Writes the edges and the nodes of a graph: the number and the kind of each node, and the name of its kernel or
    the direction of its copy. The flags add parameters, attributes and handles. The result is
    CUDA_ERROR_OPERATING_SYSTEM if the file cannot be written.
    """
    graph = graph_of(proc, hGraph)
    check(path and not flags & ~_FLAGS)
    content = "\n".join(("digraph dot {", *_graph(proc, graph, flags), "}", ""))
    try:
        with open(text(path), "w", encoding="utf-8") as file:
            file.write(content)
    except (OSError, ValueError):
        raise Failure(R.CUDA_ERROR_OPERATING_SYSTEM) from None


def _graph(proc: Process, graph: Graph, flags: int) -> Iterator[str]:
    yield f"subgraph cluster_{graph.ident} {{"
    yield f'label="graph_{graph.ident}" graph[style="dashed"]'
    for node in graph.nodes:
        lines = "\\n".join(line.replace('"', "'") for line in _lines(proc, node, flags))
        yield f'"{_name(node)}"[style="solid" shape="{_shape(node)}" label="{lines}"];'
        if node.child is not None:
            yield from _graph(proc, node.child, flags)
    for number, (before, node, edge) in enumerate(graph.edges()):
        words = [f"edge {number}"] if flags & (_EXTRA | _VERBOSE) else []
        words += ["programmatic"] if edge.programmatic else []
        yield f'"{_name(before)}" -> "{_name(node)}"' + (f'[label="{", ".join(words)}"];' if words else ";")
    yield "}"


def _name(node: Node) -> str:
    return f"graph_{node.graph.ident}_node_{node.number}"


def _shape(node: Node) -> str:
    return "octagon" if isinstance(node.command, Launch) else "rectangle"


def _lines(proc: Process, node: Node, flags: int) -> Iterator[str]:
    command = node.command
    yield str(node.number)
    yield node.kind.name.removeprefix("CU_GRAPH_NODE_TYPE_")
    if isinstance(command, Launch):
        yield command.function.name
    elif isinstance(command, Copy | Copy3D):
        target, *source = (_side(proc, at.address) for at in command.accesses())
        yield f"{source[0] if source else 'host'} to {target}"
    if flags & _VERBOSE or (command is not None and flags & _DETAILS[type(command)]):
        yield from _details(node)
    if isinstance(command, Launch) and flags & (_ATTRIBUTES | _VERBOSE):
        yield f"cooperative {int(command.cooperative)}, priority {command.priority or 0}, cluster {command.cluster}"
    if flags & (_HANDLES | _VERBOSE):
        yield f"node 0x{node.handle:x}"
        if isinstance(command, Launch):
            yield f"function 0x{command.function.handle:x}"


def _side(proc: Process, address: int) -> str:
    found = proc.memory.find(address)
    return "host" if found is None or found.device is None else f"device {found.device.index}"


def _details(node: Node) -> Iterator[str]:
    command = node.command
    if isinstance(command, Launch):
        yield f"grid {command.grid}, block {command.block}, shared memory {command.smem}"
    elif isinstance(command, Copy | Copy3D):
        for at in command.accesses():
            yield f"{'writes' if at.write else 'reads'} {at.nbytes} bytes at 0x{at.address:x}"
    elif isinstance(command, Fill):
        yield f"0x{command.destination:x}, pitch {command.pitch}, value {command.value}, element size {command.size}"
        yield f"width {command.count}, height {command.rows}"
    elif isinstance(command, HostCall):
        yield f"function 0x{command.function:x}, user data 0x{command.argument:x}"
    elif isinstance(command, Record | Wait):
        yield f"event 0x{command.event.handle:x}"
    elif isinstance(command, Allocate | Free):
        memory = command.allocation if isinstance(command, Free) else command.memory.allocation
        yield f"{memory.nbytes} bytes at 0x{memory.base:x}"
    elif isinstance(command, ValueOps):
        for operation in command.operations:
            yield f"{'writes' if operation.writes else 'waits for'} 0x{operation.value:x} at 0x{operation.address:x}"
