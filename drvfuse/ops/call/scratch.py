# SPDX-License-Identifier: Apache-2.0
"""Workspaces of the ops on one device, and errors for kernels that have given up waiting in them.

A workspace begins with `struct ScratchState` of cu/sync/scratch.cuh and must be zero before its first use. It serves
one launch at a time. A kernel that gives up waiting writes a report to pinned host memory. That memory is read at the
beginning of every call, by `check_device`, and by `Graph.launch()` of a graph that holds a call.

The caller may pass a workspace. Otherwise drvfuse keeps a workspace for each of the streams on which the last calls on
a device were made. The stream is identified by its handle, and the workspace lives at most as long as the `Device`. The
memory of a workspace is reused only after the work that uses it, and a graph keeps the workspaces of its calls alive.
The driver may give the handle of a destroyed stream to a new stream, which then takes over the workspace: the new
stream's work waits for the old stream's.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from ... import config
from ...errors import ArgumentError, CaptureError, GridTimeout, counted, require_kind
from ...runtime.array import Array
from ...runtime.device import Device
from ...runtime.driver import Driver
from ...runtime.pinned import PinnedBuffer
from ...runtime.stream import Stream
from ...structures import laid_out, record
from .operands import Operand, whole

_ALIGNMENT = 16
_SLOTS = 64
_STREAMS = 32  # the maximum number of streams for which drvfuse keeps a workspace of each kind


@laid_out("sync/scratch.cuh")
class ScratchReport(ctypes.Structure):
    """The report of a launch that has failed, in pinned host memory."""


_REPORT = record(ScratchReport, 64)


@laid_out("sync/scratch.cuh", "Scratch")
class ScratchParams(ctypes.Structure):
    """The parameters that a kernel gets for its workspace."""


class Workspace:
    """The workspace of a call. `array` is its memory, and `params` are the parameters that the kernel gets for it."""

    def __init__(self, reports: _Reports, device: Device, array: Array, owned: bool) -> None:
        self.array, self.ptr, self.nbytes = array, array.ptr, array.nbytes
        self._reports, self._index, self._owned = reports, device.index, owned
        self._slot = reports.slot(array.ptr)
        self._stale = False
        self.user: Stream | None = None  # the stream that used it last; set only if drvfuse keeps the workspace

    @property
    def params(self) -> ScratchParams:
        timeout = int(config.get("spin_timeout") * 1e9)
        return ScratchParams(state=self.ptr, report=self._reports.address(self.ptr), timeout_ns=timeout)

    def check(self) -> None:
        """Raise GridTimeout if a launch has given up and no GridTimeout was raised for it yet. A workspace that drvfuse
        keeps is then zeroed before the next launch that uses it."""
        try:
            self._reports.check(self._index, self.ptr)
        except GridTimeout:
            self._stale = self._owned
            raise

    def admit(self, stream: Stream) -> None:
        """Make the workspace ready for a launch on `stream`. Raises GridTimeout, once, if an earlier launch has given
        up.

        The next call then zeroes a workspace that drvfuse keeps, or raises CaptureError if `stream` is being captured.
        """
        if self._reports.magic[self._slot]:
            self.check()
        if self._stale:
            if stream.capture_id() is not None:
                raise CaptureError(
                    "after a time-out the op's workspace must be zeroed, which a capture cannot do: call the op once "
                    "outside the capture"
                )
            with stream.device.use():
                stream.device.driver.cuMemsetD8Async(self.ptr, 0, self.nbytes, stream.handle)
            self._stale = False

    def hand_over(self, stream: Stream) -> None:
        """Order work queued on `stream` from now on after the work of an earlier stream with the same handle."""
        earlier, self.user = self.user, stream
        if earlier is None:
            stream.follow(self.array.stream)  # the stream on which the workspace was cleared
        elif earlier is not stream and stream.capture_id() is None:
            event = earlier.last_event() if earlier.closed else stream.device.marks.get(stream.handle)
            if event is not None:
                stream.wait(event)


class _Reports:
    """The report blocks of a device's workspaces. Workspaces may share a block, which then holds the last report."""

    def __init__(self, driver: Driver) -> None:
        self._pinned = PinnedBuffer(driver, _SLOTS * _REPORT.itemsize)
        self._blocks = self._pinned.view(_REPORT)
        self.magic = self._blocks["magic"].data  # a memoryview: single elements are read faster than through numpy

    def address(self, workspace: int) -> int:
        return self._pinned.ptr + self.slot(workspace) * _REPORT.itemsize

    def check(self, device: int, workspace: int | None = None) -> None:
        """Raise GridTimeout if there is a report of `workspace` (None: of any workspace), and clear the report. Reads
        host memory only."""
        for slot in range(_SLOTS) if workspace is None else (self.slot(workspace),):
            if not self.magic[slot]:
                continue
            report = self._blocks[slot]
            if workspace is not None and int(report["state"]) != workspace:
                continue
            fields = [int(report[name]) for name in ("reason", "block", "peer", "expected", "seen")]
            report["magic"] = 0
            raise GridTimeout(device, *fields)

    @staticmethod
    def slot(workspace: int) -> int:
        """Return the index of a workspace's report block."""
        return workspace // 512 % _SLOTS


