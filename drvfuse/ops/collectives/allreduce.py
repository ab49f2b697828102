# SPDX-License-Identifier: Apache-2.0
"""`allreduce`: the sum of one array a rank, on every rank."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, CompileError
from ...plans import traffic, tuning
from ...runtime.array import Array
from ..call import options, validate
from ..call.options import PDLLevel
from ..call.prepared import Prepared, Schedule, collective
from ..call.results import Results
from ..call.streams import resolve_streams
from ..call.tracing import CallTrace
from ..call.validate import RankArray
from . import kernels, naive, plan
from .epilogue import Epilogue, explain
from .epilogue_binding import BoundEpilogue, bind

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...dtypes import DType
    from ...runtime.kernel import Launch
    from ...trace.buffer import Section, Trace

ALGORITHMS = ("auto", "one_stage", "two_stage", "naive")


@collective
def allreduce(
    group: Group,
    inputs: Any,
    outputs: Any = None,
    *,
    algo: str = "auto",
    use_multimem: bool = False,
    epilogue: Epilogue | None = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Any = None,
    trace: Trace | None = None,
) -> Prepared[list[Array]]:
    """Sum `inputs` over the ranks, element by element; every rank gets the sum.

    `inputs` is a list with one array a local rank, all of one shape and dtype (float32, float16 or bfloat16), each
    contiguous, 16-byte aligned and on its rank's device: `Array`s, or any object with DLPack or
    `__cuda_array_interface__`. `outputs` likewise; None allocates them. `outputs[i]` may be `inputs[i]` itself and must
    otherwise share memory with nothing. With one local rank a bare array is accepted in place of a list, and a bare
    array comes back.

    The sum starts at +0.0f and adds ranks 0, 1, ... in float32, is passed through `epilogue` if there is one, and is
    rounded once; a NaN becomes the dtype's canonical NaN. Every algorithm, block count and rank gives the same bits.

    `algo` is "one_stage" (each rank sums all), "two_stage" (each rank sums a part and gathers the others), "naive"
    (copies between devices, which in a graph capture need access to the inputs, and else need none) or "auto".
    `max_num_blocks` bounds the grid, up to the group's `max_blocks`. `use_multimem=True` raises Unsupported.
    `pdl_level`: see `PDLLevel`.

    `streams`: None for each rank's own stream; "current" for the stream that each input's framework names; or a list of
    streams. The call is ordered after the group's last call and, outside graph capture, after the streams of its
    arrays. It does not block, except to compile a kernel once. Inputs may be overwritten and outputs read, on the same
    device, in the order of the rank's stream.

    `trace`: a `Trace` of the group, in which the kernels then note what their blocks do when; the results are the same.

    `allreduce.prepare(...)` takes the same arguments and returns a `Prepared` that can be launched many times.

    Raises ArgumentError, Unsupported, ClosedError, CompileError (an epilogue that does not compile), CaptureError
    (allocation or unjoined streams during capture) before anything is launched, and BarrierTimeout if an earlier call
    on the group timed out.
    """
    group.require_open()
    options.one_of("algo", algo, ALGORITHMS)
    options.refuse_multimem(use_multimem)
    pdl = options.pdl_level(pdl_level)
    blocks = options.block_limit(max_num_blocks, group.max_blocks)
    traced = CallTrace(group, trace) if trace is not None else None

    sources = validate.rank_arrays(group, "inputs", inputs)
    shape, dtype = sources[0].array.shape, sources[0].array.dtype
    options.one_of(f"dtype of {sources[0].name}", dtype.name, kernels.INPUT_DTYPES)
    validate.same_shape(sources, shape, f"that of {sources[0].name}")
    validate.same_dtype(sources, dtype, f"that of {sources[0].name}")
    bound = bind(group, epilogue) if epilogue is not None else None
    extra = bound.operands if bound is not None else [[] for _ in group]

    targets: list[RankArray] = []
    if outputs is not None:
        targets = validate.rank_arrays(group, "outputs", outputs, writable=True)
        validate.same_shape(targets, shape, "that of the inputs")
        validate.same_dtype(targets, dtype, "that of the inputs")
        read = [*sources, *validate.flatten(extra)]
        validate.no_overlap(read, targets, list(zip(sources, targets, strict=True)))
    in_place = any(t.array.ptr == s.array.ptr for s, t in zip(sources, targets, strict=False))
    nbytes = sources[0].array.nbytes
    algo = _algorithm(group, algo, nbytes, epilogue)
    results = Results(group, "outputs", outputs, targets, shape, dtype, resolve_streams(group, streams, sources))

    schedule: Schedule | None = None
    moved = traffic.NONE
    if nbytes:
        in_place_hazard = in_place and algo == "one_stage" and group.size > 1
        staged = algo != "naive" and (in_place_hazard or not plan.readable_by_peers(group, sources))
        call = _Call(group, dtype, shape, algo, staged, blocks, pdl, bound, traced)
        schedule = call.schedule([source.array.ptr for source in sources], results.addresses)
        moved = traffic.reading_sources(algo, group.size, nbytes, staged)
        moved += traffic.writing_results(algo, group.size, nbytes)
    reads = [[source, *more] for source, more in zip(sources, extra, strict=True)]
    writes = [[operand] for operand in results.operands]
    return Prepared(
        group, "allreduce", algo, results.returned(inputs), reads, writes, schedule, streams, moved, bound, traced
    )


def _algorithm(group: Group, algo: str, nbytes: int, epilogue: Epilogue | None) -> str:
    differs = epilogue is not None and epilogue.differs_by_rank
    if algo == "auto":
        if not group.peers_readable:
            return "naive"
        return "one_stage" if differs else tuning.allreduce_algorithm(group.size, nbytes)
    plan.require_peers(group, algo)
    if algo == "two_stage" and differs:
        raise ArgumentError(
            "algo",
            '"two_stage"',
            '"one_stage", "naive" or "auto" for an epilogue that differs by rank: two stages compute each element once',
        )
    return algo


@dataclass(frozen=True)
class _Call:
    """What is the same on every rank of one all-reduce of at least one element."""

    group: Group
    dtype: DType
    shape: tuple[int, ...]
    algo: str
    staged: bool
    blocks: int
    pdl: PDLLevel
    epilogue: BoundEpilogue | None
    trace: CallTrace | None

    def schedule(self, inputs: Sequence[int], outputs: Sequence[int]) -> Schedule:
        count = math.prod(self.shape)
        if self.algo == "naive":
            return self._naive(inputs, outputs, count)
        table = [list(inputs)] * len(self.group)
        return plan.Direct(*self._launches(table, inputs, outputs, 0, count))

    def _naive(self, inputs: Sequence[int], outputs: Sequence[int], count: int) -> Schedule:
        size = self.dtype.itemsize
        slot = min(naive.slot_bytes(self.group, kernels.PACK_BYTES), count * size)
        chunks = []
        for offset in range(0, count * size, slot):
            nbytes = min(slot, count * size - offset)
            own = [address + offset for address in inputs]
            table = [naive.sources(self.group, p, address, slot) for p, address in enumerate(own)]
            to = [address + offset for address in outputs]
            launches, _ = self._launches(table, own, to, offset // size, nbytes // size)
            chunks.append(naive.Chunk(offset, nbytes, launches))
        return naive.Naive(self.group, inputs, slot, chunks)

    def _launches(
        self, table: Sequence[Sequence[int]], own: Sequence[int], outputs: Sequence[int], first: int, count: int
    ) -> tuple[list[Launch], int]:
        """Launches for `count` elements from `first`, and the barriers that each passes.

        `table[i]` are the addresses that rank i sums.
        """
        group, kernel_algo = self.group, "one_stage" if self.algo == "naive" else self.algo
        shape = kernels.allreduce_launch(count, self.dtype, group.size, kernel_algo, self.blocks)
        spec = kernels.CollectiveKernel(
            op="allreduce",
            algo=kernel_algo,
            dtype=self.dtype,
            ranks=group.size,
            out_dtype=self.dtype,
            packs=shape.packs,
            ragged=count % (kernels.PACK_BYTES // self.dtype.itemsize) != 0,
            staged=self.staged,
            local=self.algo == "naive",
            epilogue=self.epilogue.text if self.epilogue is not None else "",
        )
        chunk = kernels.allreduce_chunk(spec, count, group.workspace.payload_bytes)
        sections: list[Section] = []
        if self.trace is not None:
            spec, sections = self.trace.reserve(spec, shape, count, chunk)
        arguments: list[list[ctypes.Structure]] = []
        for position in range(len(group)):
            block = kernels.AllreduceParams(
                call=plan.call_block(group, position, table[position], own[position], self.pdl),
                output=outputs[position],
                count=count,
                first=first,
                columns=self.shape[-1] if self.shape else 1,
                chunk_packs=chunk,
            )
            arguments.append([block] if self.epilogue is None else [block, self.epilogue.structures[position]])
        try:
            launches = plan.launches(group, spec, shape, arguments, self.pdl, sections)
        except CompileError as error:
            if self.epilogue is None:
                raise
            expression = self.epilogue.epilogue.expression
            raise CompileError(f"epilogue {expression!r}", explain(error.log, expression)) from None
        return launches, kernels.barriers(spec, count, chunk)
