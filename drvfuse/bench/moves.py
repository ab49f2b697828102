# SPDX-License-Identifier: Apache-2.0
"""Times of the collectives that have no benchmark of their own, by every algorithm. They are compared with the wire
time, and with the times of NCCL in the same run.

A size is the number of bytes of a rank's output, or of its input for the ops that add. A figure is the time of a CUDA
graph of back-to-back calls, which use several sets of inputs in turn, divided by the number of calls. The fused op has
a residual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..comm.group import Group
from ..errors import Unsupported
from . import peers, timing
from .collective_calls import LEVELS
from .floors import Links
from .forms import FORMS
from .nccl import PEERS
from .ops import calls_of
from .settings import Settings
from .sizes import MOVES, columns_of, input_bytes, sets_of, unit_of

ALGORITHMS = ("push", "relay", "put", "pull", "push_one_shot", "push_two_shot", "auto")
KIB = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 131072)
HEAD = ["KiB", "PDL", *ALGORITHMS, "auto is", "wire", "x wire", *PEERS, "x peer"]
TEXT_COLUMNS = 0


def wire_bytes(op: str, ranks: int, nbytes: int) -> int:
    """The fewest bytes that the busiest link must carry in one direction, which are those that a rank must receive."""
    if op == "allreduce_many":
        return 2 * (ranks - 1) * nbytes // ranks
    return nbytes if op == "broadcast" else (ranks - 1) * nbytes // ranks


def measure(
    group: Group, op: str, kib: Sequence[int], algos: Sequence[str], settings: Settings, with_peers: bool
) -> Iterator[dict[str, Any]]:
    """Yield a result for each size. The peers are measured first. Raises Unsupported without peer access."""
    if not group.peers_readable:
        raise Unsupported("this benchmark needs peer access between all GPUs of the group, to time copies between them")
    unit = unit_of(group.size)
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
        "replays": timing.REPLAYS,
        "settings": asdict(settings),
        "link_bytes_per_us": links.bytes_per_us(10),
    }
    for nbytes in sizes:
        sets = sets_of(input_bytes(op, group.size, nbytes), settings.sets)
        calls = calls_of(group, op, *_shape(op, group.size, nbytes), sets, FORMS["residual"])
        yield {
            "run": run,
            "kib": nbytes / 1024,
            "wire_us": wire_bytes(op, group.size, nbytes) / run["link_bytes_per_us"],
            "ours": {algo: calls.times(algo, settings.calls) for algo in algos},
            "peers": {name: found[name][1, nbytes, False] for name in names},
        }


def _shape(op: str, ranks: int, nbytes: int) -> tuple[int, int]:
    """Rows and columns of a bfloat16 array of `nbytes`."""
    columns = nbytes // 2 if op in MOVES else columns_of(nbytes, ranks)
    return nbytes // 2 // columns, columns


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
    """The notes below the table: how the times were measured, the ratio over all sizes, and failures."""
    run = results[0]["run"]
    of = "output" if run["op"] in MOVES else "input"
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
