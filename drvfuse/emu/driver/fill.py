# SPDX-License-Identifier: Apache-2.0
"""Fills (memset) of a row of elements, and of several rows."""

from __future__ import annotations

from typing import Any

from ..machine.objects import Stream
from ..machine.process.process import Process
from ..machine.run.work import Fill
from .entry import check, entry


def _fill(
    proc: Process, address: int, value: int, size: int, width: int, at: Stream | None, height: int = 1, pitch: int = 0
) -> None:
    """Queue a fill of `height` rows of `width` elements of `size` bytes. `pitch` has no effect on a single row. Without
    a stream, the fill is on the legacy stream; as in the driver, the call then waits for a fill of memory that the host
    can access (pinned and managed memory), and for no other fill.
    """
    stream = proc.current().legacy if at is None else at
    if 0 in (width, height):
        return
    check(address % size == 0)
    if height > 1:
        check(pitch % size == 0 and pitch >= width * size)
    nbytes = (height - 1) * pitch + width * size
    proc.memory.require("a fill writes", address, nbytes, proc.current(), direct=True)
    op = proc.enqueue(stream, Fill(stream.context, address, value, size, width, height, pitch))
    memory = proc.memory.find(address)
    if at is None and op is not None and memory is not None and memory.device is None:
        proc.machine.waits.wait([op])
        proc.healthy(stream.context)


@entry(unsafe=True)
def cuMemsetD8(proc: Process, dstDevice: Any, uc: int, N: int) -> None:
    _fill(proc, dstDevice, uc, 1, N, None)


@entry(unsafe=True)
def cuMemsetD16(proc: Process, dstDevice: Any, us: int, N: int) -> None:
    _fill(proc, dstDevice, us, 2, N, None)


@entry(unsafe=True)
def cuMemsetD32(proc: Process, dstDevice: Any, ui: int, N: int) -> None:
    _fill(proc, dstDevice, ui, 4, N, None)


@entry()
def cuMemsetD8Async(proc: Process, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
    _fill(proc, dstDevice, uc, 1, N, proc.stream(hStream))


@entry()
def cuMemsetD16Async(proc: Process, dstDevice: Any, us: int, N: int, hStream: Any) -> None:
    _fill(proc, dstDevice, us, 2, N, proc.stream(hStream))


@entry()
def cuMemsetD32Async(proc: Process, dstDevice: Any, ui: int, N: int, hStream: Any) -> None:
    _fill(proc, dstDevice, ui, 4, N, proc.stream(hStream))


@entry(unsafe=True)
def cuMemsetD2D8(proc: Process, dstDevice: Any, dstPitch: int, uc: int, Width: int, Height: int) -> None:
    """Fills `Height` rows of `Width` bytes, `dstPitch` bytes apart."""
    _fill(proc, dstDevice, uc, 1, Width, None, Height, dstPitch)


@entry()
def cuMemsetD2D8Async(
    proc: Process, dstDevice: Any, dstPitch: int, uc: int, Width: int, Height: int, hStream: Any
) -> None:
    _fill(proc, dstDevice, uc, 1, Width, proc.stream(hStream), Height, dstPitch)


@entry(unsafe=True)
def cuMemsetD2D16(proc: Process, dstDevice: Any, dstPitch: int, us: int, Width: int, Height: int) -> None:
    _fill(proc, dstDevice, us, 2, Width, None, Height, dstPitch)


@entry()
def cuMemsetD2D16Async(
    proc: Process, dstDevice: Any, dstPitch: int, us: int, Width: int, Height: int, hStream: Any
) -> None:
    _fill(proc, dstDevice, us, 2, Width, proc.stream(hStream), Height, dstPitch)


@entry(unsafe=True)
def cuMemsetD2D32(proc: Process, dstDevice: Any, dstPitch: int, ui: int, Width: int, Height: int) -> None:
    _fill(proc, dstDevice, ui, 4, Width, None, Height, dstPitch)


@entry()
def cuMemsetD2D32Async(
    proc: Process, dstDevice: Any, dstPitch: int, ui: int, Width: int, Height: int, hStream: Any
) -> None:
    _fill(proc, dstDevice, ui, 4, Width, proc.stream(hStream), Height, dstPitch)
