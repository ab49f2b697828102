# SPDX-License-Identifier: Apache-2.0
"""`allreduce`: the sum of one array per rank, on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import ArgumentError, CompileError
from ...plans import collectives as plans
from ...plans import push, traffic, tuning
from ...runtime.array import Array
from ...runtime.interop import ArrayLike
from ..call import operands, options
from ..call.op import op
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.planned import Ready
from ..call.prepared import Direct, Prepared, Schedule
from ..call.results import of_ranks
from ..call.streams import Streams, resolve_streams
from ..call.tracing import CallTrace
from ..call.turns import GroupTurns
from . import naive, plan
from .epilogue import Epilogue, explain
from .epilogue_binding import BoundEpilogue, bind
from .kernels import ALGORITHMS, INPUT_DTYPES, PUSH, AllreduceParams, AllreducePushParams, CollectiveKernel
from .tuned import Tuned

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...dtypes import DType
    from ...trace.buffer import Trace


@op
def allreduce(
    group: Group,
    inputs: ArrayLike | Sequence[ArrayLike],
    outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    *,
    algo: str = "auto",
    use_multimem: bool = False,
    epilogue: Epilogue | None = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[list[Array]]:
    """Sum `inputs` over the ranks, element by element; every rank gets the sum.

    `inputs` is a list with one array per local rank, all of one shape and dtype (float32, float16 or bfloat16), each
    contiguous, 16-byte aligned and on its rank's device: `Array`s, or any object with DLPack or
    `__cuda_array_interface__`. `outputs` likewise; None allocates them. `outputs[i]` may be `inputs[i]` itself and must
    otherwise share memory with nothing. With one local rank a bare array is accepted in place of a list, and a bare
    array comes back.

    The sum starts at +0.0f and adds ranks 0, 1, ... in float32, is passed through `epilogue` if there is one, and is
    rounded once; a NaN becomes the dtype's canonical NaN. Every algorithm, block count and rank gives the same bits.

    `algo` is "push_one_shot" (each rank sends its input to all and sums what it receives), "push_two_shot" (each rank
    sums a part and sends it to all), "one_stage" and "two_stage" (the same by loads from peers behind barriers),
    "naive" (copies between devices, which in a graph capture need access to the inputs, and else need none) or "auto".
    `max_num_blocks` bounds the multiprocessors that the grid may fill, up to the group's `max_blocks`: a push algorithm
    has as many blocks as fit on them, a pull algorithm one for each. `use_multimem=True` raises Unsupported.
    `pdl_level`: see `PDLLevel`.

    `streams`: None for each rank's own stream; "current" for the stream that each input's framework names; or a list
    with one stream per local rank: a `Stream`, as `Stream(rank.device)` makes, any object with `__cuda_stream__`, or a
    CUstream as an int. The call is ordered after the group's last call and, outside graph capture, after the streams of
    its arrays. It does not block, except to compile a kernel once. Inputs may be overwritten and outputs read, on the
    same device, in the order of the rank's stream.

    `trace`: a `Trace` of the group, in which the kernels then note what their blocks do when; the results are the same.

    `allreduce.prepare(...)` takes the same arguments and returns a `Prepared` that can be launched many times.

    Raises ArgumentError, Unsupported, ClosedError, CompileError (an epilogue that does not compile), CaptureError
    (allocation or unjoined streams during capture) before anything is launched, and BarrierTimeout if an earlier call
    on the group timed out.
    """
    options.open_group(group)
    options.one_of("algo", algo, ALGORITHMS)
    options.refuse_multimem(group, use_multimem)
    pdl = options.pdl_level(pdl_level)
    blocks = options.block_limit(max_num_blocks, group.max_blocks)
    traced = CallTrace([rank.device for rank in group], trace, "group") if trace is not None else None
    alone = group.max_blocks_alone if max_num_blocks is None and traced is None else blocks  # a trace is of one grid

    sources = operands.of_ranks(group, "inputs", inputs)
    first = sources[0]
    shape, dtype, nbytes = first.shape, first.dtype, first.array.nbytes
    options.one_of(f"dtype of {first.name}", dtype.name, INPUT_DTYPES)
    bound = bind(group, epilogue) if epilogue is not None else None

    targets: list[Operand] = []
    if outputs is not None:
        targets = operands.of_ranks(group, "outputs", outputs, shape, dtype, "that of the inputs", writable=True)
        used = sources if bound is None else [*sources, *(o for of_rank in bound.operands for o in of_rank)]
        operands.no_overlap(used, targets, list(zip(sources, targets, strict=True)))
    in_place = any(t.ptr == s.ptr for s, t in zip(sources, targets, strict=False))
    algos = _algorithms(group, algo, nbytes, epilogue)
    queues = resolve_streams(group, streams, sources)
    written, values = of_ranks(group, "outputs", outputs, targets, shape, dtype, queues)

    schedule: Schedule | None = None
    ready: list[Ready] = []
    call = _Call(group, dtype, shape, algos[0], False, blocks, alone, pdl, bound, traced)
    if nbytes:

        def scheduled(algo: str) -> tuple[_Call, Schedule, list[Ready]]:
            in_place_hazard = in_place and algo == "one_stage" and group.size > 1
            pulls = algo not in (*PUSH, "naive")
            staged = pulls and (in_place_hazard or not plan.readable_by_peers(group, sources))
            chosen = replace(call, algo=algo, staged=staged)
            return chosen, *chosen.schedule([s.ptr for s in sources], [o.ptr for o in written])

        call, schedule, ready = plan.first_that_fits(algos, scheduled)

    def moved() -> traffic.Traffic:
        results = traffic.writing_results(call.algo, group.size, nbytes)
        return traffic.reading_sources(call.algo, group.size, nbytes, call.staged) + results

    read = [[source] for source in sources]
    if bound is not None:
        read = [[*of_rank, *more] for of_rank, more in zip(read, bound.operands, strict=True)]
    return Prepared(
        "allreduce",
        GroupTurns(group),
        values[0] if operands.is_bare(group, inputs) else values,
        read,
        [[operand] for operand in written],
        schedule,
        queues,
        ready,
        algo=call.algo,
        traffic=moved,
        parameters=bound,
        trace=traced,
    )


def _algorithms(group: Group, algo: str, nbytes: int, epilogue: Epilogue | None) -> list[str]:
    """What to try in turn, where the workspace is too small for the first."""
    differs = epilogue is not None and epilogue.differs_by_rank
    if algo == "auto":
        if not group.peers_readable:
            return ["naive"]
        best = tuning.allreduce_algorithm(group.part(Tuned).costs, group.size, nbytes)
        return ["push_one_shot"] if differs else [best, "push_one_shot"]
    plan.require_peers(group, algo)
    if algo in ("two_stage", "push_two_shot") and differs:
        raise ArgumentError(
            "algo",
            f'"{algo}"',
            '"one_stage", "push_one_shot", "naive" or "auto" for an epilogue that differs by rank: two stages compute '
            "each element once",
        )
    return [algo]


@dataclass(slots=True)
class _Call:
    """What is the same on every rank of one all-reduce of at least one element."""

    group: Group
    dtype: DType
    shape: tuple[int, ...]
    algo: str
    staged: bool
    blocks: int
    alone: int
    pdl: PDLLevel
    epilogue: BoundEpilogue | None
    trace: CallTrace | None

    def schedule(self, inputs: list[int], outputs: list[int]) -> tuple[Schedule, list[Ready]]:
        count = math.prod(self.shape)
        if self.algo == "naive":
            return self._naive(inputs, outputs, count)
        ready = self._ready([inputs] * len(inputs), inputs, outputs, 0, count)
        return Direct([one.launch for one in ready]), ready

    def _naive(self, inputs: list[int], outputs: list[int], count: int) -> tuple[Schedule, list[Ready]]:
        size, group = self.dtype.itemsize, self.group
        slot = min(plans.naive_slot(group.workspace.payload_bytes, group.size, plans.PACK_BYTES), count * size)
        chunks, every = [], []
        for offset in range(0, count * size, slot):
            nbytes = min(slot, count * size - offset)
            own = [address + offset for address in inputs]
            table = [naive.sources(group, p, address, slot) for p, address in enumerate(own)]
            to = [address + offset for address in outputs]
            ready = self._ready(table, own, to, offset // size, nbytes // size)
            chunks.append(naive.Chunk(offset, nbytes, [one.launch for one in ready]))
            every += ready
        return naive.Naive(group, inputs, slot, chunks), every

    def _ready(
        self, table: Sequence[Sequence[int]], own: Sequence[int], outputs: Sequence[int], first: int, count: int
    ) -> list[Ready]:
        """Launches for `count` elements from `first`; `table[i]` are the addresses that rank i sums."""
        columns = self.shape[-1] if self.shape else 1
        text, more = ("", ()) if self.epilogue is None else (self.epilogue.text, self.epilogue.structures)
        key = ("allreduce", self.algo, self.dtype.name, count, columns, self.staged, self.blocks, self.alone, text)
        try:
            found = plan.take(
                self.group, key, lambda: self._plan(count, columns, text), table, own, self.pdl, self.trace, more
            )
        except CompileError as error:
            if self.epilogue is None:
                raise
            expression = self.epilogue.epilogue.expression
            raise CompileError(f"epilogue {expression!r}", explain(error.log, expression)) from None
        for one, output in zip(found, outputs, strict=True):
            one.point("output", output)
            one.parameters.first = first
        return found

    def _plan(self, count: int, columns: int, text: str) -> plan.Plan:
        group, algo = self.group, "one_stage" if self.algo == "naive" else self.algo
        itemsize = self.dtype.itemsize
        spec = CollectiveKernel(
            op="allreduce",
            algo=algo,
            dtype=self.dtype,
            ranks=group.size,
            out_dtype=self.dtype,
            ragged=count % (plans.PACK_BYTES // itemsize) != 0,
            staged=self.staged,
            local=self.algo == "naive",
            epilogue=text,
        )
        if spec.pushes:
            pushed = push.allreduce_shape(spec.work, count, group.workspace.payload_bytes)
            spec = replace(spec, threads=pushed.threads, exact=pushed.exact, depth=pushed.depth)
            parameters = AllreducePushParams(count=count, columns=columns, chunk_packs=pushed.chunk)
            return plan.push(group, spec, pushed, self.blocks, self.alone, parameters)
        shape = plans.allreduce_launch(count, itemsize, group.size, algo, self.blocks)
        spec = replace(spec, packs=shape.packs)
        chunk = plans.allreduce_chunk(spec.work, count, group.workspace.payload_bytes)
        return plan.pull(spec, shape, count, chunk, AllreduceParams(count=count, columns=columns, chunk_packs=chunk))
