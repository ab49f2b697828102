# SPDX-License-Identifier: Apache-2.0
"""`all_gather`: the rows of all ranks, on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import ArgumentError
from ...plans import moves, node_moves
from ...plans.node_moves import NodeRanks
from ...runtime.array import Array
from ...runtime.interop import ArrayLike
from ..call import operands
from ..call.op import op
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.prepared import Prepared
from ..call.streams import Streams, resolve_streams
from . import moving, node_moving
from .moving import MovePart

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...runtime.stream import Stream
    from ...trace.buffer import Trace


class Gathered(NamedTuple):
    """What `all_gather` returns with scales: all rows and all scales, on every local rank."""

    output: list[Array]
    scales: list[Array]


@op
def all_gather(
    group: Group,
    inputs: ArrayLike | Sequence[ArrayLike],
    outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    *,
    splits: Sequence[int] | None = None,
    scales: ArrayLike | Sequence[ArrayLike] | None = None,
    gathered_scales: ArrayLike | Sequence[ArrayLike] | None = None,
    algo: str = "auto",
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[list[Array] | Gathered]:
    """Join the ranks' inputs along dimension 0, in the order of the ranks; every rank gets all rows.

    `inputs` is a list with one array per local rank, contiguous and on its rank's device, of at least one dimension.
    All have one dtype, any of drvfuse's, and one shape. With `splits`, a list of a number of rows for each rank of the
    group, rank i's input has `splits[i]` rows, and only the other dimensions are equal. `outputs` have the sum of the
    rows; None allocates them. Arrays may begin at any address and have any number of bytes, which arrive as they are.
    In place: an input may be the part of its rank's output where its rows belong; else they share no memory.

    With `scales`, arrays of any dtype that have a row for each row of the inputs, these are gathered likewise, by the
    same launch, into `gathered_scales`, and a `Gathered` is returned: (outputs, scales). So FP8 rows travel with their
    scales.

    `algo` is "push" (each rank stores its rows into its peers' workspaces, in words that carry their own readiness),
    "put" and "pull" (each rank stores to its peers' outputs, or loads from their inputs, between barriers), "naive"
    (copies by the driver) or "auto". By "put" and "pull" the bytes pass the workspaces where peers cannot access
    outputs or inputs, or where these or their rows are not aligned to 16 bytes.

    `max_num_blocks`, `pdl_level`, `streams`, `trace` and what a list of one rank may be are as in `allreduce`; so are
    the order of the streams and the errors. Over several nodes `algo` is used inside each node, and
    "naive" is refused (docs/nodes.md).
    """
    common = moving.options("all_gather", group, algo, pdl_level, max_num_blocks, trace)
    if gathered_scales is not None and scales is None:
        raise ArgumentError("gathered_scales", "given", "None, as there are no scales")
    counts = None if splits is None else moving.lengths("splits", splits, group.size)
    sources = operands.rows_of_ranks(group, "inputs", inputs, counts, why="" if counts is None else "as splits say")
    if counts is None:
        counts = (sources[0].shape[0],) * group.size
    queues = resolve_streams(group, streams, sources)
    factors: list[Operand] = []
    if scales is not None:
        factors = operands.rows_of_ranks(group, "scales", scales, counts, why="a row for each row of the inputs")
    rows = _targets(group, "outputs", outputs, counts, sources, queues)
    found = (
        [rows]
        if scales is None
        else [rows, _targets(group, "gathered_scales", gathered_scales, counts, factors, queues)]
    )
    read = [operand for part, _ in found for operand in _apart(group, part)]
    operands.no_overlap(read, [target for part, _ in found for target in part.targets])
    parts = [part for part, _ in found]
    text = " and ".join(f"{part.sources[0].shape[1:]} {part.sources[0].dtype}" for part in parts)
    bare = operands.is_bare(group, inputs)
    values: list[Any] = [of_ranks[0] if bare else of_ranks for _, of_ranks in found]
    result: list[Array] | Gathered = values[0] if scales is None else Gathered(*values)
    described = f"of rows of shape {text}, splits {list(counts)}"
    if group.link is not None:
        steps = node_moves.all_gather([part.table for part in parts], NodeRanks(group.layout.of))
        return node_moving.prepare(common, described, parts, steps, queues, result)
    return moving.prepare(common, described, parts, queues, result, same=True)


def _targets(
    group: Group, argument: str, given: Any, counts: Sequence[int], sources: list[Operand], queues: Sequence[Stream]
) -> tuple[MovePart, list[Any]]:
    first = sources[0]
    shape = (sum(counts), *first.shape[1:])
    targets, values = moving.outputs(group, argument, given, shape, first.dtype, queues, "the rows of all ranks")
    table = moves.all_gather(counts, math.prod(first.shape[1:]) * first.dtype.itemsize)
    return MovePart(sources, targets, table), values


def _apart(group: Group, part: MovePart) -> list[Operand]:
    """The sources that do not already lie at their place in the targets."""
    return [
        source
        for rank, source, target in zip(group, part.sources, part.targets, strict=True)
        if source.ptr != target.ptr + part.table[rank.index][rank.index].target
    ]