class Scratch:
    """The workspaces of a device, which `device.part(Scratch)` returns.

    `own` are those that drvfuse keeps, by stream handle and kind, in the order of their last use. `known` are those
    that callers have passed, by address.
    """

    def __init__(self, device: Device) -> None:
        self.reports = _Reports(device.driver)
        self.own: dict[tuple[int, str], Workspace] = {}
        self.known: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()
        self.last: Workspace | None = None  # the workspace in `own` that was used last


def brought(device: Device, array: Array) -> Workspace:
    """Return the `Workspace` for memory that a caller passed. The caller zeroes it before its first use and after a
    GridTimeout."""
    scratch = device.part(Scratch)
    space = scratch.known.get(array.ptr)
    if space is None or space.array is not array:
        space = scratch.known[array.ptr] = Workspace(scratch.reports, device, array, False)
    return space


def own(device: Device, stream: Stream, nbytes: int, kind: str = "") -> Workspace:
    """Return the workspace that is kept for calls on `stream`. It grows as needed, and no other stream uses it.

    Ops of one `kind` share a workspace. Two ops are of different kinds if one of them could mistake data that the
    other has left there for words of its own launch.
    Raises CaptureError if the workspace would have to grow in a capture.
    """
    scratch = device.part(Scratch)
    spaces = scratch.own
    key = stream.handle, kind
    space = spaces.pop(key, None)
    if space is None or space.nbytes < nbytes:
        if stream.capture_id() is not None:
            if space is not None:
                spaces[key] = space
            or_else = "" if kind else ", or pass workspace if it takes one"
            raise CaptureError(
                "the op needs memory that a capture cannot allocate: before the capture, call the op once on this "
                f"stream with arrays of these shapes{or_else}"
            )
        # allocated on a stream of drvfuse: a foreign one may be destroyed before the memory is freed
        home = device.stream if stream.foreign else stream
        space = Workspace(scratch.reports, device, device.zeros(nbytes, "uint8", stream=home), True)
        mine = [other for other in spaces if other[1] == kind]
        if len(mine) >= _STREAMS:
            del spaces[mine[0]]
    spaces[key] = scratch.last = space
    space.hand_over(stream)
    return space


def checked(value: Any, driver: Driver, device: Device, nbytes: int) -> list[Operand]:
    """Check the argument `workspace`; return its operand in a list, which is empty if the caller passed none."""
    if value is None:
        return []
    operand = whole("workspace", value, driver, ("uint8",), writable=True)
    array = operand.array
    if array.nbytes < nbytes:
        raise ArgumentError(
            "workspace", f"of {counted(array.nbytes, 'byte')}", f"of at least {counted(nbytes, 'byte')}"
        )
    if array.ptr % _ALIGNMENT:
        raise ArgumentError("workspace", f"at address {array.ptr:#x}", f"aligned to {_ALIGNMENT} bytes")
    if array.device is not device:
        raise ArgumentError("workspace", f"on device {array.device.index}", f"on device {device.index}")
    return [operand]


def check_device(device: Device) -> None:
    """Raise GridTimeout if a kernel of an op on `device` has given up waiting and no GridTimeout was raised for it yet.

    It reads host memory only, so it cannot report launches that still run: synchronise first.
    """
    require_kind("device", device, Device, "a drvfuse.Device")
    scratch = device.part(Scratch)
    for space in (*scratch.own.values(), *scratch.known.values()):
        space.check()
    scratch.reports.check(device.index)
