# SPDX-License-Identifier: Apache-2.0
"""What the CUDA programming model orders: streams, events, the host, graphs, copies and fills."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, ok
from litmus import At, Lab, Suite

suite = Suite()
KERNEL = """
P(0) {
  ST(weak, x, 1)  // @w
}
P(1) {
  LD(weak, x)  // @r
}
P(2) {
  ST(weak, x, 2)  // @v
}
P(3) {
}
"""
CAPTURE = types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
BYTES = 64


def _run(here: Lab, role: int, stream: Any = None, device: int = 0) -> None:
    here.launch({role: At()}, stream, device=device)


def _order(here: Lab, before: Any, after: Any, device: int = 0) -> None:
    """A function that orders one stream behind an event recorded in another stream."""
    event = here.event(device)
    ok(here.cuda.cuEventRecord(event, before))
    ok(here.cuda.cuStreamWaitEvent(after, event, 0))


def case(name: str, races: str = "", **options: Any) -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
    def add(drive: Callable[[Lab], None]) -> Callable[[Lab], None]:
        suite.add(name, KERNEL, drive, races=races, **options)
        return drive

    return add


# Two kernels, with something between ----------------------------------------------------------------------------------


@case("one-stream")
def _(here: Lab) -> None:
    for role in (0, 1, 2):
        _run(here, role)


@case("two-streams", "w~r", edge="stream|event")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    _run(here, 1, here.stream(1))


@case("two-streams-writing", "w~v")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    _run(here, 2, here.stream(1))


@case("two-streams-reading")
def _(here: Lab) -> None:
    _run(here, 1, here.stream(0))
    _run(here, 1, here.stream(1))


@case("two-streams-of-the-blocking-kind", "w~r")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0, flags=0))
    _run(here, 1, here.stream(1, flags=0))


@case("event")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    _order(here, here.stream(0), here.stream(1))
    _run(here, 1, here.stream(1))


@case("event-recorded-too-early", "w~r")
def _(here: Lab) -> None:
    event = here.event()
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    _run(here, 0, here.stream(0))
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    _run(here, 1, here.stream(1))


@case("event-between-two-writers", "v~r")
def _(here: Lab) -> None:
    event = here.event()
    _run(here, 0, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    _run(here, 2, here.stream(0))
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    _run(here, 1, here.stream(1))


@case("event-waited-for-before-it-is-recorded", "w~r")
def _(here: Lab) -> None:
    event = here.event()
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    _run(here, 0, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    _run(here, 1, here.stream(1))


@case("event-recorded-anew")
def _(here: Lab) -> None:
    event = here.event()
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    _run(here, 0, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    _run(here, 1, here.stream(1))


@case("event-waited-for-then-recorded-anew", "v~r")
def _(here: Lab) -> None:
    event = here.event()
    _run(here, 0, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    _run(here, 2, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    _run(here, 1, here.stream(1))


@case("event-of-another-stream", "w~r")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    _order(here, here.stream(2), here.stream(1))
    _run(here, 1, here.stream(1))


@case("events-through-a-third-stream")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    _order(here, here.stream(0), here.stream(2))
    _order(here, here.stream(2), here.stream(1))
    _run(here, 1, here.stream(1))


@case("events-there-and-back")
def _(here: Lab) -> None:
    for i in range(4):
        _run(here, 0, here.stream(i % 2))
        _order(here, here.stream(i % 2), here.stream(1 - i % 2))
        _run(here, 1, here.stream(1 - i % 2))


@case("event-one-way-only", "v~r")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    _order(here, here.stream(0), here.stream(1))
    _run(here, 1, here.stream(1))
    _run(here, 2, here.stream(0))


@case("two-buffers-of-two-streams")
def _(here: Lab) -> None:
    freed: list[Any] = []
    for i in range(6):
        if i >= 2:
            ok(here.cuda.cuStreamWaitEvent(here.stream(0), freed[i - 2], 0))
        here.launch({0: At()}, here.stream(0), m=here.m + i % 2 * 32)
        _order(here, here.stream(0), here.stream(1))
        here.launch({1: At()}, here.stream(1), m=here.m + i % 2 * 32)
        freed.append(here.event())
        ok(here.cuda.cuEventRecord(freed[-1], here.stream(1)))


@case("two-buffers-of-two-streams-filled-too-early", "w~r")
def _(here: Lab) -> None:
    for i in range(4):
        here.launch({0: At()}, here.stream(0), m=here.m + i % 2 * 32)
        _order(here, here.stream(0), here.stream(1))
        here.launch({1: At()}, here.stream(1), m=here.m + i % 2 * 32)


# The legacy stream ----------------------------------------------------------------------------------------------------

for flags, kind in ((0, "blocking"), (1, "non-blocking")):
    for first in ("legacy", kind):

        def drive(here: Lab, flags: int = flags, first: str = first) -> None:
            mine = here.stream(0, flags=flags)
            streams = (0, mine) if first == "legacy" else (mine, 0)
            for role in (0, 1):
                _run(here, role, streams[role])

        suite.add(f"legacy-and-{kind}-stream-{first}-first", KERNEL, drive, races="" if kind == "blocking" else "w~r")


@case("legacy-stream-between-two-blocking-ones")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0, flags=0))
    _run(here, 3, 0)
    _run(here, 1, here.stream(1, flags=0))


@case("legacy-stream-between-two-non-blocking-ones", "w~r")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    _run(here, 3, 0)
    _run(here, 1, here.stream(1))


@case("per-thread-stream-and-legacy")
def _(here: Lab) -> None:
    _run(here, 0, 2)
    _run(here, 1, 0)


# The host -------------------------------------------------------------------------------------------------------------


def _query(here: Lab, call: Callable[[], Any]) -> None:
    while (answer := call()[0]) == R.CUDA_ERROR_NOT_READY:
        pass
    assert answer == R.CUDA_SUCCESS


HOST_WAITS: dict[str, Callable[[Lab, Any], None]] = {
    "stream-synchronize": lambda here, _: ok(here.cuda.cuStreamSynchronize(here.stream(0))),
    "event-synchronize": lambda here, event: ok(here.cuda.cuEventSynchronize(event)),
    "context-synchronize": lambda here, _: ok(here.cuda.cuCtxSynchronize()),
    "stream-query": lambda here, _: _query(here, lambda: here.cuda.cuStreamQuery(here.stream(0))),
    "event-query": lambda here, event: _query(here, lambda: here.cuda.cuEventQuery(event)),
}
for name, wait in HOST_WAITS.items():

    def drive(here: Lab, wait: Callable[[Lab, Any], None] = wait) -> None:
        event = here.event()
        _run(here, 0, here.stream(0))
        ok(here.cuda.cuEventRecord(event, here.stream(0)))
        wait(here, event)
        _run(here, 1, here.stream(1))
        _run(here, 1, 0)

    suite.add(f"host-{name}", KERNEL, drive)


@case("host-waits-for-another-stream", "w~r")
def _(here: Lab) -> None:
    _run(here, 3, here.stream(2))
    _run(here, 0, here.stream(0))
    ok(here.cuda.cuStreamSynchronize(here.stream(2)))  # on the emulator too, the first kernel has run when this returns
    _run(here, 1, here.stream(1))


@case("host-waits-for-an-earlier-event", "w~r")
def _(here: Lab) -> None:
    event = here.event()
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    _run(here, 0, here.stream(0))
    ok(here.cuda.cuEventSynchronize(event))
    _run(here, 1, here.stream(1))


@case("host-waits-for-another-device", "w~r")
def _(here: Lab) -> None:
    _run(here, 3, here.stream(0, 1), 1)
    _run(here, 0, here.stream(0))
    here.use(1)
    ok(here.cuda.cuCtxSynchronize())
    _run(here, 1, here.stream(1))


def _let_it_run(here: Lab) -> None:
    """Wait for all queued work, without an order that the program may rely on."""
    _run(here, 3, here.stream(7))
    ok(here.cuda.cuStreamSynchronize(here.stream(7)))


@case("one-stream-with-the-first-kernel-over")
def _(here: Lab) -> None:
    _run(here, 0)
    _let_it_run(here)
    _run(here, 1)


@case("event-recorded-when-the-kernel-is-over")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    _let_it_run(here)
    _order(here, here.stream(0), here.stream(1))
    _run(here, 1, here.stream(1))


@case("event-waited-for-when-it-is-over")
def _(here: Lab) -> None:
    event = here.event()
    _run(here, 0, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    _let_it_run(here)
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    _let_it_run(here)
    _run(here, 1, here.stream(1))


@case("legacy-stream-when-the-kernel-is-over")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0, flags=0))
    _let_it_run(here)
    _run(here, 3, 0)
    _let_it_run(here)
    _run(here, 1, here.stream(1, flags=0))


@case("a-destroyed-stream-is-part-of-its-context")
def _(here: Lab) -> None:
    stream = ok(here.cuda.cuStreamCreate(1))
    _run(here, 0, stream)
    ok(here.cuda.cuStreamDestroy(stream))
    ok(here.cuda.cuCtxSynchronize())
    _run(here, 1, here.stream(1))


# Devices --------------------------------------------------------------------------------------------------------------


@case("devices", "w~r")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    _run(here, 1, here.stream(0, 1), 1)


@case("devices-with-an-event")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    _order(here, here.stream(0), here.stream(0, 1))
    _run(here, 1, here.stream(0, 1), 1)


@case("devices-with-the-host-between")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    here.use(0)
    ok(here.cuda.cuCtxSynchronize())
    _run(here, 1, here.stream(0, 1), 1)


# Graphs ---------------------------------------------------------------------------------------------------------------


def _captured(here: Lab, record: Callable[[Any], None]) -> Any:
    """An executable graph of what is recorded on the device's first stream."""
    stream = here.stream(0)
    here.function(0)
    ok(here.cuda.cuStreamBeginCapture(stream, CAPTURE))
    record(stream)
    return ok(here.cuda.cuGraphInstantiate(ok(here.cuda.cuStreamEndCapture(stream)), 0))


