# SPDX-License-Identifier: Apache-2.0
"""What the CUDA programming model orders: nodes of graphs, and launches of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings import driver as types
from driver_helpers import ok
from litmus import Lab
from stream_litmus import KERNEL, StreamSuite, order_streams, run

suite = StreamSuite()
case = suite.case
CAPTURE = types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def _captured(here: Lab, record: Callable[[Any], None]) -> Any:
    """An executable graph of what is recorded on the device's first stream."""
    stream = here.stream(0)
    here.function(0)
    ok(here.cuda.cuStreamBeginCapture(stream, CAPTURE))
    record(stream)
    return ok(here.cuda.cuGraphInstantiate(ok(here.cuda.cuStreamEndCapture(stream)), 0))


def _fork(here: Lab, *branches: int, before: int = 3, after: int = 3) -> Any:
    """An executable graph of kernels with these roles: `before`, then one on each branch, then `after`."""
    here.stream(1), here.stream(2)

    def record(stream: Any) -> None:
        run(here, before, stream)
        others = [here.stream(i) for i in range(1, len(branches))]
        for other in others:
            order_streams(here, stream, other)
        for role, branch in zip(branches, [stream, *others], strict=True):
            run(here, role, branch)
        for other in others:
            order_streams(here, other, stream)
        run(here, after, stream)

    return _captured(here, record)


for name, branches, before, after, races in (
    ("in-a-row", (1,), 0, 2, ""),
    ("of-two-branches", (0, 1), 3, 3, "w~r"),
    ("of-two-branches-that-only-read", (1, 1), 0, 2, ""),
    ("of-three-branches", (1, 1, 0), 3, 3, "w~r"),
    ("of-a-branch-and-what-is-before-it", (3, 1), 0, 3, ""),
    ("of-a-branch-and-what-is-behind-it", (3, 0), 3, 1, ""),
):
    for times in (1, 2):

        def drive(
            here: Lab,
            branches: tuple[int, ...] = branches,
            before: int = before,
            after: int = after,
            times: int = times,
        ) -> None:
            graph = _fork(here, *branches, before=before, after=after)
            for _ in range(times):
                ok(here.cuda.cuGraphLaunch(graph, here.stream(0)))

        suite.add(f"graph-{name}{'-twice' if times > 1 else ''}", KERNEL, drive, races=races, seeds=range(4))


@case("graph-behind-a-kernel-of-its-stream")
def _(here: Lab) -> None:
    graph = _fork(here, 3, 1)
    run(here, 0, here.stream(0))
    ok(here.cuda.cuGraphLaunch(graph, here.stream(0)))
    run(here, 2, here.stream(0))


@case("graph-beside-a-kernel", "w~r")
def _(here: Lab) -> None:
    graph = _fork(here, 3, 1)
    run(here, 0, here.stream(1))
    ok(here.cuda.cuGraphLaunch(graph, here.stream(0)))


@case("graph-behind-an-event")
def _(here: Lab) -> None:
    graph = _fork(here, 3, 1)
    run(here, 0, here.stream(1))
    order_streams(here, here.stream(1), here.stream(0))
    ok(here.cuda.cuGraphLaunch(graph, here.stream(0)))
    order_streams(here, here.stream(0), here.stream(2))
    run(here, 2, here.stream(2))


@case("runs-of-one-graph-on-two-streams")
def _(here: Lab) -> None:
    graph = _captured(here, lambda stream: run(here, 0, stream))
    for i in (0, 1, 0):
        ok(here.cuda.cuGraphLaunch(graph, here.stream(i)))


@case("two-graphs-on-two-streams", "w~r")
def _(here: Lab) -> None:
    writes, reads = (_captured(here, lambda stream, role=role: run(here, role, stream)) for role in (0, 1))
    ok(here.cuda.cuGraphLaunch(writes, here.stream(0)))
    ok(here.cuda.cuGraphLaunch(reads, here.stream(1)))


@case("two-graphs-on-one-stream")
def _(here: Lab) -> None:
    writes, reads = (_captured(here, lambda stream, role=role: run(here, role, stream)) for role in (0, 1))
    ok(here.cuda.cuGraphLaunch(writes, here.stream(1)))
    ok(here.cuda.cuGraphLaunch(reads, here.stream(1)))


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
