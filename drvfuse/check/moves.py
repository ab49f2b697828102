# SPDX-License-Identifier: Apache-2.0
"""Cases of all-gather, broadcast and all-to-all: sequences of calls on one group.

All calls of a run have their inputs in the same memory, and their outputs in the same memory. A kernel directly before
a call writes its inputs, and a kernel directly after it copies its outputs. The host waits once, at the end. So a rank
that has ended a call overwrites inputs and reads outputs at once. If a peer still reads those inputs or writes those
outputs at that time, the case has a finding. A quarter of the words are 0xFFFFFFFF.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import config, reference
from ..comm.group import Group
from ..ops.call.options import PDLLevel
from ..ops.call.prepared import Prepared
from ..ops.collectives.moves.all_gather import all_gather
from ..ops.collectives.moves.all_to_all import all_to_all
from ..ops.collectives.moves.broadcast import broadcast
from ..ops.collectives.moves.kernel import ALGOS
from ..ops.collectives.sums.allreduce import allreduce
from ..plans.quantisation import Quantisation
from ..runtime.array import Array, view
from ..runtime.launch import Launch
from ..runtime.stream import Stream
from .calls import AMPLE, PDL, maybe_graph
from .problems import Host
from .run import Run

TIGHT = 8 << 10
OPS = ("all_gather", "scales", "arranged", "broadcast", "relay", "all_to_all", "one_way", "in_place")
COLUMNS = (33, 64)  # words of a row: rows begin at multiples of 4 bytes, or of 16
_WORDS = 1 << 14
_COLUMNS = 160  # columns of rows whose scales are by column or in tiles; a row has five scales

Pair = tuple[str, str, list[Host], list[Host]]
"""The names of an input and an output, and what they hold on each rank."""


class Memory:
    """The memory for inputs and outputs of all calls of a group. Each call uses the first words of each array."""

    def __init__(self, run: Run, group: Group) -> None:
        self.run, self.group = run, group
        self._copy = run.kernel(group.driver, "copy")
        for rank in group:
            self._copy.load(rank.device)
        self._arrays = {
            name: [rank.empty(_WORDS, "uint32") for rank in group] for name in ("in", "in 2", "out", "out 2")
        }

    def arrays(self, name: str, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        sizes = [int(np.prod(shape)) for shape in shapes]
        return [a[:size].reshape(shape) for a, size, shape in zip(self._arrays[name], sizes, shapes, strict=True)]

    def copying(self, sources: Sequence[Array], targets: Sequence[Array], pdl: bool) -> list[list[Launch]]:
        """Return for each rank the launch of a kernel that copies its source to its target, or none for an empty
        array."""
        return [
            [self._copy.prepare(1, 128, source, target, source.nbytes, device=target.device, pdl=pdl)]
            if source.nbytes
            else []
            for source, target in zip(sources, targets, strict=True)
        ]


class MovingCall:
    """A prepared call, the kernels before and after it, and its expected results."""

    def __init__(self, memory: Memory, op: str, algo: str, pdl: PDLLevel, blocks: int) -> None:
        run, group, n = memory.run, memory.group, memory.group.size
        columns = run.choice(COLUMNS)
        options: dict[str, Any] = {"algo": algo, "pdl_level": pdl, "max_num_blocks": blocks}
        pairs: list[Pair] = []
        self.what = f"{op} {algo}"
        rows = [int(rows) for rows in run.random.integers(1, 9, n)]
        call: Prepared[Any]
        if op == "arranged":
            call, pairs, xs, ys = _arranged(memory, options)
        elif op in ("all_gather", "scales"):
            hosts = [_words(run, (count, columns)) for count in rows]
            pairs.append(("in", "out", hosts, [reference.all_gather(hosts)] * n))
            if op == "scales":
                scales = [_words(run, (count, 3)) for count in rows]
                pairs.append(("in 2", "out 2", scales, [reference.all_gather(scales)] * n))
            xs, ys = _both(memory, pairs)
            more = {"scales": xs[1], "gathered_scales": ys[1]} if op == "scales" else {}
            call = all_gather.prepare(group, xs[0], ys[0], splits=rows, **more, **options)
        elif op in ("broadcast", "relay"):
            options["algo"] = op if op == "relay" else algo
            root, hosts = int(run.random.integers(n)), [_words(run, (30, columns)) for _ in rows]
            pairs.append(("in", "out", hosts, [hosts[root]] * n))
            xs, ys = _both(memory, pairs)
            call = broadcast.prepare(group, xs[0], ys[0], root=root, **options)
        else:
            table = run.random.integers(0, 9, (n, n))
            if op == "one_way":  # a rank receives bytes from a rank to which it sends none
                table = np.triu(table, 1) * 3
            if op == "in_place":
                table = table + table.T
            splits = table.tolist()
            hosts = [_words(run, (sum(of), columns)) for of in splits]
            pairs.append(("in", "in" if op == "in_place" else "out", hosts, reference.all_to_all(hosts, splits)))
            xs, ys = _both(memory, pairs)
            call = all_to_all.prepare(group, xs[0], ys[0], splits=splits, **options)
        self._call, dependent = call, pdl is not PDLLevel.OFF
        self._before: list[list[Launch]] = [[] for _ in group]
        self._after: list[list[Launch]] = [[] for _ in group]
        self._results: list[tuple[list[Array], list[Host]]] = []
        for (_, _, hosts, expected), x, y in zip(pairs, xs, ys, strict=True):
            kept = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
            results = [rank.empty(host.shape, "uint32") for rank, host in zip(group, expected, strict=True)]
            self._results.append((results, expected))
            for every, made in (
                (self._before, memory.copying(kept, x, dependent)),
                (self._after, memory.copying(y, results, dependent)),
            ):
                for launches, of_rank in zip(every, made, strict=True):
                    launches += of_rank

    def launch(self, streams: Sequence[Stream], alone: Sequence[int], late: int | None) -> None:
        for position in alone or range(len(streams)):
            for launch in self._before[position] * (3 if position == late else 1):
                launch(streams[position])
            if alone:
                self._call.launch(rank=position, stream=streams[position])
                for launch in self._after[position]:
                    launch(streams[position])
        if not alone:
            self._call.launch(streams)
            for position, launches in enumerate(self._after):
                for launch in launches:
                    launch(streams[position])

    def compare(self, run: Run) -> None:
        for results, expected in self._results:
            for rank, (array, wanted) in enumerate(zip(results, expected, strict=True)):
                run.compare(f"{self.what}, rank {rank}", array.numpy(), wanted)


def _arranged(memory: Memory, options: dict[str, Any]) -> tuple[Prepared[Any], list[Pair], Any, Any]:
    """Make an all-gather of FP8 rows with scales by column or in tiles, in which a rank's rows begin anywhere in a
    tile."""
    run, group, n = memory.run, memory.group, memory.group.size
    made = Quantisation.mxfp8(layout=run.choice(("column", "tiles")))
    rows = [int(rows) for rows in run.random.integers(0, 50, n)]

    def shape(count: int) -> tuple[int, ...]:
        found = made.scales_shape((count,), _COLUMNS)
        assert found is not None
        return found

    codes = [_words(run, (count, _COLUMNS // 4)) for count in rows]
    scales = [_words(run, (int(np.prod(shape(count))) // 4,)) for count in rows]
    gathered = reference.all_gather(
        [host.view(np.uint8) for host in codes],
        [host.view(np.uint8).reshape(shape(count)) for host, count in zip(scales, rows, strict=True)],
        made,
    )
    wanted = [host.reshape(-1).view(np.uint32) for host in gathered]
    pairs = [("in", "out", codes, [wanted[0]] * n), ("in 2", "out 2", scales, [wanted[1]] * n)]
    xs, ys = _both(memory, pairs)

    def typed(arrays: Sequence[Array], shapes: Sequence[tuple[int, ...]], dtype: Any) -> list[Array]:
        return [view(x.ptr, of, dtype, x.device, owner=x) for x, of in zip(arrays, shapes, strict=True)]

    call = all_gather.prepare(
        group,
        typed(xs[0], [(count, _COLUMNS) for count in rows], made.dtype),
        typed(ys[0], [(sum(rows), _COLUMNS)] * n, made.dtype),
        splits=rows,
        scales=typed(xs[1], [shape(count) for count in rows], made.scales),
        gathered_scales=typed(ys[1], [shape(sum(rows))] * n, made.scales),
        quantisation=made,
        **options,
    )
    return call, pairs, xs, ys


def _both(memory: Memory, pairs: Sequence[Pair]) -> tuple[Any, Any]:
    xs = [memory.arrays(name, [host.shape for host in hosts]) for name, _, hosts, _ in pairs]
    ys = [
        x if target == source else memory.arrays(target, [host.shape for host in expected])
        for x, (source, target, _, expected) in zip(xs, pairs, strict=True)
    ]
    return xs, ys


def _words(run: Run, shape: tuple[int, ...]) -> Host:
    found = run.random.integers(0, 2**32, shape, np.uint32)
    found[run.random.random(shape) < 0.25] = 0xFFFFFFFF
    return found


def moves(
    run: Run,
    *,
    ops: Sequence[str] = OPS,
    algos: Sequence[str] = (*ALGOS, "naive"),
    ranks: int = 0,
    tight: bool | None = None,
    graph: bool | None = None,
    alone: bool | None = None,
    pdl: PDLLevel | None = None,
    timeout: float = 10.0,
    nodes: int = 1,
) -> None:
    """Check six calls on `ranks` GPUs that form `nodes` nodes. The seed selects the options that are None, and 2 or 3
    GPUs if `ranks` is 0.

    With `tight` the workspace holds only a fraction of a call. With `graph` the sequence is replayed twice from a
    graph. With `alone` the ranks are launched one by one.
    """
    ranks = ranks or 2 + run.seed % 2
    tight = run.chance() if tight is None else tight
    graph = run.chance(0.25) if graph is None else graph
    with run.group(ranks, workspace_bytes=TIGHT if tight else AMPLE, max_blocks=4, nodes=nodes) as group:
        if group.link is not None:
            group.link.engine.watched = run.seed % 2 == 0  # if True, kernels count the exchanges that start and end
        memory = Memory(run, group)
        with config.override(spin_timeout=timeout):
            calls = []
            for _ in range(6):
                level = run.choice(PDL) if pdl is None else pdl
                calls.append(MovingCall(memory, run.choice(ops), run.choice(algos), level, int(run.choice((1, 3, 4)))))
        alone = "naive" not in algos and nodes == 1 and (run.chance() if alone is None else alone)
        order = run.shuffled(range(ranks)) if alone else ()
        streams = [rank.stream for rank in group]
        group.synchronize()
        with maybe_graph(group, streams, graph):
            for call in calls:
                call.launch(streams, order, run.choice((None, *range(ranks))))
        group.synchronize()
        for done in calls:
            done.compare(run)


def moves_in_rounds(
    run: Run,
    *,
    ops: Sequence[str] = ("broadcast", "relay", "one_way", "all_gather", "all_to_all"),
    ranks: int = 3,
    timeout: float = 10.0,
) -> None:
    """Check push calls of several rounds, each followed by an all-reduce that uses the same slots. In some calls bytes
    move in one direction only.

    There are three ranks by default, as a relay broadcast on two ranks is an ordinary push.
    """
    with run.group(ranks, workspace_bytes=TIGHT, max_blocks=4) as group:
        memory, streams = Memory(run, group), [rank.stream for rank in group]
        hosts = [run.random.standard_normal(520).astype(np.float32) for _ in range(ranks)]
        with config.override(spin_timeout=timeout):
            calls = [
                MovingCall(memory, op, "push", run.choice(PDL), int(run.choice((1, 3, 4)))) for op in run.shuffled(ops)
            ]
            xs = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
            ys = [[rank.empty(520, "float32") for rank in group] for _ in calls]
            sums = [allreduce.prepare(group, xs, y, algo="push_one_shot") for y in ys]
        group.synchronize()
        for call, added in zip(calls, sums, strict=True):
            call.launch(streams, (), run.choice((None, *range(ranks))))
            added.launch()
        group.synchronize()
        for done in calls:
            done.compare(run)
        for y in ys:
            for rank, array in enumerate(y):
                run.compare(f"sum of rank {rank}", array.numpy(), reference.allreduce(hosts))