def _fork(here: Lab, *branches: int, before: int = 3, after: int = 3) -> Any:
    """A graph: one kernel, then one on each branch, then one behind all of them."""
    here.stream(1), here.stream(2)

    def record(stream: Any) -> None:
        _run(here, before, stream)
        others = [here.stream(i) for i in range(1, len(branches))]
        for other in others:
            _order(here, stream, other)
        for role, branch in zip(branches, [stream, *others], strict=True):
            _run(here, role, branch)
        for other in others:
            _order(here, other, stream)
        _run(here, after, stream)

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
    _run(here, 0, here.stream(0))
    ok(here.cuda.cuGraphLaunch(graph, here.stream(0)))
    _run(here, 2, here.stream(0))


@case("graph-beside-a-kernel", "w~r")
def _(here: Lab) -> None:
    graph = _fork(here, 3, 1)
    _run(here, 0, here.stream(1))
    ok(here.cuda.cuGraphLaunch(graph, here.stream(0)))


@case("graph-behind-an-event")
def _(here: Lab) -> None:
    graph = _fork(here, 3, 1)
    _run(here, 0, here.stream(1))
    _order(here, here.stream(1), here.stream(0))
    ok(here.cuda.cuGraphLaunch(graph, here.stream(0)))
    _order(here, here.stream(0), here.stream(2))
    _run(here, 2, here.stream(2))


