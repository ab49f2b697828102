# SPDX-License-Identifier: Apache-2.0
"""Litmus tests of the order that streams, events and waits of the host make, on one device and on several."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from driver_helpers import R, ok
from litmus import At, Lab
from stream_litmus import KERNEL, StreamSuite, order_streams, run

suite = StreamSuite()
case = suite.case


# Two kernels, with something between ----------------------------------------------------------------------------------


@case("one-stream")
def _(here: Lab) -> None:
    for role in (0, 1, 2):
        run(here, role)


@case("two-streams", "w~r", edge="stream|event")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0))
    run(here, 1, here.stream(1))


@case("two-streams-writing", "w~v")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0))
    run(here, 2, here.stream(1))


@case("two-streams-reading")
def _(here: Lab) -> None:
    run(here, 1, here.stream(0))
    run(here, 1, here.stream(1))


@case("two-streams-of-the-blocking-kind", "w~r")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0, flags=0))
    run(here, 1, here.stream(1, flags=0))


@case("event")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0))
    order_streams(here, here.stream(0), here.stream(1))
    run(here, 1, here.stream(1))


@case("event-recorded-too-early", "w~r")
def _(here: Lab) -> None:
    event = here.event()
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    run(here, 0, here.stream(0))
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    run(here, 1, here.stream(1))


@case("event-between-two-writers", "v~r")
def _(here: Lab) -> None:
    event = here.event()
    run(here, 0, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    run(here, 2, here.stream(0))
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    run(here, 1, here.stream(1))


@case("event-waited-for-before-it-is-recorded", "w~r")
def _(here: Lab) -> None:
    event = here.event()
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    run(here, 0, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    run(here, 1, here.stream(1))


@case("event-recorded-anew")
def _(here: Lab) -> None:
    event = here.event()
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    run(here, 0, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    run(here, 1, here.stream(1))


@case("event-waited-for-then-recorded-anew", "v~r")
def _(here: Lab) -> None:
    event = here.event()
    run(here, 0, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    run(here, 2, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    run(here, 1, here.stream(1))


@case("event-of-another-stream", "w~r")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0))
    order_streams(here, here.stream(2), here.stream(1))
    run(here, 1, here.stream(1))


@case("events-through-a-third-stream")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0))
    order_streams(here, here.stream(0), here.stream(2))
    order_streams(here, here.stream(2), here.stream(1))
    run(here, 1, here.stream(1))


@case("events-there-and-back")
def _(here: Lab) -> None:
    for i in range(4):
        run(here, 0, here.stream(i % 2))
        order_streams(here, here.stream(i % 2), here.stream(1 - i % 2))
        run(here, 1, here.stream(1 - i % 2))


@case("event-one-way-only", "v~r")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0))
    order_streams(here, here.stream(0), here.stream(1))
    run(here, 1, here.stream(1))
    run(here, 2, here.stream(0))


@case("two-buffers-of-two-streams")
def _(here: Lab) -> None:
    freed: list[Any] = []
    for i in range(6):
        if i >= 2:
            ok(here.cuda.cuStreamWaitEvent(here.stream(0), freed[i - 2], 0))
        here.launch({0: At()}, here.stream(0), m=here.m + i % 2 * 32)
        order_streams(here, here.stream(0), here.stream(1))
        here.launch({1: At()}, here.stream(1), m=here.m + i % 2 * 32)
        freed.append(here.event())
        ok(here.cuda.cuEventRecord(freed[-1], here.stream(1)))


@case("two-buffers-of-two-streams-filled-too-early", "w~r")
def _(here: Lab) -> None:
    for i in range(4):
        here.launch({0: At()}, here.stream(0), m=here.m + i % 2 * 32)
        order_streams(here, here.stream(0), here.stream(1))
        here.launch({1: At()}, here.stream(1), m=here.m + i % 2 * 32)


# The legacy stream ----------------------------------------------------------------------------------------------------

for flags, kind in ((0, "blocking"), (1, "non-blocking")):
    for first in ("legacy", kind):

        def drive(here: Lab, flags: int = flags, first: str = first) -> None:
            mine = here.stream(0, flags=flags)
            streams = (0, mine) if first == "legacy" else (mine, 0)
            for role in (0, 1):
                run(here, role, streams[role])

        suite.add(f"legacy-and-{kind}-stream-{first}-first", KERNEL, drive, races="" if kind == "blocking" else "w~r")


@case("legacy-stream-between-two-blocking-ones")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0, flags=0))
    run(here, 3, 0)
    run(here, 1, here.stream(1, flags=0))


@case("legacy-stream-between-two-non-blocking-ones", "w~r")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0))
    run(here, 3, 0)
    run(here, 1, here.stream(1))


@case("per-thread-stream-and-legacy")
def _(here: Lab) -> None:
    run(here, 0, 2)
    run(here, 1, 0)


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
        run(here, 0, here.stream(0))
        ok(here.cuda.cuEventRecord(event, here.stream(0)))
        wait(here, event)
        run(here, 1, here.stream(1))
        run(here, 1, 0)

    suite.add(f"host-{name}", KERNEL, drive)


@case("host-waits-for-another-stream", "w~r")
def _(here: Lab) -> None:
    run(here, 3, here.stream(2))
    run(here, 0, here.stream(0))
    ok(here.cuda.cuStreamSynchronize(here.stream(2)))  # stream 0 has run too, but nothing waits for it
    run(here, 1, here.stream(1))


@case("host-waits-for-an-earlier-event", "w~r")
def _(here: Lab) -> None:
    event = here.event()
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    run(here, 0, here.stream(0))
    ok(here.cuda.cuEventSynchronize(event))
    run(here, 1, here.stream(1))


@case("host-waits-for-another-device", "w~r")
def _(here: Lab) -> None:
    run(here, 3, here.stream(0, 1), 1)
    run(here, 0, here.stream(0))
    here.use(1)
    ok(here.cuda.cuCtxSynchronize())
    run(here, 1, here.stream(1))


def _let_it_run(here: Lab) -> None:
    """Run a kernel on another stream, and wait for it. On the emulated driver all work that was queued before has then
    run too, but no program may rely on that."""
    run(here, 3, here.stream(7))
    ok(here.cuda.cuStreamSynchronize(here.stream(7)))


@case("one-stream-with-the-first-kernel-over")
def _(here: Lab) -> None:
    run(here, 0)
    _let_it_run(here)
    run(here, 1)


@case("event-recorded-when-the-kernel-is-over")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0))
    _let_it_run(here)
    order_streams(here, here.stream(0), here.stream(1))
    run(here, 1, here.stream(1))


@case("event-waited-for-when-it-is-over")
def _(here: Lab) -> None:
    event = here.event()
    run(here, 0, here.stream(0))
    ok(here.cuda.cuEventRecord(event, here.stream(0)))
    _let_it_run(here)
    ok(here.cuda.cuStreamWaitEvent(here.stream(1), event, 0))
    _let_it_run(here)
    run(here, 1, here.stream(1))


@case("legacy-stream-when-the-kernel-is-over")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0, flags=0))
    _let_it_run(here)
    run(here, 3, 0)
    _let_it_run(here)
    run(here, 1, here.stream(1, flags=0))


@case("a-destroyed-stream-is-part-of-its-context")
def _(here: Lab) -> None:
    stream = ok(here.cuda.cuStreamCreate(1))
    run(here, 0, stream)
    ok(here.cuda.cuStreamDestroy(stream))
    ok(here.cuda.cuCtxSynchronize())
    run(here, 1, here.stream(1))


@case("host-functions-do-not-break-the-order")
def _(here: Lab) -> None:
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    run(here, 0)
    ok(here.cuda.cuLaunchHostFunc(here.stream(0), ctypes.cast(call, ctypes.c_void_p).value, 0))
    order_streams(here, here.stream(0), here.stream(1))
    run(here, 1, here.stream(1))
    here.finish()


# Devices --------------------------------------------------------------------------------------------------------------


@case("devices", "w~r")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0))
    run(here, 1, here.stream(0, 1), 1)


@case("devices-with-an-event")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0))
    order_streams(here, here.stream(0), here.stream(0, 1))
    run(here, 1, here.stream(0, 1), 1)


@case("devices-with-the-host-between")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0))
    here.use(0)
    ok(here.cuda.cuCtxSynchronize())
    run(here, 1, here.stream(0, 1), 1)


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
