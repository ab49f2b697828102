# SPDX-License-Identifier: Apache-2.0
"""`reduce_scatter`: each rank gets its rows of the sum of one array per rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....errors import ArgumentError, CompileError
from ....plans import nodes_parts as shares
from ....plans import push, traffic
from ....plans import sums as plans
from ....plans.limits import ceil_div
from ....plans.shared import PACK_BYTES, naive_slot
from ....runtime.array import Array
from ....runtime.interop import ArrayLike
from ...call import operands, options
from ...call.epilogue import Epilogue
from ...call.op import op
from ...call.operands import Operand
from ...call.options import PDLLevel
from ...call.planned import Ready
from ...call.prepared import Direct, LaunchSequence, Prepared
from ...call.results import of_ranks
from ...call.streams import Streams, resolve_streams
from ..shared import naive, plan
from ..shared.epilogue import BoundEpilogue, bind, read_by
from ..shared.kernel import INPUT_DTYPES
from ..shared.options import CallOptions
from ..shared.prepare import prepare
from ..shared.split import ALGORITHMS, FORMS, algorithms, in_place, owned_rows
from . import over_nodes
from .kernel import SumsKernel
from .params import Range, ScatterNodesParams, ScatterParams, ScatterPushParams

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....dtypes import DType
    from ....trace.buffer import Trace


@dataclass(frozen=True)
class ReduceScatterCall:
    """The properties of one reduce-scatter that are the same on every rank."""

    options: CallOptions
    dtype: DType
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    parts: plans.Parts
    algo: str
    staged: bool
    epilogue: BoundEpilogue | None

    @property
    def name(self) -> str:
        """The name of the algorithm in messages and in `Prepared.algo`."""
        return self.algo

    @property
    def text(self) -> str:
        """A description of everything that must be equal on all ranks."""
        options = [f"reduce_scatter {self.algo} of {self.shape} {self.dtype}, splits {list(self.rows)}"]
        if self.epilogue is not None:
            options.append(self.epilogue.described)
        if self.staged:
            options.append("staged")
        return ", ".join(options)

    def traffic(self) -> traffic.Traffic:
        group, elements = self.options.group, math.prod(self.shape)
        itemsize, layout = self.dtype.itemsize, group.layout
        if group.link is None:
            summed = plans.traffic(self.algo, group.size, elements * itemsize, self.staged)
        else:
            summed = shares.traffic(self.algo, layout.count, layout.inside, elements, itemsize, self.staged)
        return summed + traffic.Traffic(elements * itemsize, 0)

    def sequence(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[LaunchSequence, list[Ready]]:
        """Return the launch sequence for arrays of at least one element at these addresses, and the launches in it."""
        if self.algo == "naive":
            return self._naive(inputs, outputs)
        if self.options.group.link is not None:
            return self._across_nodes(inputs, outputs)
        table = plan.sources(self.options.group, inputs, False)
        ready = self._ready([table] * len(inputs), inputs, outputs)
        return Direct([one.launch for one in ready]), ready

    def _naive(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[LaunchSequence, list[Ready]]:
        """Return the launch sequence of "naive", in which each rank copies its part from the inputs of the other ranks.
        A copy begins with the pack that holds the first element of the part.
        """
        group, parts, itemsize = self.options.group, self.parts, self.dtype.itemsize
        slot = naive_slot(group.workspace.payload_bytes, group.size, PACK_BYTES)
        packs = min(slot // PACK_BYTES, parts.largest)
        count = ceil_div(parts.largest, packs)
        bounds = list(zip(*(plans.naive_chunks(parts, rank.index, packs, count) for rank in group), strict=True))

        def copied(begin: int, end: int) -> tuple[int, int]:
            offset = begin // parts.width * PACK_BYTES
            return offset, end * itemsize - offset if begin < end else 0

        def launches(number: int, table: list[list[int]]) -> list[Ready]:
            to = [
                address + (begin - parts.starts[rank.index]) * itemsize
                for rank, address, (begin, _) in zip(group, outputs, bounds[number], strict=True)
            ]
            ready = self._ready(table, inputs, to)
            for rank, one, part in zip(group, ready, bounds[number], strict=True):
                one.parameters.parts[rank.index] = Range(*part)
            return ready

        chunks = [[copied(*part) for part in of_chunk] for of_chunk in bounds]
        return naive.sequence(group, inputs, packs * PACK_BYTES, chunks, launches, whole=False)

    def _across_nodes(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[LaunchSequence, list[Ready]]:
        group, parts = self.options.group, self.parts
        sums = over_nodes.PartialSums(self.options, self.dtype, FORMS[self.algo], self.staged)

        def finish(_: int, chunk: shares.ScatterChunk) -> list[Ready]:
            to = [
                address + (chunk.parts[rank.index][0] - parts.starts[rank.index]) * self.dtype.itemsize
                for rank, address in zip(group, outputs, strict=True)
            ]
            ready = self._ready([[]] * len(inputs), inputs, to, chunk)
            over_nodes.point(ready, group, chunk)
            return ready

        area = over_nodes.area(group, self.staged)
        chunks = shares.pack_chunks(parts, group.nodes, area, group.workspace.payload_bytes)
        return sums.sequence([(0, chunk) for chunk in chunks], inputs, finish)

    def _ready(
        self,
        table: Sequence[Sequence[int]],
        inputs: Sequence[int],
        outputs: Sequence[int],
        chunk: shares.ScatterChunk | None = None,
    ) -> list[Ready]:
        """Return launches of all ranks; rank i sums from the addresses `table[i]`. With `chunk`, in a group over
        several nodes, the launches add the nodes' partial sums of that chunk instead."""
        text, more = ("", ()) if self.epilogue is None else (self.epilogue.text, self.epilogue.structures)
        columns = self.shape[-1]
        common = self.options
        options = (self.staged, common.blocks, common.alone, text)
        key = ("reduce_scatter", self.algo, self.dtype.name, columns, chunk or self.parts.starts, *options)

        def planned() -> plan.Plan:
            return self._plan(columns, text) if chunk is None else self._finishing(columns, text, chunk)

        try:
            found = plan.take(common.group, key, planned, table, inputs, common.pdl, common.trace, more)
        except CompileError as error:
            if self.epilogue is None:
                raise
            raise self.epilogue.explained(error) from None
        for one, output in zip(found, outputs, strict=True):
            one.point("output", output)
        return found

    def _plan(self, columns: int, text: str) -> plan.Plan:
        group, parts, itemsize = self.options.group, self.parts, self.dtype.itemsize
        spec = SumsKernel(
            op="reduce_scatter",
            algo=FORMS[self.algo],
            dtype=self.dtype,
            ranks=group.size,
            out_dtype=self.dtype,
            ragged=parts.ragged,
            staged=self.staged,
            local=self.algo == "naive",
            compares=plan.compares(group) and self.algo != "naive",
            epilogue=text,
        )
        most = parts.largest
        count = most * parts.width
        common = {"columns": columns, "most_packs": most}
        if spec.pushes:
            pushed = push.sums_shape(spec.work, count, group.workspace.payload_bytes)
            pushed = replace(pushed, depth=plans.depth(most))
            spec = replace(spec, threads=pushed.threads, depth=pushed.depth)
            parameters = ScatterPushParams(**common, chunk_packs=pushed.chunk)
            parameters.own(parts.ranges)
            return plan.push(group, spec, pushed, self.options.blocks, self.options.alone, parameters)
        shape = plans.launch(count, itemsize, spec.ranks, spec.algo, self.options.blocks)
        spec = replace(spec, packs=shape.packs)
        chunk = plans.chunk(spec.work, count, group.workspace.payload_bytes // group.size)
        pulled = ScatterParams(**common, chunk_packs=chunk)
        pulled.own(parts.ranges)
        return plan.pull(spec, shape, most, chunk, pulled)

    def _finishing(self, columns: int, text: str, chunk: shares.ScatterChunk) -> plan.Plan:
        """Return the plan of the kernel that adds the nodes' partial sums of a chunk."""
        count = chunk.largest * chunk.width
        shape = plans.launch(count, self.dtype.itemsize, 1, "one_stage", self.options.blocks)
        spec = SumsKernel(
            op="reduce_scatter",
            algo="one_stage",
            dtype=self.dtype,
            ranks=1,
            out_dtype=self.dtype,
            packs=shape.packs,
            ragged=chunk.ragged,
            local=True,
            nodes=True,
            epilogue=text,
        )

        def tailor(parameters: Any, rank: int) -> None:
            parameters.call.rank = rank
            parameters.own([chunk.parts[rank]])

        made = plan.pull(spec, shape, chunk.largest, 1, ScatterNodesParams(columns=columns, most_packs=chunk.largest))
        return replace(made, tailor=tailor)


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
    parts = plans.Parts.of(rows, math.prod(shape[1:]), PACK_BYTES // dtype.itemsize)
    shapes = [(rows[rank.index], *shape[1:]) for rank in group]

    targets: list[Operand] = []
    if outputs is not None:
        why = "the rows of its rank"
        targets = operands.of_ranks(
            group, "outputs", outputs, shapes, dtype, why, alignment=dtype.itemsize, writable=True
        )
        starts = [parts.starts[rank.index] * dtype.itemsize for rank in group]
        operands.no_overlap(read_by(sources, bound), targets, in_place(sources, targets, starts))
    received = (group.layout.inside - 1) * parts.largest * PACK_BYTES
    algos = algorithms(common.op, group, algo, received, sources)
    queues = resolve_streams(group, streams, sources)
    written, values = of_ranks(group, "outputs", outputs, targets, shapes, dtype, queues)
    addresses, results = [source.ptr for source in sources], [target.ptr for target in written]

    def make(algo: str) -> ReduceScatterCall:
        staged = algo == "pull" and nbytes > 0 and not plan.readable_by_peers(group, sources)
        return ReduceScatterCall(common, dtype, shape, rows, parts, algo, staged, bound)

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
