# SPDX-License-Identifier: Apache-2.0
"""`reduce_scatter`: the sum of one array per rank, of which each rank gets its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import ArgumentError, CompileError
from ...plans import collectives as plans
from ...plans import push, scatter, traffic
from ...runtime.array import Array
from ...runtime.interop import ArrayLike
from ..call import operands, options
from ..call.epilogue import Epilogue
from ..call.op import op
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.planned import Ready
from ..call.prepared import Direct, Prepared, Schedule
from ..call.results import of_ranks
from ..call.streams import Streams, resolve_streams
from . import naive, plan
from .call_options import CallOptions
from .collective_call import prepare
from .epilogue_binding import BoundEpilogue, bind, read_by
from .kernels import INPUT_DTYPES
from .own_parts import algorithms, in_place, owned_rows
from .scatter_kernels import ALGORITHMS, FORMS, ScatterKernel, ScatterParams, ScatterPushParams

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...dtypes import DType
    from ...trace.buffer import Trace


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
    the other dimensions of the inputs; None allocates them. It may be its rank's rows of `inputs[i]`, where they lie,
    and must otherwise be 16-byte aligned and share memory with nothing.

    The bits are those of the same rows of `allreduce`, also with `epilogue`, whose `i`, `row` and `col` are indices in
    the whole tensor. The epilogue may differ by rank: each element has the parameters of the rank that gets it. Where a
    part does not begin or end at a multiple of 16 bytes, its ends are read and written element by element.

    `algo` is "push" (each rank sends the others' parts to them, and sums what it receives), "pull" (each rank loads its
    part of the inputs of the others, behind a barrier), "naive" (copies between devices, which in a graph capture need
    access to the inputs, and else need none) or "auto". `pdl_level`, `max_num_blocks`, `streams`, `trace` and errors
    are as for `allreduce`. Raises Unsupported for a group over several nodes.
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
    received = (group.size - 1) * parts.largest * plans.PACK_BYTES
    algos = algorithms(group, algo, received, sources)
    queues = resolve_streams(group, streams, sources)
    written, values = of_ranks(group, "outputs", outputs, targets, shapes, dtype, queues)
    addresses, results = [source.ptr for source in sources], [target.ptr for target in written]

    def make(algo: str) -> _Call:
        staged = algo == "pull" and nbytes > 0 and not plan.readable_by_peers(group, sources)
        return _Call(common, dtype, shape, rows, parts, algo, staged, bound)

    return prepare(
        common,
        algos,
        make,
        (lambda call: call.schedule(addresses, results)) if nbytes else None,
        values[0] if operands.is_bare(group, inputs) else values,
        [[source] for source in sources],
        [[target] for target in written],
        queues,
        bound,
    )


@dataclass(frozen=True)
class _Call:
    """The properties of one reduce-scatter that are the same on every rank."""

    options: CallOptions
    dtype: DType
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    parts: scatter.Parts
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
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        return scatter.traffic(self.algo, self.options.group.size, nbytes, self.staged) + traffic.Traffic(nbytes, 0)

    def schedule(self, inputs: list[int], outputs: list[int]) -> tuple[Schedule, list[Ready]]:
        """The launches for arrays of at least one element at these addresses, by local rank."""
        if self.algo == "naive":
            return self._naive(inputs, outputs)
        table = plan.sources(self.options.group, inputs, False)
        ready = self._ready([table] * len(inputs), inputs, outputs)
        return Direct([one.launch for one in ready]), ready

    def _naive(self, inputs: list[int], outputs: list[int]) -> tuple[Schedule, list[Ready]]:
        """The schedule of "naive": each rank copies its part of the others' inputs, from the pack on in which the part
        begins.
        """
        group, parts, itemsize = self.options.group, self.parts, self.dtype.itemsize
        slot = plans.naive_slot(group.workspace.payload_bytes, group.size, plans.PACK_BYTES)
        packs = min(slot // plans.PACK_BYTES, parts.largest)
        slot = packs * plans.PACK_BYTES
        count = -(-parts.largest // packs)
        ranges = [scatter.naive_chunks(parts, rank.index, packs, count) for rank in group]
        chunks, every = [], []
        for number in range(count):
            bounds = [of_rank[number] for of_rank in ranges]
            offsets = [begin // parts.width * plans.PACK_BYTES for begin, _ in bounds]
            copies = [
                (offset, end * itemsize - offset if begin < end else 0)
                for offset, (begin, end) in zip(offsets, bounds, strict=True)
            ]
            table = [
                naive.sources(group, position, inputs[position] + offset, slot, offset)
                for position, offset in enumerate(offsets)
            ]
            to = [
                address + (begin - parts.starts[rank.index]) * itemsize
                for rank, address, (begin, _) in zip(group, outputs, bounds, strict=True)
            ]
            ready = self._ready(table, inputs, to)
            for rank, one, (begin, end) in zip(group, ready, bounds, strict=True):
                one.parameters.starts[rank.index], one.parameters.starts[rank.index + 1] = begin, end
            chunks.append(naive.Chunk(copies, [one.launch for one in ready]))
            every += ready
        return naive.Naive(group, inputs, slot, chunks), every

    def _ready(self, table: Sequence[Sequence[int]], inputs: Sequence[int], outputs: Sequence[int]) -> list[Ready]:
        """Launches of all ranks; rank i sums what lies at the addresses `table[i]`."""
        text, more = ("", ()) if self.epilogue is None else (self.epilogue.text, self.epilogue.structures)
        columns = self.shape[-1]
        common = self.options
        options = (self.staged, common.blocks, common.alone, text)
        key = ("reduce_scatter", self.algo, self.dtype.name, columns, self.parts.starts, *options)
        try:
            found = plan.take(
                common.group, key, lambda: self._plan(columns, text), table, inputs, common.pdl, common.trace, more
            )
        except CompileError as error:
            if self.epilogue is None:
                raise
            raise self.epilogue.explained(error) from None
        for one, output in zip(found, outputs, strict=True):
            one.point("output", output)
        return found

    def _plan(self, columns: int, text: str) -> plan.Plan:
        group, parts, itemsize = self.options.group, self.parts, self.dtype.itemsize
        spec = ScatterKernel(
            op="allreduce",
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
            pushed = push.allreduce_shape(spec.work, count, group.workspace.payload_bytes)
            pushed = replace(pushed, depth=scatter.depth(most))
            spec = replace(spec, threads=pushed.threads, depth=pushed.depth)
            parameters = ScatterPushParams(**common, chunk_packs=pushed.chunk)
            parameters.starts[: len(parts.starts)] = parts.starts
            return plan.push(group, spec, pushed, self.options.blocks, self.options.alone, parameters)
        shape = plans.allreduce_launch(count, itemsize, spec.ranks, spec.algo, self.options.blocks)
        spec = replace(spec, packs=shape.packs)
        chunk = plans.allreduce_chunk(spec.work, count, group.workspace.payload_bytes // group.size)
        pulled = ScatterParams(**common, chunk_packs=chunk)
        pulled.starts[: len(parts.starts)] = parts.starts
        return plan.pull(spec, shape, count, chunk, pulled)
