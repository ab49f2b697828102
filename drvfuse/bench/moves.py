# SPDX-License-Identifier: Apache-2.0
"""Times of the collectives that have no benchmark of their own, by every algorithm, compared with the link rate and
NCCL of the same run.

A size is that of the output of a rank, in bytes, and of its input for those that add (`sums`). A figure is the time of
a CUDA graph of back-to-back calls over several sets of inputs in turn, divided by the calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..comm.group import Group
from ..errors import Unsupported
from ..ops.call.options import PDLLevel
from ..ops.call.prepared import Prepared
from ..ops.collectives.all_gather import all_gather
from ..ops.collectives.all_to_all import all_to_all
from ..ops.collectives.broadcast import broadcast
from ..ops.collectives.move_kernels import RELAY
from . import peers, sums
from .collective_calls import launches
from .floors import Links
from .move_worker import PEERS
from .settings import Settings
from .timing import REPLAYS, microseconds_per_call

OPS: dict[str, Callable[..., Any]] = {"all_gather": all_gather, "broadcast": broadcast, "all_to_all": all_to_all}
_MOVING = ("push", "relay", "put", "pull", "auto")
ALGORITHMS = ("push", "relay", "put", "pull", "push_one_shot", "push_two_shot", "auto")
LEVELS = {"off": PDLLevel.OFF, "early": PDLLevel.OVERLAP_AT_BEGINNING}
KIB = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 131072)
HEAD = ["KiB", "PDL", *ALGORITHMS, "auto is", "wire", "x wire", *PEERS, "x peer"]
TEXT_COLUMNS = 0
_ROTATED_BYTES = 256 << 20  # all sets of inputs of a rank: more than any cache holds


def input_bytes(op: str, ranks: int, nbytes: int) -> int:
    """The bytes of a rank's input: for all_gather its part of an output of `nbytes`, else `nbytes`."""
    return nbytes // ranks if op == "all_gather" else nbytes


def algorithms(op: str) -> tuple[str, ...]:
    """The algorithms of an op that are timed."""
    return sums.ALGORITHMS.get(op) or tuple(algo for algo in _MOVING if algo != RELAY or op == "broadcast")


def wire_bytes(op: str, ranks: int, nbytes: int) -> int:
    """The fewest bytes that the busiest link must carry in one direction: those that a rank must receive."""
    if op == "allreduce_many":
        return 2 * (ranks - 1) * nbytes // ranks
    return nbytes if op == "broadcast" else (ranks - 1) * nbytes // ranks


