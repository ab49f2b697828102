# SPDX-License-Identifier: Apache-2.0
"""The plan of a collective on a group, and its launches on every local rank, which are complete except for the
addresses of the arrays."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .... import config
from ....comm.workspace import EPOCH_UNIT
from ....errors import ArgumentError, Unsupported
from ....plans.push import PushShape, trace_phases
from ....plans.shared import LaunchShape, barriers, trace_counts
from ....runtime import reach
from ...call import faults
from ...call.operands import Operand
from ...call.options import PDLLevel
from ...call.planned import PlanCache, Planned, Ready
from ...call.specialisation import load
from ...call.tracing import CallTrace
from .kernel import CollectiveKernel, Kernel
from .params import Call, PushCall

if TYPE_CHECKING:
    from ....comm.group import Group


class Grid(NamedTuple):
    """The number of blocks of a push launch. The first warp (or block) of the grid adds `first_share` to the epoch, and
    every other warp (or block) adds `share`. Together they advance the epoch by one step, or not at all if the number
    of rounds is even."""

    blocks: int
    first_share: int
    share: int


@dataclass(frozen=True)
class Plan:
    """A collective's kernel, its grid, and the parameters that all ranks share.

    `traced` has the largest number of phases, and of barriers, that a traced block records. A launch advances the epoch
    by `steps`. `alone` is the grid while no other group is open on the devices, or None if that does not change the
    grid. `tailor(parameters, rank)` writes the parameters that differ by rank.
    """

    kernel: Kernel
    blocks: int
    threads: int
    traced: tuple[int, int]
    steps: int
    parameters: Any
    alone: Grid | None = None
    tailor: Callable[[Any, int], None] | None = None


def pull(kernel: CollectiveKernel, shape: LaunchShape, units: int, chunk: int, parameters: ctypes.Structure) -> Plan:
    """Return the plan of a pull algorithm for `units` packs or rows in chunks of `chunk` packs or rows."""
    counts = trace_counts(kernel.work, shape, units, chunk)
    return Plan(kernel, shape.blocks, shape.threads, counts, barriers(kernel.work, units, chunk), parameters)


def push(group: Group, kernel: Kernel, shape: PushShape, blocks: int, alone: int, parameters: Any) -> Plan:
    """Return the plan of a push algorithm on up to `blocks` multiprocessors, or up to `alone` while no other group is
    open on the devices. It loads the kernel on all devices, and the lowest occupancy decides the grid."""
    spec = kernel.specialisation
    resident = min(load(rank.device, spec).occupancy(rank.device, shape.threads) for rank in group)
    by_block = kernel.wide_blocks_share and shape.threads > 256

    def grid(multiprocessors: int) -> Grid:
        count = shape.blocks(multiprocessors * resident)
        return Grid(count, *shape.shares(count, EPOCH_UNIT, by_block))

    narrow, wide = grid(blocks), grid(alone)
    half = group.workspace.half_bytes
    parameters.push = PushCall(first_share=narrow.first_share, share=narrow.share, half_bytes=half, rounds=shape.rounds)
    group.workspace.require_slots(shape.slot_bytes)
    phases = trace_phases(shape, narrow.blocks)
    larger = wide if wide.blocks > narrow.blocks else None
    return Plan(kernel, narrow.blocks, shape.threads, (phases, 0), shape.rounds % 2, parameters, larger)


def capability(group: Group) -> tuple[int, int]:
    """Return the lowest compute capability of the group's devices."""
    return min(member.capability for member in group.transport.members)


def compares(group: Group) -> bool:
    """Whether kernels of the group that wait for peers compare the calls of the ranks."""
    return group.calls is not None and not group.calls.first


def take(
    group: Group,
    key: Hashable,
    plan: Callable[[], Plan],
    table: Sequence[Sequence[int]],
    inputs: Sequence[int],
    pdl: PDLLevel,
    trace: CallTrace | None,
    more: Sequence[ctypes.Structure] = (),
) -> list[Ready]:
    """Return a launch for each local rank. The plan is the one that the group keeps under `key`; if there is none, it
    is `plan()`, which is then kept.

    The key holds everything that `plan()` depends on besides the group. `more[i]` is the second argument of rank i's
    kernel. `take` writes the addresses that every collective has: `table[i]` are the addresses from which rank i
    sums, and `inputs[i]` is the address of its input.
    """
    further: list[Sequence[Any]] = [(structure,) for structure in more] or [()] * len(group.ranks)
    if trace is None:
        key = (key, pdl.value, compares(group), faults.planted())
        planned = group.part(PlanCache).get(key, lambda: _planned(group, plan(), pdl))
    else:
        made = plan()
        found = trace.reserve(made.kernel.traced_name, made.blocks, *made.traced, made.kernel.ranks)
        kernel = made.kernel.traced_by(found[0].capacity)
        planned = _planned(group, dataclasses.replace(made, kernel=kernel), pdl)
        further = [[*arguments, section.parameters] for arguments, section in zip(further, found, strict=True)]
    timeout = int(config.get("spin_timeout") * 1e9)
    ready = []
    for of_rank, arguments, sources, own in zip(planned, further, table, inputs, strict=True):
        one = of_rank.take(arguments)
        one.point("call.sources", *sources)
        one.point("call.input", own)
        one.parameters.call.timeout_ns = timeout
        if of_rank.adapts is not None:
            group.alone.add(one)
        ready.append(one)
    return ready


