# SPDX-License-Identifier: Apache-2.0
"""Workspaces of the ops on one device, and the handling of waits in them that were given up.

A workspace begins with `struct ScratchState` of cu/sync/scratch.cuh and must be zero before its first use. It serves
one launch at a time. A kernel that gives up waiting says so in pinned host memory, which every call reads first, as do
`Graph.launch()` of a graph that holds a call and `check_device`.

Workspaces of drvfuse's own are kept for the streams of a device that called last, by handle, and live at most as long
as the `Device`. Their memory is reused after the work that uses it, and a graph keeps those of its calls. A handle that
the driver gives to a new stream brings the workspace with it: the new stream's work waits for the old one's.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from ... import config
from ...errors import ArgumentError, CaptureError, GridTimeout, require_kind
from ...runtime.array import Array
from ...runtime.device import Device
from ...runtime.driver import Driver
from ...runtime.pinned import PinnedBuffer
from ...runtime.stream import Stream
from .operands import Operand, whole

_ALIGNMENT = 16
_SLOTS = 64
_STREAMS = 32  # most streams for which drvfuse keeps a workspace of each kind
_REPORT = np.dtype(
    {
        "names": ["reason", "block", "peer", "expected", "seen", "state", "magic"],
        "formats": ["<u4", "<u4", "<u4", "<u4", "<u4", "<u8", "<u4"],
        "offsets": [0, 4, 8, 12, 16, 24, 32],
        "itemsize": 64,
    }
)


class ScratchParams(ctypes.Structure):
    """`struct Scratch` of cu/sync/scratch.cuh."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("state", "report", "timeout_ns"))


class Workspace:
    """The workspace of a call: `array`, and `params` for its kernel."""

    def __init__(self, reports: _Reports, device: Device, array: Array, owned: bool) -> None:
        self.array, self.ptr, self.nbytes = array, array.ptr, array.nbytes
        self._reports, self._index, self._owned = reports, device.index, owned
        self._slot = reports.slot(array.ptr)
        self._stale = False
        self.user: Stream | None = None  # the stream of drvfuse's own workspace

    @property
    def params(self) -> ScratchParams:
        timeout = int(config.get("spin_timeout") * 1e9)
        return ScratchParams(state=self.ptr, report=self._reports.address(self.ptr), timeout_ns=timeout)

    def check(self) -> None:
        """Raise GridTimeout if a launch gave up, once; an own workspace is then zeroed before its next launch."""
        try:
            self._reports.check(self._index, self.ptr)
        except GridTimeout:
            self._stale = self._owned
            raise

    def admit(self, stream: Stream) -> None:
        """Before each launch on `stream`. Raises GridTimeout if an earlier one gave up, once; zeroes an own one after.

        CaptureError where it must be zeroed and `stream` is being captured.
        """
        if self._reports.magic[self._slot]:
            self.check()
        if self._stale:
            if stream.capture_id() is not None:
                raise CaptureError("the op's workspace must be zeroed after a time-out, outside the capture")
            with stream.device.use():
                stream.device.driver.cuMemsetD8Async(self.ptr, 0, self.nbytes, stream.handle)
            self._stale = False

    def hand_over(self, stream: Stream) -> None:
        """Work queued on `stream` from now on comes after that of an earlier stream, if that had the same handle."""
        earlier, self.user = self.user, stream
        if earlier is None:
            stream.follow(self.array.stream)  # where its memory was cleared
        elif earlier is not stream and stream.capture_id() is None:
            event = earlier.last_event() if earlier.closed else stream.device.marks.get(stream.handle)
            if event is not None:
                stream.wait(event)


class _Reports:
    """Report blocks of a device's workspaces. A few share one: then only the last report is seen."""

    def __init__(self, driver: Driver) -> None:
        self._pinned = PinnedBuffer(driver, _SLOTS * _REPORT.itemsize)
        self._blocks = self._pinned.view(_REPORT)
        self.magic = self._blocks["magic"].data  # faster to read one by one than with numpy

    def address(self, workspace: int) -> int:
        return self._pinned.ptr + self.slot(workspace) * _REPORT.itemsize

    def check(self, device: int, workspace: int | None = None) -> None:
        """Raise what was reported, for one workspace or for any, and clear it. Reads host memory only."""
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
        """The index of a workspace's report block."""
        return workspace // 512 % _SLOTS


class Scratch:
    """The workspaces of a device, `device.part(Scratch)`: `own` by stream and kind, the last used last, and those that
    callers passed.
    """

    def __init__(self, device: Device) -> None:
        self.reports = _Reports(device.driver)
        self.own: dict[tuple[int, str], Workspace] = {}
        self.known: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()
        self.last: Workspace | None = None  # the workspace in `own` that was used last


def brought(device: Device, array: Array) -> Workspace:
    """The workspace that a caller passed, who zeroes it before its first use and after a GridTimeout."""
    scratch = device.part(Scratch)
    space = scratch.known.get(array.ptr)
    if space is None or space.array is not array:
        space = scratch.known[array.ptr] = Workspace(scratch.reports, device, array, False)
    return space


def own(device: Device, stream: Stream, nbytes: int, kind: str = "") -> Workspace:
    """The workspace that is kept for calls on `stream`; it grows as needed and is never used by two streams.

    Ops of one `kind` share it; where one would take another's data for its own words, they are of different kinds.
    Raises CaptureError if it has to grow in a capture.
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
                "the op needs scratch that a capture cannot allocate: before the capture, call it once on this stream "
                f"with arrays of these shapes{or_else}"
            )
        home = device.stream if stream.foreign else stream  # a foreign one may be destroyed before the memory is freed
        space = Workspace(scratch.reports, device, device.zeros(nbytes, "uint8", stream=home), True)
        mine = [other for other in spaces if other[1] == kind]
        if len(mine) >= _STREAMS:
            del spaces[mine[0]]
    spaces[key] = scratch.last = space
    space.hand_over(stream)
    return space


def checked(value: Any, driver: Driver, device: Device, nbytes: int) -> list[Operand]:
    """The caller's workspace, checked, if one is passed."""
    if value is None:
        return []
    operand = whole("workspace", value, driver, ("uint8",), writable=True)
    array = operand.array
    if array.nbytes < nbytes:
        raise ArgumentError("workspace", f"of {array.nbytes} bytes", f"of at least {nbytes} bytes")
    if array.ptr % _ALIGNMENT:
        raise ArgumentError("workspace", f"at address {array.ptr:#x}", f"aligned to {_ALIGNMENT} bytes")
    if array.device is not device:
        raise ArgumentError("workspace", f"on device {array.device.index}", f"on device {device.index}")
    return [operand]


def check_device(device: Device) -> None:
    """Raise GridTimeout if a kernel of an op on `device` has given up waiting and no call has said so yet.

    Reads host memory only, so a launch that still runs is not seen: synchronise first.
    """
    require_kind("device", device, Device, "a drvfuse.Device")
    scratch = device.part(Scratch)
    for space in (*scratch.own.values(), *scratch.known.values()):
        space.check()
    scratch.reports.check(device.index)
