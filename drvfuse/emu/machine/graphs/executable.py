# SPDX-License-Identifier: Apache-2.0
"""Executable graphs: snapshots of graphs, which can be launched any number of times.

When a graph is instantiated, a `Plan` is made of it: the list of the steps of the executable graph. (The plans of ops
are something else.) The list has one step for each node, with the command of the node, and each step comes after the
steps for which it waits. A step refers to its node, because calls that change a step give the node of the step; nothing
else of the graph is used later. The step of a child graph node has a `Plan` of the child graph.

A launch queues one operation for each step. Two launches of one executable never overlap: each is ordered after the
previous one, and also after the earlier work of its stream. Changing a step replaces its command, but a queued
operation keeps the command with which it was queued. So launches that are queued already do not change.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...bindings import R
from ..objects import Object, Stream, new_chain
from ..process.failure import Failure
from ..run.work import Allocate, Command, Free, Launch, Op, Record, Release, Wait, release, retain
from .graph import Edge, Graph, Node

if TYPE_CHECKING:
    from ..process.process import Process
    from .user_objects import UserObject

_ids = itertools.count(1)
AUTO_FREE, UPLOAD, DEVICE_LAUNCH, NODE_PRIORITY = 1, 2, 4, 8


@dataclass(eq=False)
class Step:
    """One node of a graph in the executable graph. `after` are the steps for which this step waits. If the node is a
    child graph node, `inner` has the steps of the child graph, else it is None. A step that is not `enabled` does
    nothing, but the steps after it still wait for the steps before it.
    """

    node: Node
    command: Command | None
    inner: Plan | None
    after: dict[Step, Edge]
    chain: int
    enabled: bool = True
    last: bool = True  # whether no other step waits for this step


class Plan:
    """The steps of an executable graph, or of a child graph in it. The constructor raises Cycle if the edges of the
    graph form a cycle.
    """

    def __init__(self, graph: Graph) -> None:
        self.steps: dict[Node, Step] = {}
        self.user_objects: Counter[UserObject] = Counter(graph.user_objects)
        continued: set[Step] = set()
        for node in graph.order():
            after = {self.steps[before]: edge for before, edge in node.dependencies.items()}
            before = next((step for step in after if step not in continued), None)
            continued.update([] if before is None else [before])
            chain = new_chain() if before is None else before.chain
            inner = None if node.child is None else Plan(node.child)
            self.steps[node] = Step(node, node.command, inner, after, chain)
            for step in after:
                step.last = False

    def everything(self) -> Iterator[Step]:
        """All steps, including those of child graphs."""
        for step in self.steps.values():
            yield step
            if step.inner is not None:
                yield from step.inner.everything()

    def all_objects(self) -> Counter[UserObject]:
        """The references to user objects that these steps hold, including those of child graphs."""
        inner = (step.inner.all_objects() for step in self.steps.values() if step.inner is not None)
        return sum(inner, Counter(self.user_objects))

    def graph(self, parent: Node) -> Graph:
        """A new graph with the present commands of the steps, to be the child graph of `parent`."""
        made = Graph(parent)
        made.user_objects.update(self.user_objects)
        nodes: dict[Step, Node] = {}
        for step in self.steps.values():
            node = nodes[step] = Node(made, step.command if step.enabled else None)
            if step.inner is not None:
                node.child = step.inner.graph(node)
            for before, edge in step.after.items():
                made.connect(nodes[before], node, edge)
        return made

    def step(self, node: Node) -> Step | None:
        """The step that runs `node`, a node of the graph or of a child graph in it. None if there is no such step."""
        return next((step for step in self.everything() if step.node is node), None)


@dataclass(eq=False)
class GraphExec(Object):
    """An executable graph. `last` is the operation with which the most recent launch of the graph ends. It is None
    before the first launch.
    """

    process: Process
    graph: Graph
    flags: int = 0
    ident: int = field(default_factory=_ids.__next__, init=False)
    plan: Plan = field(init=False)
    last: Op | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.plan = Plan(self.graph)
        retain(self.plan.all_objects())
        if self.graph.of_memory():
            self.graph.root.executable = self
        commands = [step.command for step in self.plan.everything()]
        self.allocates = {command.memory: None for command in commands if isinstance(command, Allocate)}
        self.frees = {c.allocation.graph: None for c in commands if isinstance(c, Free) and c.allocation.graph}

    def take_objects(self, graphs: Mapping[Plan, Graph]) -> None:
        """For each `Plan` and its graph in `graphs`: make the `Plan` hold references to the user objects of that graph,
        and release the references that it held before.
        """
        former: Counter[UserObject] = Counter()
        for plan, graph in graphs.items():
            former += plan.user_objects
            plan.user_objects = Counter(graph.user_objects)
            retain(graph.user_objects)
        self._release(former)

    def destroy(self) -> None:
        """Destroy the executable. Launches that are queued still run."""
        self.process.remove(self)
        if self.graph.root.executable is self:
            self.graph.root.executable = None
        self._release(self.plan.all_objects())
        for memory in self.allocates:
            if not memory.in_use:
                self.process.graph_memory.unback(memory)
        self.process.graph_memory.sweep()

    def _release(self, objects: Counter[UserObject]) -> None:
        """Give references to user objects back when all queued launches have ended."""
        if self.last is None or self.last.done:
            release(self.process, objects)
        elif objects:
            command = Release(self.last.command.context, objects)
            self.process.machine.progress.submit(command, [self.last], chain=new_chain())

    def launch(self, stream: Stream) -> None:
        """Queue all steps. The stream's next operation waits for all of them. If Failure is raised, no step was
        queued.
        """
        process, progress = self.process, self.process.machine.progress
        process.refuse_implicit(stream)
        for context in {step.command.context for step in self.plan.everything() if step.command is not None}:
            process.healthy(context)
        unfreed = [memory for memory in self.allocates if memory.live]
        if unfreed and not self.flags & AUTO_FREE or any(not m.live for m in self.frees if m not in self.allocates):
            raise Failure(R.CUDA_ERROR_INVALID_VALUE)
        process.graph_memory.back(self.allocates)
        # a marker after the stream's work; the steps wait for the marker and for the previous launch
        start = progress.enqueue(stream, Command(stream.context))
        before: list[Op] = [start] if self.last is None else [start, self.last]
        for memory in unfreed:
            before = [progress.submit(Free(stream.context, memory.allocation), before, chain=stream.chain)]
        ends = _Launch(self, stream).run(self.plan, before)
        end = progress.submit(Command(stream.context), dict.fromkeys([*ends, *before]), chain=stream.chain)
        stream.tail, stream.last, self.last = [end], end, end
        for memory in (*self.allocates, *self.frees):
            memory.live, memory.last = memory not in self.frees, end


class _Launch:
    """Queues the operations of one launch of an executable."""

    def __init__(self, executable: GraphExec, stream: Stream) -> None:
        self._executable, self._stream = executable, stream
        self._progress = executable.process.machine.progress

    def run(self, plan: Plan, before: list[Op]) -> list[Op]:
        """Queue the steps of a plan after the operations `before`, and return the last operations of the plan."""
        ends: dict[Step, list[Op]] = {}
        for step in plan.steps.values():
            waits = [op for other in step.after for op in ends[other]] or before
            ends[step] = self._inner(step.inner, waits) if step.inner is not None else [self._submit(step, ends, waits)]
        last = [op for step, ops in ends.items() if step.last for op in ops]
        # the last operations include the primary of each programmatic dependent, as the dependent may end first
        overlapped = (o for s in ends for other, edge in s.after.items() if edge.programmatic for o in ends[other])
        return list(dict.fromkeys([*last, *overlapped]))

    def _inner(self, plan: Plan, waits: list[Op]) -> list[Op]:
        return self.run(plan, waits) or waits

    def _submit(self, step: Step, ends: dict[Step, list[Op]], waits: list[Op]) -> Op:
        command = step.command if step.enabled and step.command is not None else Command(self._stream.context)
        primary, priority = None, self._stream.priority
        if isinstance(command, Launch):
            if self._executable.flags & NODE_PRIORITY:
                priority = command.priority or 0
            elif command.priority is not None:
                # without NODE_PRIORITY, kernels run with the priority of the stream, which `submit` uses for None
                command = replace(command, priority=None)
            overlapped = (ends[other][0] for other, edge in step.after.items() if edge.programmatic)
            primary = next((op for op in overlapped if isinstance(op.command, Launch)), None)
        if isinstance(command, Wait) and command.event.op is not None:
            waits = [*waits, command.event.op]
        after = dict.fromkeys(op for op in waits if op is not primary)
        op = self._progress.submit(command, after, chain=step.chain, primary=primary, priority=priority)
        if isinstance(command, Record):
            command.event.op, command.event.captured = op, None
        return op
