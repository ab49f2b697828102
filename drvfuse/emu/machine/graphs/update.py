# SPDX-License-Identifier: Apache-2.0
"""Updates of executable graphs by graphs of the same shape.

The nodes of the graph are paired with the steps of the executable graph as the driver's documentation says. First, the
nodes for which no other node waits are paired with the steps for which no other step waits, both in the order in which
the nodes were added. Then, for each pair, the nodes for which the node waits are paired with the steps for which the
step waits, in the order in which the edges were made. The steps take the commands of their nodes only if every node has
a step that can take its command. So an update that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...bindings import T
from ..run.values import ValueOps
from ..run.work import Allocate, Command, Copy, Copy3D, Fill, Free, Launch
from .executable import NODE_PRIORITY, GraphExec, Plan, Step
from .graph import Graph, Node

if TYPE_CHECKING:
    from ..memory.process_memory import ProcessMemory

_RESULT = T.CUgraphExecUpdateResult
TOPOLOGY = _RESULT.CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED
KIND = _RESULT.CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED
PARAMETERS = _RESULT.CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED
NOT_SUPPORTED = _RESULT.CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED
FUNCTION = _RESULT.CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE
ATTRIBUTES = _RESULT.CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED


class Unfit(Exception):
    """An executable graph cannot be updated. `result` is the CUgraphExecUpdateResult, and `why` is the reason in words.
    `node` is the node of the graph that the reason concerns. If the reason concerns an edge, the edge leads from the
    node `before` to `node`.
    """

    def __init__(self, result: Any, why: str, node: Node | None = None, before: Node | None = None) -> None:
        super().__init__(why)
        self.result, self.why, self.node, self.before = result, why, node, before


def update(executable: GraphExec, plan: Plan, graph: Graph) -> None:
    """Replace the commands of the steps `plan` of an executable graph by those of `graph`. Raises Unfit if that is not
    possible.
    """
    pairs = list(_pairs(plan, graph))
    for step, node in pairs:
        _fits(executable, step, node)
    for step, node in pairs:
        if node.command is not None:
            step.command = node.command
    objects = {plan: graph} | {step.inner: node.child for step, node in pairs if step.inner and node.child}
    executable.take_objects(objects)


def _pairs(plan: Plan, graph: Graph) -> Iterator[tuple[Step, Node]]:
    """All pairs of a step and the node of `graph` that corresponds to it, including those of child graphs."""
    if len(plan.steps) != len(graph.nodes):
        raise Unfit(TOPOLOGY, f"the graph has {len(graph.nodes)} nodes, and the executable {len(plan.steps)}")
    steps = sorted((step for step in plan.steps.values() if step.last), key=lambda step: step.node.number)
    nodes = [node for node in graph.nodes if not node.dependents]
    if len(nodes) > len(steps):
        why = f"the graph has {len(nodes)} nodes for which no other node waits, and the executable {len(steps)}"
        raise Unfit(TOPOLOGY, why, nodes[-1])
    paired = dict(zip(nodes, steps, strict=False))
    taken = set(steps[: len(nodes)])
    front = list(paired)
    while front:
        node = front.pop()
        step = paired[node]
        if len(node.dependencies) != len(step.after):
            why = f"a node waits for {len(node.dependencies)} others, and in the executable for {len(step.after)}"
            raise Unfit(TOPOLOGY, why, node)
        for (before, edge), (other, was) in zip(node.dependencies.items(), step.after.items(), strict=True):
            if edge != was or (before in paired) != (other in taken) or paired.get(before, other) is not other:
                raise Unfit(
                    TOPOLOGY,
                    "a node and its counterpart in the executable have different dependencies or edges",
                    node,
                    before,
                )
            if before not in paired:
                paired[before] = other
                taken.add(other)
                front.append(before)
    if len(paired) < len(graph.nodes):
        raise Unfit(TOPOLOGY, "some nodes do not lead to the same last nodes as in the executable")
    for node, step in paired.items():
        yield step, node
        if step.inner is not None and node.child is not None:
            yield from _pairs(step.inner, node.child)


def _fits(executable: GraphExec, step: Step, node: Node) -> None:
    """Raise Unfit if the command of a node cannot replace that of a step."""
    if step.node.kind != node.kind:
        raise Unfit(KIND, f"a node has the type {node.kind.name}, but {step.node.kind.name} in the executable", node)
    if isinstance(node.command, Allocate | Free) and node.command is not step.command:
        raise Unfit(NOT_SUPPORTED, "allocation and free nodes cannot be updated", node)
    why = refusal(executable, step.command, node.command)
    if why:
        raise Unfit(why[0], why[1], node)


def refusal(executable: GraphExec, was: Command | None, now: Command | None) -> tuple[Any, str] | None:
    """(CUgraphExecUpdateResult, reason in words) if the command `now` cannot replace the command `was`, which is of the
    same kind, in an executable; else None.
    """
    memory = executable.process.memory
    if isinstance(was, Launch) and isinstance(now, Launch):
        if was.context is not now.context:
            return FUNCTION, "the function of a kernel node has another context than in the executable"
        if was.cooperative != now.cooperative:
            return ATTRIBUTES, "a kernel node is cooperative in the graph or in the executable, but not in both"
        if executable.flags & NODE_PRIORITY and was.priority != now.priority:
            return ATTRIBUTES, "the priority of a kernel node has changed"
    elif isinstance(was, Fill) and isinstance(now, Fill):
        if (was.rows > 1 or now.rows > 1) and _shape(was) != _shape(now):
            return PARAMETERS, "more than the address and the value of a memset of several rows has changed"
        if not _alike(memory, was.destination, now.destination):
            return PARAMETERS, "a memset node writes other memory: of another context, or device"
    elif isinstance(was, Copy | Copy3D) and isinstance(now, Copy | Copy3D):
        ends = zip(was.accesses(), now.accesses(), strict=True)
        if not all(_alike(memory, a.address, b.address) for a, b in ends):
            return PARAMETERS, "a memcpy node reads or writes other memory: of another context, or device"
    elif isinstance(was, ValueOps) and isinstance(now, ValueOps) and _kinds(was) != _kinds(now):
        return PARAMETERS, "the context, the number or the kinds of the operations of a batch have changed"
    return None


def _shape(fill: Fill) -> tuple[int, ...]:
    return fill.size, fill.count, fill.rows, fill.pitch


def _kinds(command: ValueOps) -> tuple[Any, ...]:
    return command.context, *((type(operation), operation.size) for operation in command.operations)


def _alike(memory: ProcessMemory, one: int, other: int) -> bool:
    """True if two addresses are both of host memory, or of memory of the same device and context. Memory without a
    context, such as memory of a pool, is like that of any context of its device.
    """
    homes = [
        (None, None) if a is None or a.device is None else (a.device, a.context) for a in map(memory.find, (one, other))
    ]
    (device, context), (device_now, context_now) = homes
    return device is device_now and (context is context_now or context is None or context_now is None)