def call_of_rank(group: Group, position: int) -> Call:
    """Return the `Call`, a part of the parameters of a collective's kernel, for a local rank. The tables of a `Call`
    have an entry for each rank of the same node, in the order of the ranks."""
    workspace, layout, rank = group.workspace, group.layout, group.ranks[position].index
    call = Call(report=workspace.report_pointers[rank], rank=layout.place(rank))
    call.workspaces[: layout.inside] = [workspace.pointers[peer] for peer in layout.ranks(layout.of[rank])]
    return call


def _planned(group: Group, plan: Plan, pdl: PDLLevel) -> list[Planned]:
    """Return the plan on every local rank, with the kernel loaded and the parameters that differ by rank written."""
    workspace, specialisation, found = group.workspace, plan.kernel.specialisation, []
    early = pdl is PDLLevel.OVERLAP_AT_BEGINNING
    for position, rank in enumerate(group.ranks):
        template = type(plan.parameters).from_buffer_copy(plan.parameters)
        template.call = call_of_rank(group, position)
        template.call.early_trigger = int(early)
        if plan.kernel.pushes:
            peers, place = group.layout.ranks(group.layout.of[rank.index]), group.layout.place(rank.index)
            slots = [workspace.pointers[peer] + workspace.slots_offset for peer in peers]
            template.push.slots[: len(peers)] = slots[place:] + slots[:place]
        if plan.tailor is not None:
            plan.tailor(template, rank.index)
        if plan.kernel.uses_staging:
            staging = group.multicast_staging()
            template.multimem.staging, template.multimem.all_staging = staging.ptrs[rank.index], staging.multicast_ptr
        planned = Planned(
            rank.device,
            specialisation,
            plan.blocks if plan.alone is None else plan.alone.blocks,
            plan.threads,
            template,
            pdl=pdl,
            cluster=plan.kernel.cluster,
            barriers=plan.steps,
            awaits_peers=not plan.kernel.local,
            compares=plan.kernel.compares,
            adapts=_adapting(plan, early and not plan.kernel.local),
        )
        found.append(planned)
    return found


def _adapting(plan: Plan, early: bool) -> Callable[[Ready, bool, bool], None] | None:
    """Return the function that changes a launch of the plan (`Ready.adapt`) when the group becomes alone on its
    devices, and when it is no longer alone. Return None if launches of the plan never change."""
    larger = plan.alone
    if larger is None and not early:
        return None

    def adapt(ready: Ready, alone: bool, wide: bool) -> None:
        if early:
            ready.parameters.call.early_trigger = int(alone)
        if larger is not None:
            push = plan.parameters.push
            grid = larger if wide else Grid(plan.blocks, push.first_share, push.share)
            ready.launch.resize(grid.blocks)
            ready.parameters.push.first_share, ready.parameters.push.share = grid.first_share, grid.share

    return adapt


def readable_by_peers(group: Group, inputs: Sequence[Operand]) -> bool:
    """Whether kernels can access those of `inputs` that they need where these lie, without staging. They cannot access
    an array of another process's rank."""
    if group.layout.inside == 1 and group.nodes > 1:  # a rank alone on its node reads only its own input
        return True
    if not group.peers_readable or len(group) < group.size:
        return False
    return all(
        operand.array.pooled  # all devices of the group can access the pools' memory
        or all(
            rank.device is operand.device or reach.readable_by(operand.ptr, operand.array.nbytes, rank.device)
            for rank in group.ranks
        )
        for operand in inputs
    )


def sources(group: Group, inputs: Sequence[int], multimem: bool) -> Sequence[int]:
    """Return the addresses from which a kernel sums, by rank: `inputs`, or no addresses if the kernel reads inputs
    through multicast memory or from the staging of other processes."""
    return [] if multimem or len(group) < group.size else inputs


def require_peers(group: Group, algo: str) -> None:
    """Raise Unsupported if the devices lack the peer access that `algo` needs, or if the ranks are in several processes
    and `algo` needs them in one."""
    if algo == "naive" and len(group) < group.size:
        raise Unsupported(
            'algo="naive" orders the copies of all ranks by events, so it needs all of them in one process: use "auto" '
            "or another algorithm"
        )
    if algo != "naive" and not group.peers_readable:
        raise Unsupported(
            f'algo="{algo}" needs peer access between all devices, and these pairs (from, to) lack it: '
            f'{list(group.transport.missing)}; use algo="naive" or "auto"'
        )


def require_moves(group: Group, op: str, algo: str) -> None:
    """Raise an error unless `op` can run by `algo` on a group over several nodes: ArgumentError for "naive",
    Unsupported if the devices of a node lack peer access or the engine cannot move bytes.
    """
    if algo == "naive":
        raise ArgumentError("algo", '"naive"', 'another algorithm, such as "auto", as the group is over several nodes')
    require_peers(group, algo)
    assert group.link is not None
    group.link.require_all_to_all(op)
