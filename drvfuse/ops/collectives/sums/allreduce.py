# SPDX-License-Identifier: Apache-2.0
"""`allreduce`: the sum of one array per rank, on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ....errors import ArgumentError, CompileError, require_kind
from ....plans import push, traffic, tuning
from ....plans import sums as plans
from ....plans.limits import ceil_div
from ....plans.nodes import Chunk, Share
from ....plans.shared import PACK_BYTES, naive_slot, ragged
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
from ..nodes import sums as nodes
from ..nodes.stages import link
from ..shared import multimem, naive, plan
from ..shared.epilogue import BoundEpilogue, bind, read_by
from ..shared.kernel import ALGORITHMS, BY_OWNER, INPUT_DTYPES, PULL, PUSH
from ..shared.options import CallOptions
from ..shared.prepare import prepare
from ..shared.tuned import Tuned
from .kernel import SumsKernel
from .params import AllreduceMultimemParams, AllreduceNodesParams, AllreduceParams, AllreducePushParams

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....dtypes import DType
    from ....trace.buffer import Trace


@dataclass(frozen=True)
class AllreduceCall:
    """The properties of one all-reduce that are the same on every rank."""

    options: CallOptions
    dtype: DType
    shape: tuple[int, ...]
    algo: str
    staged: bool
    epilogue: BoundEpilogue | None
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

    def traffic(self) -> traffic.Traffic:
        group, name = self.options.group, self.name
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        to_outputs = self.multimem is not None and self.multimem.to_outputs
        inside = group.layout.inside
        stored = traffic.writing_results(name, inside, nbytes, to_outputs)
        total = traffic.reading_sources(name, inside, nbytes, self.staged) + stored
        if group.link is None:
            return total
        return traffic.of_nodes(group.nodes, total, math.prod(self.shape), group.link.places)

    def sequence(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[LaunchSequence, list[Ready]]:
        """Return the launch sequence for arrays of at least one element at these addresses, and the launches in it."""
        count, group = math.prod(self.shape), self.options.group
        if self.algo == "naive":
            return self._naive(inputs, outputs, count * self.dtype.itemsize)
        if group.link is not None:
            return self._across_nodes(inputs, outputs, count)
        table = plan.sources(group, inputs, self.multimem is not None)
        ready = self._ready([table] * len(inputs), inputs, outputs, 0, count)
        if self.multimem is not None:
            self.multimem.point(ready)
        return Direct([one.launch for one in ready]), ready

    def _naive(self, inputs: Sequence[int], outputs: Sequence[int], nbytes: int) -> tuple[LaunchSequence, list[Ready]]:
        group, size = self.options.group, self.dtype.itemsize
        slot = min(naive_slot(group.workspace.payload_bytes, group.size, PACK_BYTES), nbytes)

        chunks = [[(begin, min(slot, nbytes - begin))] * len(inputs) for begin in range(0, nbytes, slot)]

        def launches(number: int, table: list[list[int]]) -> list[Ready]:
            begin, part = chunks[number][0]
            own, to = ([address + begin for address in addresses] for addresses in (inputs, outputs))
            return self._ready(table, own, to, begin // size, part // size)

        return naive.sequence(group, inputs, slot, chunks, launches, whole=True)

    def _across_nodes(
        self, inputs: Sequence[int], outputs: Sequence[int], count: int
    ) -> tuple[LaunchSequence, list[Ready]]:
        group, size, width = self.options.group, self.dtype.itemsize, PACK_BYTES // self.dtype.itemsize

        def part(chunk: Chunk) -> tuple[list[int], list[int], int, int]:
            first = chunk.first * width
            own, to = ([address + first * size for address in addresses] for addresses in (inputs, outputs))
            return own, to, first, min(chunk.items * width, count - first)

        def before(chunk: Chunk) -> list[Ready]:
            own, _, _, elements = part(chunk)
            return nodes.sums_of_rows(self.options, self.dtype, elements, chunk.items, chunk, own)

        def after(chunk: Chunk) -> list[Ready]:
            return self._ready([[]] * len(inputs), *part(chunk))

        share = Share(1, width, PACK_BYTES, group.layout.inside, link(group).places, self.staged)
        return nodes.sequence(group, ceil_div(count, width), share, before, after)

    def _ready(
        self, table: Sequence[Sequence[int]], own: Sequence[int], outputs: Sequence[int], first: int, count: int
    ) -> list[Ready]:
        """Return launches for `count` elements from element `first` on; rank i sums from the addresses `table[i]`."""
        columns = self.shape[-1] if self.shape else 1
        text, more = ("", ()) if self.epilogue is None else (self.epilogue.text, self.epilogue.structures)
        form = None if self.multimem is None else self.multimem.to_outputs
        common = self.options
        options = (self.staged, common.blocks, common.alone, text, form)
        key = ("allreduce", self.algo, self.dtype.name, count, columns, *options)
        try:
            found = plan.take(
                common.group,
                key,
                lambda: self._plan(count, columns, text),
                table,
                own,
                common.pdl,
                common.trace,
                more,
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
        group, algo = self.options.group, "one_stage" if self.algo == "naive" else self.algo
        itemsize = self.dtype.itemsize
        spec = SumsKernel(
            op="allreduce",
            algo=algo,
            dtype=self.dtype,
            ranks=group.layout.inside,
            out_dtype=self.dtype,
            ragged=ragged(count, itemsize),
            staged=self.staged and group.link is None,
            nodes=group.link is not None,
            local=self.algo == "naive",
            compares=plan.compares(group) and self.algo != "naive" and group.link is None,
            epilogue=text,
            multimem=self.multimem is not None,
            to_outputs=self.multimem is not None and self.multimem.to_outputs,
        )
        if spec.pushes:
            pushed = push.sums_shape(spec.work, count, group.workspace.payload_bytes)
            spec = replace(spec, threads=pushed.threads, exact=pushed.exact, depth=pushed.depth, relays=pushed.relays)
            parameters = AllreducePushParams(count=count, columns=columns, chunk_packs=pushed.chunk)
            return plan.push(group, spec, pushed, self.options.blocks, self.options.alone, parameters)
        shape = plans.launch(count, itemsize, spec.ranks, algo, self.options.blocks, spec.multimem)
        spec, packs = replace(spec, packs=shape.packs), ceil_div(count * itemsize, PACK_BYTES)
        if spec.nodes:
            largest = ceil_div(packs, spec.ranks)
            return plan.pull(
                spec, shape, packs, largest, AllreduceNodesParams(count=count, columns=columns, chunk_packs=largest)
            )
        chunk = plans.chunk(spec.work, count, group.workspace.payload_bytes)
        if self.multimem is not None and spec.uses_staging:
            self.multimem.make_staging()
        kind = AllreduceMultimemParams if spec.multimem else AllreduceParams
        return plan.pull(spec, shape, packs, chunk, kind(count=count, columns=columns, chunk_packs=chunk))


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
    contiguous, 16-byte aligned and on its rank's device: an `Array`, or any object with DLPack or
    `__cuda_array_interface__`. `outputs` is such a list; None allocates them. `outputs[i]` may be `inputs[i]` itself
    and must otherwise share memory with nothing. With one local rank a bare array is accepted in place of a list, and a
    bare array comes back.

    The sum starts at +0.0f and adds ranks 0, 1, ... in float32, is passed through `epilogue` if there is one, and is
    rounded once; a NaN becomes the dtype's canonical NaN. Every algorithm, block count and rank gives the same bits,
    except with `use_multimem`.

    `algo` is "push_one_shot" (each rank sends its input to all and sums what it receives), "push_two_shot" (each rank
    sums a part and sends it to all), "one_stage" and "two_stage" (in place of each send, the receiver loads the data
    from its peer after a barrier), "naive" (copies between devices, which need peer access to the inputs only in a
    graph capture) or "auto". `max_num_blocks` is the number of multiprocessors that the grid may fill, at most the
    group's `max_blocks`. A push algorithm has as many blocks as fit on them, any other algorithm one block for each.
    `pdl_level`: see `PDLLevel`.

    `use_multimem=True`: the switches add, through multicast memory; otherwise this op never uses such memory. `algo` is
    then "two_stage" or "auto" (each rank loads the sums of its part, and stores them to all ranks) or "one_stage" (each
    rank loads all sums). Inputs that lie at one offset of a buffer of `group.symmetric(multicast=True)` are used where
    they are. The same kernel first copies other inputs, and those whose size is no multiple of 4 bytes, to the group's
    multicast staging, which is allocated by the first call that needs it. "two_stage" stores directly to outputs that
    lie in such a buffer, if the inputs also lie in one. The order of the sum is not specified: before the final
    rounding its error is at most (n-1) 2^-24 (|x_0| + ... + |x_(n-1)|) for n ranks, to first order. For 16-bit types
    the switches round the sum. So `epilogue` gets the rounded sum, and the value of the epilogue is rounded again. With
    "two_stage" all ranks hold equal bits, with "one_stage" they may differ.

    `streams`: None for each rank's own stream; "current" for the stream that each input's framework names; or a list
    with one stream per local rank: a `Stream`, as `Stream(rank.device)` makes, any object with `__cuda_stream__`, or a
    CUstream as an int. The call is ordered after the group's last call and, outside graph capture, after the streams of
    its arrays. It does not block, except to compile a kernel once. Inputs may be overwritten and outputs read, on the
    same device, in the order of the rank's stream.

    `trace`: a `Trace` of the group, in which the kernels record when each block is in which phase. The results are the
    same.

    `allreduce.prepare(...)` takes the same arguments and returns a `Prepared` that can be launched many times.

    Raises ArgumentError, Unsupported (multicast that is vetoed or that devices lack), ClosedError, CompileError (an
    epilogue that does not compile), CaptureError (in a capture, if outputs or the multicast staging would have to be
    allocated, if only some ranks' streams are captured, or if the stream of an array is in another capture),
    MulticastError (the set-up of multicast memory failed) before anything is launched, and BarrierTimeout if an earlier
    call on the group timed out. The rule in numpy, rounding by rounding, is `drvfuse.reference.allreduce`.
    """
    common = CallOptions.of("allreduce", group, algo, ALGORITHMS, pdl_level, max_num_blocks, trace)
    require_kind("use_multimem", use_multimem, bool, "True or False")

    sources = operands.of_ranks(group, "inputs", inputs)
    first = sources[0]
    shape, dtype, nbytes = first.shape, first.dtype, first.array.nbytes
    options.one_of(f"dtype of {first.name}", dtype.name, INPUT_DTYPES)
    bound = bind(group, epilogue) if epilogue is not None else None

    targets: list[Operand] = []
    if outputs is not None:
        targets = operands.of_ranks(group, "outputs", outputs, shape, dtype, "that of the inputs", writable=True)
        operands.no_overlap(read_by(sources, bound), targets, list(zip(sources, targets, strict=True)))
    in_place = any(t.ptr == s.ptr for s, t in zip(sources, targets, strict=False))
    algos = _algorithms(group, algo, use_multimem, nbytes, epilogue)
    queues = resolve_streams(group, streams, sources)
    written, values = of_ranks(group, "outputs", outputs, targets, shape, dtype, queues)

    addresses, results = [source.ptr for source in sources], [target.ptr for target in written]
    placed = None
    if use_multimem:
        # in place with "one_stage" a peer could load an input after this rank has overwritten it: stage all inputs
        overwritten = in_place and algos[0] == "one_stage"
        stored = results if algos[0] == "two_stage" else []
        placed = multimem.Placement.of(group, queues, [] if overwritten else addresses, stored, nbytes)

    def make(algo: str) -> AllreduceCall:
        if placed is not None:
            staged = placed.staged and nbytes > 0
        else:
            unsafe = in_place and algo == "one_stage" and group.size > 1
            pulls = algo not in (*PUSH, "naive") and nbytes > 0
            staged = pulls and (unsafe or not plan.readable_by_peers(group, sources))
        return AllreduceCall(common, dtype, shape, algo, staged, bound, placed)

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


def _algorithms(group: Group, algo: str, use_multimem: bool, nbytes: int, epilogue: Epilogue | None) -> list[str]:
    """Return the algorithms to try one after another: the workspace may be too small for the first one."""
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
