# SPDX-License-Identifier: Apache-2.0
"""`reduce_scatter`: each rank gets its rows of the sum of one array per rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....errors import ArgumentError
from ....plans import shared as plans
from ....plans import sums as scatter
from ....runtime.array import Array
from ....runtime.interop import ArrayLike
from ...call import operands, options
from ...call.epilogue import Epilogue
from ...call.op import op
from ...call.operands import Operand
from ...call.options import PDLLevel
from ...call.prepared import Prepared
from ...call.results import of_ranks
from ...call.streams import Streams, resolve_streams
from ..shared import plan
from ..shared.epilogue import bind, read_by
from ..shared.kernel import INPUT_DTYPES
from ..shared.options import CallOptions
from ..shared.prepare import prepare
from ..shared.split import ALGORITHMS, algorithms, in_place, owned_rows
from .reduce_scatter_call import ScatterCall

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....trace.buffer import Trace


@op
def reduce_scatter(
    group: Group,
    inputs: ArrayLike | Sequence[ArrayLike],
    outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    *,
    splits: Sequence[int] | None = None,
    algo: str = "auto",
    epilogue: Epilogue | None = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[list[Array]]:
    """Sum `inputs` over the ranks, element by element; every rank gets its rows of the sum.

    `inputs` are as for `allreduce`, of one dimension at least. Dimension 0 is split: `splits[r]` are the rows of rank
    r, in the order of the ranks, and their sum is the number of rows; 0 is allowed. None splits as `numpy.array_split`
    does: the first (rows mod ranks) ranks get one row more than the others. `outputs[i]` has the rows of its rank, and
    the other dimensions of the inputs; None allocates them. In place: `outputs[i]` may be the rows of its rank in
    `inputs[i]`. Otherwise it must be 16-byte aligned and share memory with nothing.

    The bits are those of the same rows of `allreduce`, also with `epilogue`, whose `i`, `row` and `col` are indices in
    the whole tensor. The epilogue may differ by rank: each element has the parameters of the rank that gets it. Where a
    part does not begin or end at a multiple of 16 bytes, its ends are read and written element by element.

    `algo` is "push" (each rank sends to every peer the part that this peer gets, and sums what it receives), "pull"
    (each rank loads its part of its peers' inputs, after a barrier), "naive" (copies between devices, which need peer
    access to the inputs only in a graph capture) or "auto". `pdl_level`, `max_num_blocks`, `streams`, `trace` and
    errors are as for `allreduce`. Over several nodes `algo` is used inside each node, and "naive" is refused; the
    partial sums of the nodes are added in the order of the nodes, whatever the group's `node_order` is (docs/nodes.md).
    `drvfuse.reference.reduce_scatter` computes the same in numpy.
    """
    common = CallOptions.of("reduce_scatter", group, algo, ALGORITHMS, pdl_level, max_num_blocks, trace)

    sources = operands.of_ranks(group, "inputs", inputs)
    first = sources[0]
    shape, dtype, nbytes = first.shape, first.dtype, first.array.nbytes
    options.one_of(f"dtype of {first.name}", dtype.name, INPUT_DTYPES)
    if not shape:
        raise ArgumentError(first.name, "of shape ()", "of at least one dimension, which is split")
    rows = owned_rows(group, shape[0], splits)
    bound = bind(group, epilogue) if epilogue is not None else None
    parts = scatter.Parts.of(rows, math.prod(shape[1:]), plans.PACK_BYTES // dtype.itemsize)
    shapes = [(rows[rank.index], *shape[1:]) for rank in group]

    targets: list[Operand] = []
    if outputs is not None:
        why = "the rows of its rank"
        targets = operands.of_ranks(
            group, "outputs", outputs, shapes, dtype, why, alignment=dtype.itemsize, writable=True
        )
        starts = [parts.starts[rank.index] * dtype.itemsize for rank in group]
        operands.no_overlap(read_by(sources, bound), targets, in_place(sources, targets, starts))
    received = (group.layout.inside - 1) * parts.largest * plans.PACK_BYTES
    algos = algorithms(common.op, group, algo, received, sources)
    queues = resolve_streams(group, streams, sources)
    written, values = of_ranks(group, "outputs", outputs, targets, shapes, dtype, queues)
    addresses, results = [source.ptr for source in sources], [target.ptr for target in written]

    def make(algo: str) -> ScatterCall:
        staged = algo == "pull" and nbytes > 0 and not plan.readable_by_peers(group, sources)
        return ScatterCall(common, dtype, shape, rows, parts, algo, staged, bound)

    return prepare(
        common,
        algos,
        make,
        (lambda call: call.sequence(addresses, results)) if nbytes else None,
        values[0] if operands.is_bare(group, inputs) else values,
        [[source] for source in sources],
        [[target] for target in written],
        queues,
        bound,
    )
