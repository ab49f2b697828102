# SPDX-License-Identifier: Apache-2.0
"""`allreduce_many`: the sums of several arrays per rank, in one launch per rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....errors import ArgumentError, counted, kind_of
from ....plans import push, traffic, tuning
from ....plans import sums as plans
from ....plans.limits import ceil_div
from ....plans.nodes import Chunk, Share
from ....plans.shared import PACK_BYTES, ragged
from ....runtime.array import Array
from ....runtime.interop import ArrayLike
from ...call import operands, options
from ...call.op import op
from ...call.operands import Operand
from ...call.options import PDLLevel
from ...call.planned import Ready
from ...call.prepared import Direct, LaunchSequence, Prepared
from ...call.results import of_ranks
from ...call.streams import Streams, resolve_streams
from ..nodes import sums as nodes
from ..nodes.stages import link
from ..shared import plan
from ..shared.kernel import INPUT_DTYPES, PUSH
from ..shared.options import CallOptions
from ..shared.prepare import prepare
from ..shared.tuned import Tuned
from .allreduce import AllreduceCall
from .kernel import SumsKernel
from .params import MOST_TENSORS, AllreduceManyParams, AllreduceNodesManyParams, ManyCall, NodeSumsManyParams

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....dtypes import DType
    from ....runtime.launch import Launch
    from ....runtime.stream import Stream
    from ....trace.buffer import Trace

ALGORITHMS = ("auto", *PUSH, "naive")


@op
def allreduce_many(
    group: Group,
    tensors: Sequence[ArrayLike] | Sequence[Sequence[ArrayLike]],
    outputs: Sequence[ArrayLike] | Sequence[Sequence[ArrayLike]] | None = None,
    *,
    algo: str = "auto",
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[list[list[Array]] | list[Array]]:
    """Sum several tensors over the ranks, each as `allreduce` does; every rank gets all sums.

    `tensors[i]` is the list of local rank i's arrays, 1 to 64, each of any shape, all of one dtype; array t of every
    rank has the same shape. What `allreduce` says of its inputs holds for each. `outputs` are such lists; None
    allocates them. `outputs[i][t]` may be `tensors[i][t]` itself and must otherwise share memory with nothing. Returns
    a list of arrays for each local rank. With one local rank a list of arrays is accepted in place of a list of lists,
    and a list of arrays comes back.

    One launch per rank reduces all tensors; over several nodes it takes two launches and an exchange (docs/nodes.md).
    The bits are those of `allreduce` of each tensor alone. A tensor is sent in whole packs of 16 bytes, so a tensor of
    less than 16 bytes costs as much as one of 16 bytes.

    `algo` is "push_one_shot", "push_two_shot", "naive" (which has a launch for each tensor) or "auto", as for
    `allreduce` of all bytes together; over several nodes it is "auto". `pdl_level`, `max_num_blocks`, `streams`,
    `trace` and errors are as for `allreduce`.
    """
    common = CallOptions.of("allreduce_many", group, algo, ALGORITHMS, pdl_level, max_num_blocks, trace)

    bare = _is_bare(group, tensors)
    columns = _by_tensor(group, "tensors", tensors, bare)
    sources = [operands.of_ranks(group, "tensors", of_tensor, suffix=f"[{t}]") for t, of_tensor in enumerate(columns)]
    first = sources[0][0]
    options.one_of(f"dtype of {first.name}", first.dtype.name, INPUT_DTYPES)
    for found in sources:
        if found[0].dtype != first.dtype:
            raise ArgumentError(found[0].name, f"of dtype {found[0].dtype}", f"of dtype {first.dtype}, as {first.name}")
    shapes = [found[0].shape for found in sources]
    targets: list[list[Operand]] = [[] for _ in sources]
    given: list[Any] = [None] * len(sources)
    if outputs is not None:
        given = _by_tensor(group, "outputs", outputs, bare)
        if len(given) != len(sources):
            raise ArgumentError(
                "outputs", f"{counted(len(given), 'array')} per rank", f"{counted(len(sources), 'array')} per rank"
            )
        targets = [
            operands.of_ranks(
                group, "outputs", of_tensor, shape, first.dtype, "that of tensors", suffix=f"[{t}]", writable=True
            )
            for t, (of_tensor, shape) in enumerate(zip(given, shapes, strict=True))
        ]
        flat = list(itertools.chain(*sources)), list(itertools.chain(*targets))
        operands.no_overlap(*flat, list(zip(*flat, strict=True)))
    nbytes = sum(math.prod(shape) for shape in shapes) * first.dtype.itemsize
    algos = _algorithms(group, algo, nbytes)
    queues = resolve_streams(group, streams, sources[0])
    written, values = [], []
    for of_tensor, found, shape in zip(given, targets, shapes, strict=True):
        made = of_ranks(group, "outputs", of_tensor, found, shape, first.dtype, queues)
        written.append(made[0])
        values.append(made[1])

    inputs, results = _addresses(sources), _addresses(written)
    returned = [list(of_rank) for of_rank in zip(*values, strict=True)]
    return prepare(
        common,
        algos,
        lambda algo: _Call(common, first.dtype, tuple(map(tuple, shapes)), algo),
        (lambda call: call.sequence(inputs, results)) if nbytes else None,
        returned[0] if bare else returned,
        list(zip(*sources, strict=True)),
        list(zip(*written, strict=True)),
        queues,
    )


def _is_bare(group: Group, tensors: Any) -> bool:
    """Whether there is one local rank, and the caller gave its list of arrays without an outer list."""
    return len(group) == 1 and not (
        isinstance(tensors, (list, tuple)) and tensors and isinstance(tensors[0], (list, tuple))
    )


def _by_tensor(group: Group, argument: str, value: Any, bare: bool) -> list[Any]:
    """Return, for each tensor, a list with one array per local rank or, if `value` is `bare`, the array itself."""
    of_ranks = [value] if bare else operands.per_rank(group, argument, value)
    for position, arrays in enumerate(of_ranks):
        name = argument if bare else f"{argument}[{position}]"
        if not isinstance(arrays, (list, tuple)):
            raise ArgumentError(name, kind_of(arrays), "a list of arrays")
        if not 1 <= len(arrays) <= MOST_TENSORS:
            raise ArgumentError(
                name, f"a list of {counted(len(arrays), 'array')}", f"a list of 1 to {MOST_TENSORS} arrays"
            )
        if len(arrays) != len(of_ranks[0]):
            got, expected = (f"a list of {counted(len(of_rank), 'array')}" for of_rank in (arrays, of_ranks[0]))
            raise ArgumentError(name, got, f"{expected}, as {argument}[0] is")
    return list(value) if bare else [list(of_tensor) for of_tensor in zip(*of_ranks, strict=True)]


def _addresses(of_tensors: Sequence[Sequence[Operand]]) -> list[list[int]]:
    """Return the addresses of the arrays, by tensor and local rank."""
    return [[operand.ptr for operand in of_tensor] for of_tensor in of_tensors]


def _algorithms(group: Group, algo: str, nbytes: int) -> list[str]:
    """Return the algorithms to try one after another: the workspace may be too small for the first one."""
    if group.link is not None:
        if algo != "auto":
            raise ArgumentError("algo", f'"{algo}"', '"auto" for a group over several nodes')
        return [nodes.algorithm(group, algo, False)]
    if algo != "auto":
        plan.require_peers(group, algo)
        return [algo]
    if not group.peers_readable:
        return ["naive"]
    return [tuning.allreduce_algorithm(group.part(Tuned).costs, group.size, nbytes), "push_one_shot"]


class InTurn:
    """A launch sequence that joins the launch sequences of several calls, one after another on each rank's stream."""

    def __init__(self, sequences: Sequence[LaunchSequence]) -> None:
        self._sequences = sequences
        self.launches: list[list[Launch]] = [
            [launch for sequence in sequences for launch in sequence.launches[position]]
            for position in range(len(sequences[0].launches))
        ]

    def check(self, captures: Sequence[int | None], alone: bool) -> None:
        for sequence in self._sequences:
            sequence.check(captures, alone)

    def launch(self, positions: Sequence[int], streams: Sequence[Stream]) -> None:
        for sequence in self._sequences:
            sequence.launch(positions, streams)