@case("runs-of-one-graph-on-two-streams")
def _(here: Lab) -> None:
    graph = _captured(here, lambda stream: _run(here, 0, stream))
    for i in (0, 1, 0):
        ok(here.cuda.cuGraphLaunch(graph, here.stream(i)))


@case("two-graphs-on-two-streams", "w~r")
def _(here: Lab) -> None:
    writes, reads = (_captured(here, lambda stream, role=role: _run(here, role, stream)) for role in (0, 1))
    ok(here.cuda.cuGraphLaunch(writes, here.stream(0)))
    ok(here.cuda.cuGraphLaunch(reads, here.stream(1)))


@case("two-graphs-on-one-stream")
def _(here: Lab) -> None:
    writes, reads = (_captured(here, lambda stream, role=role: _run(here, role, stream)) for role in (0, 1))
    ok(here.cuda.cuGraphLaunch(writes, here.stream(1)))
    ok(here.cuda.cuGraphLaunch(reads, here.stream(1)))


# Copies and fills -----------------------------------------------------------------------------------------------------
# name: (what it does on a stream, does it write x, does it read x)

COPIES: dict[str, tuple[Callable[[Lab, Any, int], Any], bool]] = {
    "fill": (lambda here, stream, m: here.cuda.cuMemsetD32Async(m, 7, BYTES // 4, stream), True),
    "copy-from-the-host": (
        lambda here, stream, m: here.cuda.cuMemcpyHtoDAsync(m, here.pinned(), BYTES, stream),
        True,
    ),
    "copy-from-pageable-memory": (
        lambda here, stream, m: here.cuda.cuMemcpyHtoDAsync(m, np.zeros(BYTES, np.uint8), BYTES, stream),
        True,
    ),
    "copy-to-the-host": (lambda here, stream, m: here.cuda.cuMemcpyDtoHAsync(here.pinned(), m, BYTES, stream), False),
    "copy-from-the-device": (
        lambda here, stream, m: here.cuda.cuMemcpyDtoDAsync(m, here.m + 4096, BYTES, stream),
        True,
    ),
    "copy-to-the-device": (lambda here, stream, m: here.cuda.cuMemcpyDtoDAsync(here.m + 4096, m, BYTES, stream), False),
}
for name, (queue, writes) in COPIES.items():
    for role, mark in ((0, "w"), (1, "r")):
        conflict = f"host~{mark}" if writes or mark == "w" else ""
        for order in ("kernel first", "copy first"):
            for how in ("streams", "stream", "event", "beside it"):

                def drive(
                    here: Lab,
                    queue: Callable[[Lab, Any, int], Any] = queue,
                    role: int = role,
                    order: str = order,
                    how: str = how,
                ) -> None:
                    streams = [here.stream(0), here.stream(0 if how == "stream" else 1)]
                    m = here.m + (BYTES if how == "beside it" else 0)
                    steps: list[Callable[[Any], Any]] = [
                        lambda stream: _run(here, role, stream),
                        lambda stream: ok(queue(here, stream, m)),
                    ]
                    if order == "copy first":
                        steps.reverse()
                    steps[0](streams[0])
                    if how == "event":
                        _order(here, *streams)
                    steps[1](streams[1])

                suite.add(
                    f"{name}-and-{'write' if role == 0 else 'read'}-{how}-{order}".replace(" ", "-"),
                    KERNEL,
                    drive,
                    races=conflict if how == "streams" else "",
                    seeds=range(2),
                    profiles=("hardware",),
                )


@case("copy-waited-for-behind-a-non-blocking-stream", "host~w")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0))
    ok(here.cuda.cuMemcpyDtoH(np.zeros(BYTES, np.uint8), here.m, BYTES))


