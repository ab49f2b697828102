# SPDX-License-Identifier: Apache-2.0
"""What the CUDA programming model orders: copies, fills, and memory that is freed and used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import ok
from litmus import At, Lab
from stream_litmus import KERNEL, StreamSuite, order_streams, run

suite = StreamSuite()
case = suite.case
BYTES = 64


# For each name, a call that queues a copy or fill of the word, and whether the call writes the word (or reads it).
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
                        lambda stream: run(here, role, stream),
                        lambda stream: ok(queue(here, stream, m)),
                    ]
                    if order == "copy first":
                        steps.reverse()
                    steps[0](streams[0])
                    if how == "event":
                        order_streams(here, *streams)
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
    run(here, 0, here.stream(0))
    ok(here.cuda.cuMemcpyDtoH(np.zeros(BYTES, np.uint8), here.m, BYTES))


@case("copy-waited-for-behind-a-blocking-stream")
def _(here: Lab) -> None:
    run(here, 0, here.stream(0, flags=0))
    ok(here.cuda.cuMemcpyDtoH(np.zeros(BYTES, np.uint8), here.m, BYTES))
    run(here, 2, here.stream(1))


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
    run(here, 1)


@case("peer-copy-of-what-a-kernel-writes", "host~w")
def _(here: Lab) -> None:
    there, stream = here.zeros(1), here.stream(0, 1)
    run(here, 0)
    here.use(1)
    ok(here.cuda.cuMemcpyPeerAsync(there, here.contexts[1], here.m, here.contexts[0], BYTES, stream))


@case("peer-copy-behind-an-event")
def _(here: Lab) -> None:
    there, stream = here.zeros(1), here.stream(0, 1)
    run(here, 0)
    order_streams(here, here.stream(0), stream)
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
    """Allocate memory of a pool, use it in two streams and free it in the first. With `in_order` the free waits for
    both uses."""
    here.use(0)
    one, other = here.stream(0), here.stream(1)
    pointer = int(ok(here.cuda.cuMemAllocAsync(65536, one)))
    ok(here.cuda.cuMemsetD32Async(pointer, 7, 1 << 14, one))
    order_streams(here, one, other)
    ok(here.cuda.cuMemcpyDtoDAsync(here.m, pointer, BYTES, other))
    if in_order:
        order_streams(here, other, one)
    ok(here.cuda.cuMemFreeAsync(pointer, one))


@case("memory-of-a-pool-freed-behind-its-uses")
def _(here: Lab) -> None:
    _of_a_pool(here, in_order=True)


# under another seed the free may come first, which is a fault and not a race
@case("memory-of-a-pool-freed-beside-its-use", "host~host", seeds=(0,))
def _(here: Lab) -> None:
    _of_a_pool(here, in_order=False)


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
