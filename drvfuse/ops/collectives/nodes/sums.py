# SPDX-License-Identifier: Apache-2.0
"""All-reduces of a group over several nodes: chunk by chunk a kernel, an exchange of partial sums, and a kernel.

docs/nodes.md describes each step. Comments in the `.cu` files of the kernels argue why the order of memory accesses is
right.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ....comm.workspace import PAYLOAD_OFFSET
from ....errors import ArgumentError, Unsupported
from ....plans import sums as plans
from ....plans.nodes import Chunk, Share, chunks
from ....plans.shared import ragged as not_whole
from ...call.planned import Ready
from ...call.prepared import LaunchSequence
from ..shared import plan
from ..shared.kernel import CollectiveKernel
from ..shared.options import CallOptions
from ..shared.params import Call, NodeCall, of_collective
from .stages import AcrossNodes, Kernels, Stage, Sums, level_inside, link, sources_inside

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....dtypes import DType

ALGORITHM = "two_stage"


@of_collective("collectives/nodes/node_sums.cu", parts=(Call, NodeCall))
class NodeSumsParams(ctypes.Structure):
    """The parameters of `node_sums`."""


@dataclass(frozen=True)
class NodeSumsKernel(CollectiveKernel):
    """The kernel that writes the partial sums of a node, for every family."""

    family: ClassVar[str] = "nodes"
    ops: ClassVar[tuple[str, ...]] = ("node_sums",)

    @property
    def name(self) -> str:
        return self.op

    @property
    def work_fields(self) -> dict[str, Any]:
        return super().work_fields | {"partial": True}


def algorithm(group: Group, algo: str, use_multimem: bool) -> str:
    """Return the algorithm inside nodes that `algo` asks for. Raises ArgumentError unless that is "auto" or
    "two_stage".

    Raises Unsupported for multicast, and if the devices of a node lack peer access.
    """
    if use_multimem:
        raise Unsupported("use_multimem=True sums in the switches inside one node, and the group has several nodes")
    if algo not in ("auto", ALGORITHM):
        raise ArgumentError("algo", f'"{algo}"', f'"auto" or "{ALGORITHM}" for a group over several nodes')
    plan.require_peers(group, ALGORITHM)
    return ALGORITHM


def sums(
    options: CallOptions,
    dtype: DType,
    ragged: bool,
    chunk: Chunk,
    inputs: Sequence[int],
    parameters: NodeSumsParams,
    key: Hashable,
    many: int = 0,
) -> list[Ready]:
    """Return launches of `node_sums` on every local rank, for the chunk that begins at `inputs[i]` on local rank i.

    `parameters` describe the layout of items in the input. `key` holds every value on which `parameters` and the plan
    depend. `ragged`: an item may have a partial pack. `many` is that of the kernel.
    """
    group = options.group
    level = level_inside(options.pdl)
    found = plan.take(
        group,
        ("node_sums", key),
        lambda: _plan(options, dtype, ragged, chunk, parameters, many),
        sources_inside(group, inputs),
        inputs,
        level,
        options.trace,
    )
    point(group, found, chunk, own=True)
    return found


def sums_of_rows(
    options: CallOptions, dtype: DType, columns: int, row_packs: int, chunk: Chunk, inputs: Sequence[int]
) -> list[Ready]:
    """Return launches of `node_sums` for rows; each row has `columns` elements, in `row_packs` packs."""
    parameters = NodeSumsParams(columns=columns, row_packs=row_packs)
    key = (dtype.name, columns, row_packs, chunk.items, chunk.share, options.blocks)
    return sums(options, dtype, not_whole(columns, dtype.itemsize), chunk, inputs, parameters, key)


def _plan(
    options: CallOptions,
    dtype: DType,
    ragged: bool,
    chunk: Chunk,
    parameters: NodeSumsParams,
    many: int,
) -> plan.Plan:
    share, elements = chunk.share, chunk.items * chunk.share.packs * chunk.share.width
    shape = plans.launch(elements, dtype.itemsize, share.inside, ALGORITHM, options.blocks)
    spec = NodeSumsKernel(
        op="node_sums",
        algo=ALGORITHM,
        dtype=dtype,
        ranks=share.inside,
        out_dtype=dtype,
        packs=shape.packs,
        ragged=ragged,
        staged=share.staged,
        many=many,
        compares=plan.compares(options.group),
    )
    parameters.items, parameters.item_packs, parameters.staging = chunk.items, share.packs, chunk.staging
    largest = chunk.largest * share.packs
    return plan.pull(spec, shape, largest * share.inside, largest, parameters)


def point(group: Group, launches: Sequence[Ready], chunk: Chunk, own: bool = False) -> None:
    """Write the address of the chunk's partial sums to the parameters: those of this rank's node if `own`, otherwise
    those of all nodes."""
    joined = link(group)
    for ready, rank, progress in zip(launches, group, joined.progress, strict=True):
        node, place = group.layout.of[rank.index], group.layout.place(rank.index)
        call = ready.parameters.node
        call.stride, call.nodes, call.progress = 4 * chunk.count(place), joined.places, progress
        call.sums = _sums_of(group, rank.index, chunk)
        if own and joined.places > 1:
            call.sums += node * call.stride


def _sums_of(group: Group, rank: int, chunk: Chunk) -> int:
    return group.workspace.pointers[rank] + PAYLOAD_OFFSET + chunk.sums


def sequence(
    group: Group,
    items: int,
    share: Share,
    before: Callable[[Chunk], list[Ready]],
    after: Callable[[Chunk], list[Ready]],
) -> tuple[LaunchSequence, list[Ready]]:
    """Return the launch sequence for `items` items, chunk by chunk: the launches `before`, which write partial sums, an
    exchange of these, and the launches `after`, which read the sums of all nodes. Return all launches too."""
    stages: list[Stage] = []
    every: list[Ready] = []
    for chunk in chunks(items, share, group.workspace.payload_bytes):
        first, last = before(chunk), after(chunk)
        point(group, last, chunk)
        memory = [(_sums_of(group, rank.index, chunk), chunk.count(group.layout.place(rank.index))) for rank in group]
        stages += [Kernels(first), Sums(memory), Kernels(last)]
        every += [*first, *last]
    return AcrossNodes(group, stages), every
