# SPDX-License-Identifier: Apache-2.0
"""`all_gather`: the rows of all ranks, with their scales, on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .... import dtypes
from ....errors import ArgumentError, kind_of
from ....plans import moves, moves_over_nodes
from ....plans.moves_over_nodes import NodeRanks
from ....plans.moves_scales import Arrangement
from ....plans.quantisation import Quantisation
from ....runtime.array import Array
from ....runtime.interop import ArrayLike
from ...call import operands
from ...call.op import op
from ...call.operands import Operand
from ...call.options import PDLLevel
from ...call.prepared import Prepared
from ...call.streams import Streams, resolve_streams
from ..shared.split import lengths
from . import moving, over_nodes
from .part import MovePart

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....runtime.stream import Stream
    from ....trace.buffer import Trace

Arrays = ArrayLike | Sequence[ArrayLike]
"""An array for each local rank of a group; a bare array means a list of one."""


class Gathered(NamedTuple):
    """What `all_gather` returns: lists of all rows and of all scales with an array per local rank, or bare arrays.
    `scales` is None if the call has none. Arrays that the caller gave are returned as they are."""

    output: list[Array]
    scales: list[Array] | None


@op
def all_gather(
    group: Group,
    inputs: Arrays,
    outputs: Arrays | None = None,
    *,
    splits: Sequence[int] | None = None,
    scales: Arrays | None = None,
    quantisation: Quantisation | None = None,
    gathered_scales: Arrays | None = None,
    algo: str = "auto",
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[Gathered]:
    """Join the ranks' inputs along dimension 0, in the order of the ranks; every rank gets all rows.

    `inputs` is a list with one array per local rank, contiguous and on its rank's device, of at least one dimension.
    All have the same dtype, any of drvfuse's, and the same shape. With `splits`, a list with a number of rows for each
    rank of the group, rank i's input has `splits[i]` rows, and only the other dimensions are equal. `outputs` have the
    sum of the rows; None allocates them. Arrays may begin at any address and have any number of bytes, which are copied
    unchanged. In place: an input may be the part of its rank's output where its rows belong. Otherwise inputs and
    outputs must share no memory.

    Returns `Gathered(output, scales)`. `scales` are gathered by the same launch into `gathered_scales`; without them
    the result's scales are None. Without `quantisation` scales are arrays of any dtype that have a row for each row of
    the inputs, and they are joined along dimension 0.

    `quantisation` describes how rows and scales were made: inputs are codes of rows [..., columns], in the dtype of the
    `quantisation`, and rank i's scales have its layout for the rows of rank i. The gathered scales have its layout for
    the rows of all ranks. A rank's rows may begin anywhere in that layout, also within a tile: each scale is stored to
    its place, and all padding is 0. So the results are what an op with this `quantisation` writes for all rows
    together, and a GEMM can read them. In the layouts "column" and "tiles" `scales` and `gathered_scales` must share no
    memory.

    `algo` is "push" (each rank stores its rows into its peers' workspaces, in words that carry their own readiness),
    "put" and "pull" (each rank stores to its peers' outputs, or loads from their inputs, between barriers), "naive"
    (copies by the driver) or "auto". With "put" and "pull" the bytes go through the workspaces if peers cannot access
    the outputs or inputs, if a rank's rows in these arrays are not aligned to 16 bytes, and with "put" if scales are by
    column or in tiles.

    `max_num_blocks`, `pdl_level`, `streams`, `trace`, bare arrays of one rank, the order of the streams and the errors
    are as in `allreduce`. Over several nodes (docs/nodes.md) `algo` is used inside each node, and "naive" is refused.
    Scales by column or in tiles that come from other nodes are received in the workspaces, and pulled from there for
    every `algo`. `drvfuse.reference.all_gather` computes the same in numpy.
    """
    common = moving.options("all_gather", group, algo, pdl_level, max_num_blocks, trace)
    if scales is None and gathered_scales is not None:
        raise ArgumentError("gathered_scales", "given", "None, as there are no scales")
    counts = None if splits is None else lengths("splits", splits, group.size)
    sources = operands.rows_of_ranks(group, "inputs", inputs, counts, why="" if counts is None else "as splits say")
    if counts is None:
        counts = (sources[0].shape[0],) * group.size
    queues = resolve_streams(group, streams, sources)
    if quantisation is not None:
        _check_codes(quantisation, sources[0], scales)
    found = [_rows(group, "outputs", outputs, counts, sources, queues)]
    if scales is not None and (quantisation is None or quantisation.layout == "row"):
        why = "a row for each row of the inputs" + (" where no quantisation is given" if quantisation is None else "")
        factors = operands.rows_of_ranks(group, "scales", scales, counts, why=why)
        if quantisation is not None:
            _check_scales(quantisation, factors, sources)
        found.append(_rows(group, "gathered_scales", gathered_scales, counts, factors, queues))
    elif scales is not None and quantisation is not None:
        found.append(_arranged(group, scales, gathered_scales, counts, sources[0], quantisation, queues))
    parts = [part for part, _ in found]
    read = [operand for part in parts for operand in _apart(group, part)]
    operands.no_overlap(read, [target for part in parts for target in part.targets])
    # `text` is a part of `described`, which must be equal on all ranks.
    text = " and ".join(f"{part.targets[0].shape[1:]} {part.targets[0].dtype}" for part in parts)
    text += "" if quantisation is None else f", {quantisation}"
    bare = operands.is_bare(group, inputs)
    values: list[Any] = [of_ranks[0] if bare else of_ranks for _, of_ranks in found]
    result = Gathered(values[0], None if scales is None else values[1])
    described = f"of rows of shape {text}, splits {list(counts)}"
    if group.link is not None:
        tables, arrangement = [part.table for part in parts], parts[-1].arrangement
        ranks, payload_bytes = NodeRanks(group.layout.of), group.workspace.payload_bytes
        steps = moves_over_nodes.all_gather(tables, ranks, arrangement, payload_bytes)
        return over_nodes.prepare(common, described, parts, steps, queues, result)
    return moving.prepare(common, described, parts, queues, result, same=True)


def _rows(
    group: Group, argument: str, given: Any, counts: Sequence[int], sources: list[Operand], queues: Sequence[Stream]
) -> tuple[MovePart, list[Any]]:
    """Return the part of a call that gathers one argument, and the gathered arrays as the call returns them. The
    argument is the inputs, or scales that have one row for each row of the inputs."""
    first = sources[0]
    shape = (sum(counts), *first.shape[1:])
    targets, values = moving.outputs(group, argument, given, shape, first.dtype, queues, "the rows of all ranks")
    table = moves.all_gather(counts, math.prod(first.shape[1:]) * first.dtype.itemsize)
    return MovePart(sources, targets, table), values


def _check_codes(quantisation: Any, source: Operand, scales: Any) -> None:
    """Raise ArgumentError unless the arrays are codes of the quantisation, and scales are given if and only if the
    quantisation has scales."""
    if not isinstance(quantisation, Quantisation):
        raise ArgumentError("quantisation", kind_of(quantisation), "a drvfuse.Quantisation or None")
    if quantisation.dtype is not None and source.dtype != quantisation.dtype:
        expected = f"of dtype {quantisation.dtype}, as quantisation says"
        raise ArgumentError(source.name, f"of dtype {source.dtype}", expected)
    if len(source.shape) < 2:
        raise ArgumentError(source.name, f"of shape {source.shape}", "of rows and columns, as quantisation is given")
    if (quantisation.scales is None) is not (scales is None):
        expected = "None" if quantisation.scales is None else "given"
        raise ArgumentError("scales", "None" if scales is None else "given", f"{expected}, for {quantisation}")
    quantisation.check(_columns(quantisation, source.shape), dtypes.get("float32"))


def _columns(quantisation: Quantisation, shape: Sequence[int]) -> int:
    return shape[-1] * (1 if quantisation.dtype is None else quantisation.dtype.lanes)


def _scales_shape(quantisation: Quantisation, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales that belong to codes of shape `shape`."""
    found = quantisation.scales_shape(shape[:-1], _columns(quantisation, shape))
    assert found is not None
    return found


def _check_scales(quantisation: Quantisation, scales: Sequence[Operand], codes: Sequence[Operand]) -> None:
    """Raise ArgumentError unless scales in the layout "row" have the quantisation's dtype and the shape for the
    codes."""
    for scale, code in zip(scales, codes, strict=True):
        operands.require_shape(scale, _scales_shape(quantisation, code.shape), f"for {quantisation}")
        if scale.dtype != quantisation.scales:
            raise ArgumentError(scale.name, f"of dtype {scale.dtype}", f"of dtype {quantisation.scales}")


def _arranged(
    group: Group,
    scales: Any,
    gathered: Any,
    counts: Sequence[int],
    codes: Operand,
    quantisation: Quantisation,
    queues: Sequence[Stream],
) -> tuple[MovePart, list[Any]]:
    """Return the part of a call that gathers scales in the layout "column" or "tiles", and the gathered scales as the
    call returns them."""
    dtype, alignment, each = quantisation.scales, quantisation.scales_alignment, codes.shape[1:]
    assert dtype is not None
    shapes = [_scales_shape(quantisation, (counts[rank.index], *each)) for rank in group]
    why = f"for {quantisation}"
    sources = operands.of_ranks(group, "scales", scales, shapes, dtype, why, alignment=alignment)
    rows = [count * math.prod(each[:-1]) for count in counts]
    arrangement = Arrangement.of(quantisation, rows, _columns(quantisation, codes.shape))
    shape = _scales_shape(quantisation, (sum(counts), *each))
    targets, values = moving.outputs(group, "gathered_scales", gathered, shape, dtype, queues, why, alignment)
    return MovePart(sources, targets, moves.all_gather_scales(arrangement), arrangement), values


def _apart(group: Group, part: MovePart) -> list[Operand]:
    """Return the sources that are not already at their places in the targets."""
    return [
        source
        for rank, source, target in zip(group, part.sources, part.targets, strict=True)
        if part.arrangement is not None or source.ptr != target.ptr + part.table[rank.index][rank.index].target
    ]
