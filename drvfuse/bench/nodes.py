# SPDX-License-Identifier: Apache-2.0
"""Times of collectives on a group of several nodes, all in this process. Each is compared with the time on a group of
one node, and with the time of the exchange alone.

A figure is the time of a CUDA graph of back-to-back calls, which use several sets of inputs in turn, divided by the
number of calls. "exchange" is the work of the exchange engine in one call, without the kernels before and after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..comm.group import Group
from ..runtime.driver import Driver
from . import timing
from .collective_calls import CollectiveCalls, figure, launches
from .ops import calls_of
from .settings import Settings
from .timing import microseconds_per_call, together

HEAD = ("op", "rows x cols", "one node", "+-", "nodes", "+-", "exchange", "x one node")
TEXT_COLUMNS = 2
SHAPES = ((1, 4096), (16, 4096), (128, 4096), (2048, 8192))


def measure(
    driver: Driver,
    gpus: int,
    nodes: int,
    exchange: str,
    ops: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    settings: Settings,
) -> Iterator[dict[str, Any]]:
    """Yield a result for each op and shape, with times on a group of one node and on a group of `nodes` nodes. Results
    of both groups are compared with the reference before the calls are timed."""
    cases = [(op, shape) for op in ops for shape in shapes]
    with Group.local(gpus, driver=driver) as group:
        device = group[0].device.name
        inside = [calls_of(group, op, *shape, settings.sets).times("auto", settings.calls) for op, shape in cases]
    with Group.local(gpus, driver=driver, nodes=nodes, exchange=exchange) as group:
        for (op, (rows, cols)), one in zip(cases, inside, strict=True):
            yield {
                **{"op": op, "rows": rows, "cols": cols, "gpus": gpus, "nodes": nodes, "device": device},
                **{"exchange": exchange, "one_node": one, "over_nodes": _over_nodes(group, op, rows, cols, settings)},
            }


def _over_nodes(group: Group, op: str, rows: int, cols: int, settings: Settings) -> dict[str, Any]:
    """The times of a call and of its exchange, on a group of several nodes."""
    assert group.link is not None
    calls = calls_of(group, op, rows, cols, settings.sets)
    calls.check("auto")
    # The engine "in process" orders its copies by events between the ranks' streams, so all ranks must be captured in
    # one graph. Other engines get a graph per rank.
    joined = group.link.engine.name == "in process"
    time = partial(microseconds_per_call, group, calls_a_graph=settings.calls, joined=joined)
    found = {"off": figure(time(launches(calls.prepared("auto"))))}
    return {**found, "exchange": figure(time([_exchange(calls)]))}


def _exchange(calls: CollectiveCalls) -> Callable[[], object]:
    """A function that repeats the work of the exchange engine in one call."""
    link = calls.group.link
    assert link is not None
    (call,) = calls.prepared("auto", sets=1)
    noted = _Noting(link.engine)
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, link, "engine", link.engine)
        link.engine = noted
        call.launch()
    calls.group.synchronize()
    return together(noted.work)


class _Noting:
    """An exchange engine that records each exchange as a function that repeats it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.work: list[Callable[[], object]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def all_gather(self, parts: Any) -> None:
        self._note(partial(self._engine.all_gather, list(parts)))

    def all_reduce(self, parts: Any) -> None:
        self._note(partial(self._engine.all_reduce, list(parts)))

    def all_to_all(self, parts: Any) -> None:
        self._note(partial(self._engine.all_to_all, list(parts)))

    def _note(self, work: Callable[[], object]) -> None:
        self.work.append(work)
        work()


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The one table line of a result, in a list; `HEAD` is the table's head."""
    one, over = result["one_node"]["off"], result["over_nodes"]
    cells = [result["op"], f"{result['rows']}x{result['cols']}", f"{one['us']:.2f}", f"{one['spread']:.2f}"]
    us, spread = over["off"]["us"], over["off"]["spread"]
    return [[*cells, f"{us:.2f}", f"{spread:.2f}", f"{over['exchange']['us']:.2f}", f"{us / one['us']:.2f}"]]


def notes(results: Sequence[dict[str, Any]]) -> list[str]:
    """The notes below the table: how the times were measured."""
    first = results[0]
    return [
        f"microseconds per call without PDL, median and (largest - smallest) of {timing.REPLAYS} replays; "
        f"{first['gpus']} GPUs as one node, and as {first['nodes']} nodes by the exchange {first['exchange']}"
    ]