@case("copy-waited-for-behind-a-blocking-stream")
def _(here: Lab) -> None:
    _run(here, 0, here.stream(0, flags=0))
    ok(here.cuda.cuMemcpyDtoH(np.zeros(BYTES, np.uint8), here.m, BYTES))
    _run(here, 2, here.stream(1))


@case("two-fills-on-two-streams", "host~host")
def _(here: Lab) -> None:
    for i in (0, 1):
        ok(here.cuda.cuMemsetD32Async(here.m, i, 16, here.stream(i)))


@case("a-copy-and-a-fill-of-its-source", "host~host")
def _(here: Lab) -> None:
    ok(here.cuda.cuMemcpyDtoDAsync(here.m + 4096, here.m, 64, here.stream(0)))
    ok(here.cuda.cuMemsetD32Async(here.m + 60, 1, 1, here.stream(1)))


@case("copies-of-one-stream")
def _(here: Lab) -> None:
    ok(here.cuda.cuMemsetD32Async(here.m, 1, 16, here.stream(0)))
    ok(here.cuda.cuMemcpyDtoDAsync(here.m + 4096, here.m, 64, here.stream(0)))
    ok(here.cuda.cuMemsetD32Async(here.m, 2, 16, here.stream(0)))
    _run(here, 1)


@case("peer-copy-of-what-a-kernel-writes", "host~w")
def _(here: Lab) -> None:
    there, stream = here.zeros(1), here.stream(0, 1)
    _run(here, 0)
    here.use(1)
    ok(here.cuda.cuMemcpyPeerAsync(there, here.contexts[1], here.m, here.contexts[0], BYTES, stream))


