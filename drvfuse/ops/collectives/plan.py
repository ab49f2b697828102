# SPDX-License-Identifier: Apache-2.0
"""From what a collective is to launches on every local rank, whose parameters lack the addresses alone."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from ... import config
from ...errors import Unsupported
from ...plans.collectives import LaunchShape, barriers, trace_counts
from ...runtime import interop
from ..call import faults
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.planned import PlanCache, Planned, Ready
from ..call.tracing import CallTrace
from .kernels import Call, CollectiveKernel

if TYPE_CHECKING:
    from ...comm.group import Group

Plan = Callable[[], tuple[CollectiveKernel, LaunchShape, int, int, ctypes.Structure]]
"""Makes (kernel, grid, elements or rows, those of a chunk, the parameters that all ranks share)."""


def take(
    group: Group,
    key: Hashable,
    plan: Plan,
    table: Sequence[Sequence[int]],
    inputs: Sequence[int],
    pdl: PDLLevel,
    trace: CallTrace | None,
    more: Sequence[ctypes.Structure] = (),
) -> list[Ready]:
    """A launch per local rank; `key` is all that `plan()` depends on besides the group. `more[i]` is the second
    argument of rank i's kernel. Of addresses those are written that every collective has: `table[i]` are the arrays
    that rank i sums, `inputs[i]` is its own."""
    behind: list[Sequence[Any]] = [(structure,) for structure in more] or [()] * len(group.ranks)
    if trace is None:
        planned = group.part(PlanCache).get((key, pdl.value, faults.planted()), lambda: _planned(group, *plan(), pdl))
    else:
        spec, shape, items, chunk, shared = plan()
        name = f"{spec.op}_naive" if spec.local else spec.name
        found = trace.reserve(name, shape.blocks, *trace_counts(spec.work, shape, items, chunk), spec.ranks)
        spec = dataclasses.replace(spec, traced=found[0].capacity)
        planned = _planned(group, spec, shape, items, chunk, shared, pdl)
        behind = [[*arguments, section.parameters] for arguments, section in zip(behind, found, strict=True)]
    timeout = int(config.get("spin_timeout") * 1e9)
    ready = []
    for of_rank, arguments, sources, own in zip(planned, behind, table, inputs, strict=True):
        one = of_rank.take(arguments)
        one.point("call.sources", *sources)
        one.point("call.input", own)
        one.parameters.call.timeout_ns = timeout
        ready.append(one)
    return ready


def _planned(
    group: Group,
    spec: CollectiveKernel,
    shape: LaunchShape,
    items: int,
    chunk: int,
    shared: Any,
    pdl: PDLLevel,
) -> list[Planned]:
    """The kernel on every local rank, loaded there, with the rank's own parameters."""
    workspace, specialisation, found = group.workspace, spec.specialisation, []
    for position, rank in enumerate(group.ranks):
        template = type(shared).from_buffer_copy(shared)
        template.call = Call(
            report=workspace.report_pointers[position],
            rank=rank.index,
            early_trigger=int(pdl is PDLLevel.OVERLAP_AT_BEGINNING),
        )
        template.call.workspaces[: group.size] = list(workspace.pointers)
        passed = barriers(spec.work, items, chunk)
        planned = Planned(rank.device, specialisation, shape.blocks, shape.threads, template, pdl=pdl, barriers=passed)
        found.append(planned)
    return found


def readable_by_peers(group: Group, inputs: Sequence[Operand]) -> bool:
    """Whether the kernels of every rank can read every rank's input where it lies."""
    if not group.peers_readable:
        return False
    return all(
        operand.array.pooled  # the group has opened the pools to all its devices
        or all(
            rank.device is operand.device or interop.readable_by(operand.ptr, operand.array.nbytes, rank.device)
            for rank in group.ranks
        )
        for operand in inputs
    )


def require_peers(group: Group, algo: str) -> None:
    """Raise Unsupported if `algo` needs peer access that the devices lack."""
    if algo != "naive" and not group.peers_readable:
        raise Unsupported(
            f'algo="{algo}" needs peer access between all devices, and these pairs (from, to) lack it: '
            f'{list(group.transport.missing)}; use algo="naive" or "auto"'
        )