@dataclass(frozen=True)
class _Call:
    """The properties of one call that are the same on every rank."""

    options: CallOptions
    dtype: DType
    shapes: tuple[tuple[int, ...], ...]
    algo: str

    @property
    def name(self) -> str:
        """The name of the algorithm in messages and in `Prepared.algo`."""
        return self.algo

    @property
    def text(self) -> str:
        """A description of everything that must be equal on all ranks."""
        return f"allreduce_many {self.algo} of {list(self.shapes)} {self.dtype}"

    def traffic(self) -> traffic.Traffic:
        group, elements = self.options.group, sum(map(math.prod, self.shapes))
        ranks, nbytes = group.layout.inside, elements * self.dtype.itemsize
        moved = traffic.reading_sources(self.algo, ranks, nbytes, group.link is not None)
        moved += traffic.writing_results(self.algo, ranks, nbytes)
        return moved if group.link is None else traffic.of_nodes(group.nodes, moved, elements, group.link.places)

    def sequence(self, inputs: list[list[int]], outputs: list[list[int]]) -> tuple[LaunchSequence, list[Ready]]:
        """Return the launch sequence for tensors at these addresses, by tensor and local rank, and the launches in it.
        At least one tensor has an element."""
        counts = list(map(math.prod, self.shapes))
        some = [t for t, count in enumerate(counts) if count]
        counts = [counts[t] for t in some]
        if self.algo == "naive":
            calls = [self._naive(count, inputs[t], outputs[t]) for t, count in zip(some, counts, strict=True)]
            return InTurn([sequence for sequence, _ in calls]), [one for _, ready in calls for one in ready]
        group, common = self.options.group, self.options
        own, to = [inputs[t] for t in some], [outputs[t] for t in some]
        if group.link is not None:
            return self._across_nodes(counts, own, to)
        key = ("allreduce_many", self.algo, self.dtype.name, tuple(counts), common.blocks, common.alone)
        none: list[list[int]] = [[] for _ in group]
        ready = plan.take(group, key, lambda: self._plan(counts), none, [0] * len(none), common.pdl, common.trace)
        _point(ready, "many.inputs", own)
        _point(ready, "many.outputs", to)
        return Direct([one.launch for one in ready]), ready

    def _naive(self, count: int, inputs: list[int], outputs: list[int]) -> tuple[LaunchSequence, list[Ready]]:
        return AllreduceCall(self.options, self.dtype, (count,), "naive", False, None, None).sequence(inputs, outputs)

    def _across_nodes(
        self, counts: Sequence[int], inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> tuple[LaunchSequence, list[Ready]]:
        """Return the launches of an all-reduce over nodes, on the packs of all tensors together.

        A rank's kernel has only the addresses of its own tensors. So inputs are always staged: each rank copies its
        packs to its payload, where its peers read them. Results go through payloads, as those of every all-reduce over
        nodes."""
        common, group, width = self.options, self.options.group, PACK_BYTES // self.dtype.itemsize
        partial = any(ragged(count, self.dtype.itemsize) for count in counts)
        none = [0] * len(group)

        def key(chunk: Chunk) -> tuple[object, ...]:
            return "allreduce_many", self.dtype.name, tuple(counts), chunk, common.blocks

        def before(chunk: Chunk) -> list[Ready]:
            parameters = NodeSumsManyParams(many=ManyCall.of(counts, width, chunk.first))
            found = nodes.sums(common, self.dtype, partial, chunk, none, parameters, key(chunk), MOST_TENSORS)
            _point(found, "many.inputs", inputs)
            return found

        def after(chunk: Chunk) -> list[Ready]:
            made = lambda: self._results(chunk, ManyCall.of(counts, width, chunk.first), partial)  # noqa: E731
            found = plan.take(group, key(chunk), made, [[]] * len(group), none, common.pdl, common.trace)
            _point(found, "many.outputs", outputs)
            return found

        share = Share(1, width, PACK_BYTES, group.layout.inside, link(group).places, staged=True)
        return nodes.sequence(group, sum(ceil_div(count, width) for count in counts), share, before, after)

    def _results(self, chunk: Chunk, many: ManyCall, partial: bool) -> plan.Plan:
        """Return the plan of the kernel after the exchange, which adds the nodes' partial sums and writes the
        results."""
        inside, count = chunk.share.inside, chunk.items * chunk.share.width
        shape = plans.launch(count, self.dtype.itemsize, inside, nodes.ALGORITHM, self.options.blocks)
        spec = SumsKernel(
            op="allreduce",
            algo=nodes.ALGORITHM,
            dtype=self.dtype,
            ranks=inside,
            out_dtype=self.dtype,
            packs=shape.packs,
            ragged=partial,
            nodes=True,
            many=MOST_TENSORS,
        )
        parameters = AllreduceNodesManyParams(count=count, columns=1, chunk_packs=chunk.largest, many=many)
        return plan.pull(spec, shape, chunk.items, chunk.largest, parameters)

    def _plan(self, counts: Sequence[int]) -> plan.Plan:
        group, itemsize = self.options.group, self.dtype.itemsize
        width = PACK_BYTES // itemsize
        spec = SumsKernel(
            op="allreduce",
            algo=self.algo,
            dtype=self.dtype,
            ranks=group.size,
            out_dtype=self.dtype,
            ragged=any(ragged(count, itemsize) for count in counts),
            many=MOST_TENSORS,
            compares=plan.compares(group),
        )
        total = sum(ceil_div(count, width) for count in counts) * width
        shape = push.sums_shape(spec.work, total, group.workspace.payload_bytes)
        spec = replace(spec, threads=shape.threads, exact=shape.exact, depth=shape.depth, relays=shape.relays)
        many = ManyCall.of(counts, width)
        parameters = AllreduceManyParams(count=total, columns=1, chunk_packs=shape.chunk, many=many)
        return plan.push(group, spec, shape, self.options.blocks, self.options.alone, parameters)


def _point(ready: Sequence[Ready], field: str, of_tensors: Sequence[Sequence[int]]) -> None:
    """Write addresses, by tensor and local rank, to the parameters."""
    for position, one in enumerate(ready):
        one.point(field, *(of_ranks[position] for of_ranks in of_tensors))