@case("peer-copy-behind-an-event")
def _(here: Lab) -> None:
    there, stream = here.zeros(1), here.stream(0, 1)
    _run(here, 0)
    _order(here, here.stream(0), stream)
    here.use(1)
    ok(here.cuda.cuMemcpyPeerAsync(there, here.contexts[1], here.m, here.contexts[0], BYTES, stream))


@case("rows-of-a-copy-and-the-gap-between-them", "host~r")
def _(here: Lab) -> None:
    rows = types.CUDA_MEMCPY2D()
    rows.srcMemoryType = rows.dstMemoryType = types.CUmemorytype.CU_MEMORYTYPE_DEVICE
    rows.srcDevice, rows.dstDevice = here.m + 4096, here.m
    rows.srcPitch = rows.dstPitch = 64
    rows.WidthInBytes, rows.Height = 16, 4
    ok(here.cuda.cuMemcpy2DAsync(rows, here.stream(1)))
    here.launch({1: At()}, here.stream(0), m=here.m + 132)  # the kernel works in the third row
    here.launch({0: At()}, here.stream(2), m=here.m + 144)  # beyond the third row


@case("memory-that-is-used-again")
def _(here: Lab) -> None:
    first = here.zeros()
    here.launch({0: At()}, here.stream(0), m=first)
    ok(here.cuda.cuStreamSynchronize(here.stream(0)))
    ok(here.cuda.cuMemFree(first))
    for _ in range(3):
        again = here.zeros()
        here.launch({2: At()}, here.stream(1), m=again)
        ok(here.cuda.cuStreamSynchronize(here.stream(1)))
        ok(here.cuda.cuMemFree(again))


@case("memory-of-a-pool-that-is-used-again")
def _(here: Lab) -> None:
    here.use(0)
    for i in range(4):
        stream = here.stream(0)
        pointer = ok(here.cuda.cuMemAllocAsync(65536, stream))
        here.launch({(0, 1, 2, 1)[i]: At()}, stream, m=int(pointer))
        ok(here.cuda.cuMemFreeAsync(pointer, stream))


def _of_a_pool(here: Lab, in_order: bool) -> None:
    """Allocate memory of a pool, use it in two streams and free it in the order of the first."""
    here.use(0)
    one, other = here.stream(0), here.stream(1)
    pointer = int(ok(here.cuda.cuMemAllocAsync(65536, one)))
    ok(here.cuda.cuMemsetD32Async(pointer, 7, 1 << 14, one))
    _order(here, one, other)
    ok(here.cuda.cuMemcpyDtoDAsync(here.m, pointer, BYTES, other))
    if in_order:
        _order(here, other, one)
    ok(here.cuda.cuMemFreeAsync(pointer, one))


@case("memory-of-a-pool-freed-behind-its-uses")
def _(here: Lab) -> None:
    _of_a_pool(here, in_order=True)


# under another seed the free may come first, which is a fault and not a race
@case("memory-of-a-pool-freed-beside-its-use", "host~host", seeds=(0,))
def _(here: Lab) -> None:
    _of_a_pool(here, in_order=False)


@case("host-functions-do-not-break-the-order")
def _(here: Lab) -> None:
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    _run(here, 0)
    ok(here.cuda.cuLaunchHostFunc(here.stream(0), ctypes.cast(call, ctypes.c_void_p).value, 0))
    _order(here, here.stream(0), here.stream(1))
    _run(here, 1, here.stream(1))
    here.finish()


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
