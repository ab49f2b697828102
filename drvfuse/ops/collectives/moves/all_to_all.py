# SPDX-License-Identifier: Apache-2.0
"""`all_to_all`: every rank sends some of its rows to every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....errors import ArgumentError, counted, kind_of
from ....plans import moves, moves_over_nodes
from ....plans.moves_over_nodes import NodeRanks
from ....runtime.array import Array
from ....runtime.interop import ArrayLike
from ...call import operands
from ...call.op import op
from ...call.options import PDLLevel
from ...call.prepared import Prepared
from ...call.streams import Streams, resolve_streams
from ..shared.split import lengths
from . import moving, over_nodes
from .part import MovePart

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....trace.buffer import Trace


@op
def all_to_all(
    group: Group,
    inputs: ArrayLike | Sequence[ArrayLike],
    outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    *,
    splits: Sequence[Sequence[int]] | None = None,
    algo: str = "auto",
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[list[Array]]:
    """Send rows of every rank's input to every rank. Along dimension 0 an input has the rows for rank 0, then those for
    rank 1 and so on, and an output has the rows from rank 0, then those from rank 1 and so on.

    `inputs` is a list with one array per local rank, as in `all_gather`. Without `splits` all inputs have the same
    shape, and every rank gets equally many rows from each input, so the number of rows must be a multiple of the
    group's size. `splits` is a table of integers, the same on all ranks: `splits[i][j]` rows go from rank i to rank j,
    so rank i's input has as many rows as the sum of row i of the table, and its output as many as the sum of column i.
    If `outputs` is None, they are allocated. In place: `outputs[i]` may be `inputs[i]` itself if for all ranks i and j
    as many rows go from i to j as from j to i. Then the rows from a rank replace the rows for that rank.

    The other arguments, alignment and errors are as for `all_gather`. `drvfuse.reference.all_to_all` computes the same
    in numpy.
    """
    common = moving.options("all_to_all", group, algo, pdl_level, max_num_blocks, trace)
    ranks = range(group.size)
    if splits is None:
        sources = operands.rows_of_ranks(group, "inputs", inputs, None)
        rows = sources[0].shape[0]
        if rows % group.size:
            expected = f"of a multiple of {group.size} rows where no splits are given"
            raise ArgumentError(sources[0].name, f"of shape {sources[0].shape}", expected)
        counts = ((rows // group.size,) * group.size,) * group.size
    else:
        counts = _table(splits, group.size)
        sources = operands.rows_of_ranks(group, "inputs", inputs, [sum(of) for of in counts], why="as splits say")
    first = sources[0]
    queues = resolve_streams(group, streams, sources)
    shapes = [(sum(of_rank[rank.index] for of_rank in counts), *first.shape[1:]) for rank in group]
    targets, values = moving.outputs(group, "outputs", outputs, shapes, first.dtype, queues, "the rows from all ranks")
    uneven = next(((i, j) for i in ranks for j in ranks if counts[i][j] != counts[j][i]), None)
    if uneven is None:
        operands.no_overlap(sources, targets, list(zip(sources, targets, strict=True)))
    else:
        (i, j) = uneven
        operands.no_overlap(sources, targets, why=f", as splits[{i}][{j}] and splits[{j}][{i}] differ")
    table = moves.all_to_all(counts, math.prod(first.shape[1:]) * first.dtype.itemsize)
    described = f"of rows of shape {first.shape[1:]} {first.dtype}, splits {[list(row) for row in counts]}"
    parts = [MovePart(sources, targets, table)]
    result = values[0] if operands.is_bare(group, inputs) else values
    in_place = any(s.ptr == t.ptr and s.ptr for s, t in zip(sources, targets, strict=True))
    if group.link is not None:
        steps = moves_over_nodes.all_to_all(table, NodeRanks(group.layout.of), group.workspace.payload_bytes)
        return over_nodes.prepare(common, described, parts, steps, queues, result, in_place)
    return moving.prepare(common, described, parts, queues, result, same=False, in_place_hazard=in_place)


def _table(splits: Any, ranks: int) -> tuple[tuple[int, ...], ...]:
    if isinstance(splits, np.ndarray):
        splits = splits.tolist()
    if not isinstance(splits, (list, tuple)):
        raise ArgumentError("splits", kind_of(splits), f"a {ranks} x {ranks} table of row counts")
    if len(splits) != ranks:
        got, expected = (f"a table of {counted(count, 'row')}" for count in (len(splits), ranks))
        raise ArgumentError("splits", got, f"{expected}, one for each rank of the group")
    return tuple(lengths(f"splits[{i}]", row, ranks) for i, row in enumerate(splits))
