# SPDX-License-Identifier: Apache-2.0
"""`allreduce`: the sum of one array per rank, on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import ArgumentError, CompileError, require_kind
from ...plans import collectives as plans
from ...plans import nodes as shares
from ...plans import push, traffic, tuning
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
from ..call.tracing import CallTrace
from ..call.turns import GroupTurns
from . import multimem, naive, nodes, plan
from .compared import compared
from .epilogue_binding import BoundEpilogue, bind
from .kernels import (
    ALGORITHMS,
    BY_OWNER,
    INPUT_DTYPES,
    PULL,
    PUSH,
    AllreduceMultimemParams,
    AllreduceNodesParams,
    AllreduceParams,
    AllreducePushParams,
    CollectiveKernel,
)
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
    rounded once; a NaN becomes the dtype's canonical NaN. Every algorithm, block count and rank gives the same bits,
    but for `use_multimem`.

    `algo` is "push_one_shot" (each rank sends its input to all and sums what it receives), "push_two_shot" (each rank
    sums a part and sends it to all), "one_stage" and "two_stage" (the same by loads from peers behind barriers),
    "naive" (copies between devices, which in a graph capture need access to the inputs, and else need none) or "auto".
    `max_num_blocks` bounds the multiprocessors that the grid may fill, up to the group's `max_blocks`: a push algorithm
    has as many blocks as fit on them, any other one for each. `pdl_level`: see `PDLLevel`.

    `use_multimem=True` lets the switches add, by multicast memory, and is the only way in which this op uses it. `algo`
    is then "two_stage" or "auto" (each rank loads the sums of its part, and stores them to all ranks) or "one_stage"
    (each rank loads all sums). Inputs that lie at one offset of a buffer of `group.symmetric(multicast=True)` are used
    where they are; others, and those whose size is no multiple of 4 bytes, are first copied by the same kernel into
    the group's multicast staging, which the first call that needs it makes. By two stages outputs in such memory are
    stored to directly, if the inputs lie there too. The order of the sum is not specified: before the final rounding
    its error is at most (n-1) 2^-24 (|x_0| + ... + |x_(n-1)|) for n ranks, to first order. The switches round the sum
    of 16-bit types, so `epilogue` then gets the rounded sum, and its value is rounded again. By two stages all ranks
    hold equal bits, by one stage they may not.

    `streams`: None for each rank's own stream; "current" for the stream that each input's framework names; or a list
    with one stream per local rank: a `Stream`, as `Stream(rank.device)` makes, any object with `__cuda_stream__`, or a
    CUstream as an int. The call is ordered after the group's last call and, outside graph capture, after the streams of
    its arrays. It does not block, except to compile a kernel once. Inputs may be overwritten and outputs read, on the
    same device, in the order of the rank's stream.

    `trace`: a `Trace` of the group, in which the kernels then note what their blocks do when; the results are the same.

    `allreduce.prepare(...)` takes the same arguments and returns a `Prepared` that can be launched many times.

    Raises ArgumentError, Unsupported (multicast that is vetoed or that devices lack), ClosedError, CompileError (an
    epilogue that does not compile), CaptureError (allocation, the multicast staging's included, or unjoined streams
    during capture), MulticastError (its set-up failed) before anything is launched, and BarrierTimeout if an earlier
    call on the group timed out.
    """
    options.open_group(group)
    options.one_of("algo", algo, ALGORITHMS)
    require_kind("use_multimem", use_multimem, bool, "True or False")
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
    algos = _algorithms(group, algo, use_multimem, nbytes, epilogue)
    queues = resolve_streams(group, streams, sources)
    written, values = of_ranks(group, "outputs", outputs, targets, shape, dtype, queues)

    schedule: Schedule | None = None
    ready: list[Ready] = []
    addresses, results = [source.ptr for source in sources], [target.ptr for target in written]
    placed = None
    if use_multimem:
        kept = in_place and algos[0] == "one_stage"  # peers may load an input that is an output already
        stored = results if algos[0] == "two_stage" else []
        placed = multimem.Placement.of(group, queues, [] if kept else addresses, stored, nbytes)
    call = AllreduceCall(group, dtype, shape, algos[0], False, blocks, alone, pdl, bound, traced, placed)
    if nbytes:

        def scheduled(algo: str) -> tuple[AllreduceCall, Schedule, list[Ready]]:
            in_place_hazard = in_place and algo == "one_stage" and group.size > 1
            pulls = algo not in (*PUSH, "naive")
            staged = pulls and (in_place_hazard or not plan.readable_by_peers(group, sources))
            if placed is not None:
                staged = placed.staged
            chosen = replace(call, algo=algo, staged=staged)
            return chosen, *chosen.schedule(addresses, results)

        call, schedule, ready = plan.first_that_fits(algos, scheduled)
    schedule, ready = compared(group, call.text, schedule, ready)

    def moved() -> traffic.Traffic:
        to_outputs = call.multimem is not None and call.multimem.to_outputs
        inside = group.layout.inside
        stored = traffic.writing_results(call.name, inside, nbytes, to_outputs)
        total = traffic.reading_sources(call.name, inside, nbytes, call.staged) + stored
        return (
            total if group.link is None else traffic.of_nodes(group.nodes, total, math.prod(shape), group.link.places)
        )

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
        algo=call.name,
        traffic=moved,
        parameters=bound,
        trace=traced,
    )


