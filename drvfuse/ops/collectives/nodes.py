# SPDX-License-Identifier: Apache-2.0
"""All-reduces of a group over several nodes: chunk by chunk a kernel, an exchange of partial sums, and a kernel.

docs/nodes.md says what each does, the `.cu` files why that is in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...comm.workspace import PAYLOAD_OFFSET
from ...errors import ArgumentError, Unsupported
from ...plans import collectives as plans
from ...plans.nodes import Chunk
from ..call.options import PDLLevel
from ..call.planned import Ready
from ..call.tracing import CallTrace
from . import plan
from .across_nodes import Kernels, Stage, Sums, level_inside, link, sources_inside
from .kernels import CollectiveKernel
from .params import NodeSumsParams

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...dtypes import DType

ALGORITHM = "two_stage"


def algorithm(group: Group, algo: str, use_multimem: bool) -> str:
    """The algorithm inside nodes that `algo` asks for. ArgumentError for another one than "auto" and "two_stage".

    Raises Unsupported for multicast, and without peer access inside a node.
    """
    if use_multimem:
        raise Unsupported("use_multimem=True sums inside the switches of one node; the group has several")
    if algo not in ("auto", ALGORITHM):
        raise ArgumentError("algo", f'"{algo}"', f'"auto" or "{ALGORITHM}" for a group over several nodes')
    plan.require_peers(group, ALGORITHM)
    return ALGORITHM


@dataclass(frozen=True)
class Tensor:
    """What `node_sums` sees of a chunk: rows of `columns` elements and `row_packs` packs."""

    dtype: DType
    columns: int
    row_packs: int


def sums(
    group: Group,
    tensor: Tensor,
    chunk: Chunk,
    inputs: Sequence[int],
    blocks: int,
    pdl: PDLLevel,
    trace: CallTrace | None,
) -> list[Ready]:
    """Launches of `node_sums` on every local rank, for the chunk that begins at `inputs[i]` on local rank i."""
    table = sources_inside(group, inputs)
    level = level_inside(pdl)
    key = ("node_sums", tensor.dtype.name, tensor.columns, tensor.row_packs, chunk.items, chunk.share, blocks)
    found = plan.take(group, key, lambda: _plan(group, tensor, chunk, blocks), table, inputs, level, trace)
    point(group, found, chunk, own=True)
    return found


def _plan(group: Group, tensor: Tensor, chunk: Chunk, blocks: int) -> plan.Plan:
    share, itemsize = chunk.share, tensor.dtype.itemsize
    shape = plans.allreduce_launch(chunk.items * share.packs * share.width, itemsize, share.inside, ALGORITHM, blocks)
    spec = CollectiveKernel(
        op="node_sums",
        algo=ALGORITHM,
        dtype=tensor.dtype,
        ranks=share.inside,
        out_dtype=tensor.dtype,
        packs=shape.packs,
        ragged=plans.ragged(tensor.columns, itemsize),
        staged=share.staged,
        compares=plan.compares(group),
    )
    parameters = NodeSumsParams(
        columns=tensor.columns,
        row_packs=tensor.row_packs,
        items=chunk.items,
        item_packs=share.packs,
        staging=chunk.staging,
    )
    largest = chunk.largest * share.packs
    return plan.pull(spec, shape, largest * share.inside, largest, parameters)


def point(group: Group, launches: Sequence[Ready], chunk: Chunk, own: bool = False) -> None:
    """Write to the parameters where the partial sums of the chunk lie: those of the `own` node, or all."""
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


def stages(group: Group, chunk: Chunk, before: Sequence[Ready], after: Sequence[Ready]) -> list[Stage]:
    """A chunk: the kernels before the exchange, the exchange, and the kernels after it, on every local rank."""
    memory = [(_sums_of(group, rank.index, chunk), chunk.count(group.layout.place(rank.index))) for rank in group]
    return [Kernels(before), Sums(memory), Kernels(after)]