def sets_of(nbytes: int, most: int) -> int:
    """The number of sets of inputs of that size, at most `most`."""
    return max(2, min(most, _ROTATED_BYTES // nbytes))


def measure(
    group: Group, op: str, kib: Sequence[int], algos: Sequence[str], settings: Settings, with_peers: bool
) -> Iterator[dict[str, Any]]:
    """A result for each size. The peers are measured first. Unsupported without peer access."""
    if not group.peers_readable:
        raise Unsupported("the floor and most algorithms need peer access between all GPUs of the group")
    unit = 16 * group.size**2  # so that every rank's part of every rank's input is whole packs
    sizes = [-(-1024 * size // unit) * unit for size in kib]
    shapes = [(1, size) for size in sizes]
    names = PEERS if with_peers else ()
    found = {name: peers.measure(name, op, [False], group.size, shapes, settings) for name in names}
    links = Links(group, max(wire_bytes(op, group.size, max(sizes)), settings.link_bytes))
    run = {
        "op": op,
        "gpus": group.size,
        "device": group[0].device.name,
        "driver": group.driver.name,
        "max_blocks": group.max_blocks,
        "replays": REPLAYS,
        "settings": asdict(settings),
        "link_bytes_per_us": links.bytes_per_us(10),
    }
    for nbytes in sizes:
        kind = sums.Sums if op in sums.OPS else _Bytes
        ours = _Calls(group, kind(group, op, nbytes, sets_of(input_bytes(op, group.size, nbytes), settings.sets)))
        yield {
            "run": run,
            "kib": nbytes / 1024,
            "wire_us": wire_bytes(op, group.size, nbytes) / run["link_bytes_per_us"],
            "ours": {algo: ours.times(algo, settings.calls) for algo in algos},
            "peers": {name: found[name][1, nbytes, False] for name in names},
        }


class _Bytes:
    """Random inputs of a size in several sets, and outputs that the calls share; a broadcast is in place."""

    def __init__(self, group: Group, op: str, nbytes: int, sets: int) -> None:
        self._group, self._op = group, OPS[op]
        rows = group.size  # so that they can be exchanged in equal blocks
        shape = (rows, input_bytes(op, group.size, nbytes) // rows)
        random = np.random.default_rng(nbytes)
        self.sets = [[rank.array(random.integers(0, 256, shape, np.uint8)) for rank in group] for _ in range(sets)]
        rows *= group.size if op == "all_gather" else 1
        self._outputs = [rank.empty((rows, shape[1]), "uint8") for rank in group]

    def prepare(self, inputs: Any, **options: Any) -> Prepared[Any]:
        """A call of one of `sets`."""
        outputs = inputs if self._op is broadcast else self._outputs  # as torch has it
        return self._op.prepare(self._group, inputs, outputs, **options)  # type: ignore[attr-defined]


class _Calls:
    """Calls of one op over several sets of inputs."""

    def __init__(self, group: Group, over: _Bytes | sums.Sums) -> None:
        self._group, self._over = group, over

    def times(self, algo: str, calls: int) -> dict[str, Any]:
        """The times by level of PDL, and the algorithm that was used."""
        found: dict[str, Any] = {}
        for name, level in LEVELS.items():
            prepared = [self._over.prepare(inputs, algo=algo, pdl_level=level) for inputs in self._over.sets]
            timing = microseconds_per_call(self._group, launches(prepared), calls)
            found[name] = {"us": timing.median, "spread": timing.spread}
            found["algo"] = prepared[0].algo
        return found


def lines(result: dict[str, Any]) -> list[list[str]]:
    """A line for each level of PDL."""
    return [_line(result, level, level == "off") for level in LEVELS]


def _line(result: dict[str, Any], level: str, first: bool) -> list[str]:
    ours, wire, peer = result["ours"], result["wire_us"], peer_us(result)
    us = ours["auto"][level]["us"] if "auto" in ours else min(of[level]["us"] for of in ours.values())
    cells = [f"{result['kib']:g}", level]
    cells += [_cell(ours[algo][level]) if algo in ours else "" for algo in ALGORITHMS]
    cells += [ours["auto"]["algo"] if "auto" in ours else "", f"{wire:.2f}", f"{us / wire:.2f}"]
    cells += [_cell(result["peers"][name]) if first and name in result["peers"] else "" for name in PEERS]
    return [*cells, f"{us / peer:.2f}" if peer else ""]


def _cell(figure: dict[str, Any]) -> str:
    return "failed" if "failed" in figure else f"{figure['us']:.2f}±{figure['spread']:.2f}"


def peer_us(result: dict[str, Any]) -> float | None:
    """The time of the fastest peer of the run."""
    return min((figure["us"] for figure in result["peers"].values() if "us" in figure), default=None)


def notes(results: Sequence[dict[str, Any]]) -> list[str]:
    """How it was measured, the ratio over all sizes, and what failed."""
    run = results[0]["run"]
    of = "input" if run["op"] in sums.OPS else "output"
    found = [
        f"microseconds per call, median ± (largest - smallest) of {run['replays']} replays; at least "
        f"{run['settings']['calls']} calls per graph; max_blocks {run['max_blocks']}; sizes are those of an {of}",
        f"wire: what a rank must receive, at {run['link_bytes_per_us'] / 1e3:.0f} GB/s: copies, each rank to the next",
    ]
    for level in LEVELS:
        ratios = [
            result["ours"]["auto"][level]["us"] / peer
            for result in results
            if "auto" in result["ours"] and (peer := peer_us(result)) is not None
        ]
        if ratios:
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            span = f"{min(ratios):.2f} to {max(ratios):.2f}"
            found.append(f"auto / the fastest peer, PDL {level}: geometric mean {mean:.3f}, {span}")
    failures = {
        f"{name} failed: {figure['failed']}": None
        for result in results
        for name, figure in result["peers"].items()
        if "failed" in figure
    }
    return [*found, *failures]
