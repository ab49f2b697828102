# SPDX-License-Identifier: Apache-2.0
"""The table, the notes and the chart of results of the collectives' benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..trace.plot import figure_class
from . import stored_peers
from .peer_worker import NORM, PEERS

ALGORITHMS = ("one_stage", "two_stage", "push_one_shot", "push_two_shot", "auto")
MULTIMEM = ("multimem_one_stage", "multimem_two_stage")
HEAD = ["rows x cols", "residual", "PDL", "KiB", *ALGORITHMS, *MULTIMEM, "adds", "wire", "push", "x wire"]
HEAD += [*PEERS, NORM, "stored", "x peer", "x stored"]
TEXT_COLUMNS = 3
_WIRE_RULES_US = 10.0  # times from this number of microseconds on are compared with the wire time


def lines(result: dict[str, Any]) -> list[list[str]]:
    """A line for each level of PDL; figures that do not depend on the level are in the first line."""
    return [_line(result, level, level == "off") for level in result["run"]["pdl"]]


def _line(result: dict[str, Any], level: str, first: bool) -> list[str]:
    ours, floor, early = result["ours"], result["wire_us"], level == "early"
    fused = result["run"]["op"] != "allreduce"
    residual = {False: "no", True: "yes"}[result["residual"]] if fused else ""
    cells = [f"{result['rows']}x{result['cols']}", residual, level, f"{result['kib']:g}"]
    cells += [_cell(ours[algo][level]) if algo in ours else "" for algo in (*ALGORITHMS, *MULTIMEM)]
    cells.append(f"{ours['auto']['adds_us']:.2f}" if early and "auto" in ours else "")
    cells += [f"{floor:.2f}", _cell(result["push_us"])] if first else ["", ""]
    us = ours["auto"][level]["us"] if "auto" in ours else min(found[level]["us"] for found in ours.values())
    cells.append(f"{us / floor:.2f}" if floor >= _WIRE_RULES_US else "")
    cells += [_cell(result["peers"][name]) if first and name in result["peers"] else "" for name in (*PEERS, NORM)]
    stored = stored_us(result)
    cells.append(f"{stored:.2f}" if first and stored else "")
    return [*cells, *(f"{us / other:.2f}" if other else "" for other in (peer_us(result), stored))]


def _cell(figure: dict[str, Any]) -> str:
    return "failed" if "failed" in figure else f"{figure['us']:.2f}±{figure['spread']:.2f}"


def peer_us(result: dict[str, Any]) -> float | None:
    """The time of the fastest other library ("peer") that this run measured."""
    found = result["peers"].items()
    return min((figure["us"] for name, figure in found if name != NORM and "us" in figure), default=None)


def stored_us(result: dict[str, Any]) -> float | None:
    """The time of the fastest other library in `stored_peers`. For the fused op without residual it is the sum of two
    times: the stored all-reduce, and the compiled norm that this run measured.
    """
    if result["stored"] is None:
        return None
    us: float = result["stored"][1]
    if result["run"]["op"] == "allreduce" or result["residual"]:
        return us
    norm = result["peers"].get(NORM, {})
    return us + norm["us"] if "us" in norm else None


def notes(results: Sequence[dict[str, Any]]) -> list[str]:
    """The notes below the table: how the times were measured, ratios over all shapes, and failures."""
    run, launch = results[0]["run"], results[0]["run"]["launch_us"]
    settings = run["settings"]
    levels = ", ".join(f"{name}: {level}" for name, level in run["pdl"].items())
    found = [
        f"microseconds per call, median ± (largest - smallest) of {run['replays']} replays; at least "
        f"{settings['calls']} calls per graph, {settings['sets']} sets of inputs in turn; PDL {levels}, peers as they "
        f"are; max_blocks {run['max_blocks']}; spin_timeout {run['spin_timeout']:g} s",
        f"floors: an empty kernel {_cell(launch['off'])}, with PDL {_cell(launch['early'])}; links "
        f"{run['link_bytes_per_us'] / 1e3:.0f} GB/s, each rank to the next at once; wire: the fewest bytes that a rank "
        "can receive at that rate; push: a kernel that copies as many to the next rank",
        f"adds: the time that auto adds to a chain of GEMVs of {settings['weight_bytes'] / 2**20:g} MiB of weights",
    ]
    if any(stored_us(result) for result in results):
        found.append(f"stored: {stored_peers.source()}" + _sequences(run["op"]))
    if any(algo in MULTIMEM for algo in results[0]["ours"]):
        found.append(
            "multimem: inputs and outputs of every algorithm lie in multicast memory. Over a link go (1 + 1/n) S each "
            "way by two stages, and n S out and S in by one stage; wire, push and peers are without multicast"
        )
    found += list(_ratios(results))
    failures = {
        f"{name} failed: {figure['failed']}": None
        for result in results
        for name, figure in result["peers"].items()
        if "failed" in figure
    }
    return [*found, *failures]


def _sequences(op: str) -> str:
    if op == "allreduce":
        return ""
    return (
        "; without residual its all-reduce and this run's compiled norm. A peer of this run is its all-reduce and the "
        f"compiled norm; {NORM} is not counted as a peer"
    )


def _ratios(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    for what, of_other in (("the fastest peer of the run", peer_us), ("stored", stored_us)):
        for residual in sorted({result["residual"] for result in results}):
            chosen = [r for r in results if r["residual"] == residual and of_other(r)]
            for level in results[0]["run"]["pdl"] if chosen else ():
                for name, ours in (("auto", _auto), ("the fastest algorithm", _fastest)):
                    ratios = [us / (of_other(r) or math.nan) for r in chosen if (us := ours(r, level)) is not None]
                    if ratios:
                        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
                        case = f"{what}{', residual' if residual else ''}, PDL {level}"
                        yield (
                            f"{name} / {case}: geometric mean {mean:.3f}, {min(ratios):.2f} to {max(ratios):.2f} over "
                            f"{len(ratios)} shapes"
                        )


def _auto(result: dict[str, Any], level: str) -> float | None:
    return result["ours"]["auto"][level]["us"] if "auto" in result["ours"] else None


def _fastest(result: dict[str, Any], level: str) -> float | None:
    return min((found[level]["us"] for found in result["ours"].values()), default=None)


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw time over size on logarithmic axes: a picture for each number of columns, with and without residual."""
    panels = sorted({(result["residual"], result["cols"]) for result in results})
    across = len({cols for _, cols in panels})
    down = -(-len(panels) // across)
    figure = figure_class()(figsize=(8 * across, 6 * down), layout="tight")
    run = results[0]["run"]
    for axis, (residual, cols) in zip(figure.subplots(down, across, squeeze=False).flat, panels, strict=False):
        chosen = sorted(
            (r for r in results if (r["residual"], r["cols"]) == (residual, cols)), key=lambda result: result["kib"]
        )

        def curve(of: Any, label: str, style: str, chosen: Any = chosen, axis: Any = axis) -> None:
            points = [(result["kib"], us) for result in chosen if (us := of(result)) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=label, markersize=4)

        for algo in chosen[0]["ours"]:
            curve(lambda r, algo=algo: r["ours"][algo]["early"]["us"], algo, "o-")
        for name in chosen[0]["peers"]:
            curve(lambda r, name=name: r["peers"][name].get("us"), name, "s--")
        curve(stored_us, "stored", "kx")
        curve(lambda r: r["wire_us"], "wire", "k:")
        axis.axhline(run["launch_us"]["early"]["us"], color="grey", linestyle="-.", label="launch with PDL")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("KiB per rank")
        axis.set_title(
            f"{run['op']}{', residual' if residual else ''}, {cols} columns, {run['gpus']} x {run['device']}"
        )
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("us per call, PDL OVERLAP_AT_BEGINNING")
    figure.savefig(path, dpi=120)