def _algorithms(group: Group, algo: str, use_multimem: bool, nbytes: int, epilogue: Epilogue | None) -> list[str]:
    """The algorithms to try in turn, where the workspace is too small for the first."""
    differs = epilogue is not None and epilogue.differs_by_rank
    if group.link is not None:
        if differs:
            reason = "over several nodes each element is computed once, by one rank of each node"
            raise ArgumentError("epilogue", "different by rank", f"the same on all ranks: {reason}")
        return [nodes.algorithm(group, algo, use_multimem)]
    if use_multimem:
        algo = multimem.algorithm(group, algo, PULL)
    if algo == "auto":
        if not group.peers_readable:
            return ["naive"]
        best = tuning.allreduce_algorithm(group.part(Tuned).costs, group.size, nbytes)
        return ["push_one_shot"] if differs else [best, "push_one_shot"]
    plan.require_peers(group, algo)
    if algo in BY_OWNER and differs:
        others = '"one_stage"' if use_multimem else '"one_stage", "push_one_shot", "naive" or "auto"'
        reason = "for an epilogue that differs by rank: two stages compute each element once"
        raise ArgumentError("algo", f'"{algo}"', f"{others} {reason}")
    return [algo]


@dataclass(slots=True)
class AllreduceCall:
    """The properties of one all-reduce, of at least one element, that are the same on every rank."""

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
    multimem: multimem.Placement | None

    @property
    def name(self) -> str:
        """The name of the algorithm in messages and in `Prepared.algo`."""
        return self.algo if self.multimem is None else multimem.NAMES[self.algo]

    @property
    def text(self) -> str:
        """A description of everything that must be equal on all ranks."""
        options = [f"allreduce {self.name} of {self.shape} {self.dtype}"]
        if self.epilogue is not None:
            options.append(self.epilogue.described)
        if self.staged:
            options.append("staged")
        if self.multimem is not None and self.multimem.to_outputs:
            options.append("to multicast outputs")
        return ", ".join(options)

    def schedule(self, inputs: list[int], outputs: list[int]) -> tuple[Schedule, list[Ready]]:
        count = math.prod(self.shape)
        if self.algo == "naive":
            return self._naive(inputs, outputs, count)
        if self.group.link is not None:
            return self._across_nodes(inputs, outputs, count)
        table = plan.sources(self.group, inputs, self.multimem is not None)
        ready = self._ready([table] * len(inputs), inputs, outputs, 0, count)
        if self.multimem is not None:
            self.multimem.point(ready)
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
            chunks.append(naive.Chunk([(offset, nbytes)] * len(ready), [one.launch for one in ready]))
            every += ready
        return naive.Naive(group, inputs, slot, chunks), every

    def _across_nodes(self, inputs: list[int], outputs: list[int], count: int) -> tuple[Schedule, list[Ready]]:
        group, size, width = self.group, self.dtype.itemsize, plans.PACK_BYTES // self.dtype.itemsize
        share = shares.Share(1, width, plans.PACK_BYTES, group.layout.inside, nodes.link(group).places, self.staged)
        steps, every = [], []
        for chunk in shares.chunks(-(-count // width), share, group.workspace.payload_bytes):
            first = chunk.first * width
            elements = min(chunk.items * width, count - first)
            own = [address + first * size for address in inputs]
            tensor = nodes.Tensor(self.dtype, elements, chunk.items)
            before = nodes.sums(group, tensor, chunk, own, self.blocks, self.pdl, self.trace)
            to = [address + first * size for address in outputs]
            after = self._ready([[]] * len(own), own, to, first, elements)
            nodes.point(group, after, chunk)
            steps.append(nodes.Step.of(group, chunk, before, after))
            every += [*before, *after]
        return nodes.AcrossNodes(group, steps), every

    def _ready(
        self, table: Sequence[Sequence[int]], own: Sequence[int], outputs: Sequence[int], first: int, count: int
    ) -> list[Ready]:
        """Launches for `count` elements from `first`; `table[i]` are the addresses that rank i sums."""
        columns = self.shape[-1] if self.shape else 1
        text, more = ("", ()) if self.epilogue is None else (self.epilogue.text, self.epilogue.structures)
        form = None if self.multimem is None else self.multimem.to_outputs
        options = (self.staged, self.blocks, self.alone, text, form)
        key = ("allreduce", self.algo, self.dtype.name, count, columns, *options)
        try:
            found = plan.take(
                self.group, key, lambda: self._plan(count, columns, text), table, own, self.pdl, self.trace, more
            )
        except CompileError as error:
            if self.epilogue is None:
                raise
            raise self.epilogue.explained(error) from None
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
            ranks=group.layout.inside,
            out_dtype=self.dtype,
            ragged=plans.ragged(count, itemsize),
            staged=self.staged and group.link is None,
            nodes=group.link is not None,
            local=self.algo == "naive",
            compares=plan.compares(group) and self.algo != "naive" and group.link is None,
            epilogue=text,
            multimem=self.multimem is not None,
            to_outputs=self.multimem is not None and self.multimem.to_outputs,
        )
        if spec.pushes:
            pushed = push.allreduce_shape(spec.work, count, group.workspace.payload_bytes)
            spec = replace(spec, threads=pushed.threads, exact=pushed.exact, depth=pushed.depth, relays=pushed.relays)
            parameters = AllreducePushParams(count=count, columns=columns, chunk_packs=pushed.chunk)
            return plan.push(group, spec, pushed, self.blocks, self.alone, parameters)
        shape = plans.allreduce_launch(count, itemsize, spec.ranks, algo, self.blocks, spec.multimem)
        spec = replace(spec, packs=shape.packs)
        if spec.nodes:
            largest = -(-count // (plans.PACK_BYTES // itemsize * spec.ranks))
            return plan.pull(
                spec, shape, count, largest, AllreduceNodesParams(count=count, columns=columns, chunk_packs=largest)
            )
        chunk = plans.allreduce_chunk(spec.work, count, group.workspace.payload_bytes)
        if self.multimem is not None and spec.uses_staging:
            self.multimem.make_staging()
        kind = AllreduceMultimemParams if spec.multimem else AllreduceParams
        return plan.pull(spec, shape, count, chunk, kind(count=count, columns=columns, chunk_packs=chunk))
