# SPDX-License-Identifier: Apache-2.0
"""One rank of a group: its device, its stream, its arrays."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ..errors import CaptureError
from ..runtime.stream import Stream
from .ordering import RankOrder

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..dtypes import DTypeLike
    from ..runtime.array import Array, ShapeLike
    from ..runtime.device import Device
    from ..runtime.stream import Event, StreamLike
    from .group import Group


class Rank:
    """A rank that this process drives.

    `index` is its number in the whole group, and `device` its GPU. `stream` is the stream that its collectives use by
    default: the device's own, so that work on arrays and calls of groups on one device run in one order.
    """

    def __init__(self, index: int, device: Device, group: Group) -> None:
        self._group = weakref.ref(group)  # weak, as the group's finaliser holds the rank and must not hold the group
        self.index = index
        self.device = device
        self.stream: Stream = device.stream
        self.order = RankOrder()

    def array(self, host: npt.ArrayLike) -> Array:
        """A device array with the shape, dtype and contents of `host`, as `Device.array` makes it on the rank's
        stream."""
        return self.device.array(host, stream=self.stream)

    def empty(self, shape: ShapeLike, dtype: DTypeLike) -> Array:
        """An array with undefined contents that every device of the group may access, as `Device.empty` makes it on the
        rank's stream.
        """
        return self.device.empty(shape, dtype, stream=self.stream)

    def zeros(self, shape: ShapeLike, dtype: DTypeLike) -> Array:
        """An array of zeros that every device of the group may access, cleared in the order of the rank's stream."""
        return self.device.zeros(shape, dtype, stream=self.stream)

    def before_replay(self, stream: Stream) -> None:
        """Order later work on `stream` after the rank's last call, as for a call of the group. Called before a graph
        that holds a collective of this rank is launched on `stream`.
        """
        self.order.admit(stream, self.index)

    def after_replay(self, stream: Stream, event: Event | None) -> None:
        """Record the launch of a graph on `stream` as the rank's last call. Called after the launch."""
        self.order.launched(stream, event)

    def wrap(self, stream: StreamLike, argument: str = "stream") -> Stream:
        """A Stream of this rank's device for a stream in any form that `Stream.wrap` takes; errors name `argument`."""
        return Stream.wrap(self.device, stream, argument)

    def require_no_capture(self) -> None:
        """Raise CaptureError while the rank's own stream or that of its last call is being captured."""
        for stream in (self.stream, self.order.last):
            if stream is not None and not stream.closed and not stream.foreign and stream.capture_id() is not None:
                raise CaptureError(f"rank {self.index}: {stream!r} is being captured; end the capture first")

    def synchronize(self) -> None:
        """Wait until the rank's own stream and that of its last collective are idle, then `Group.check`.

        Raises BarrierTimeout if any rank of the group has given up waiting.
        """
        self.drain()
        group = self._group()
        if group is not None and not group.closed:
            group.check()

    def drain(self) -> None:
        """Wait like `synchronize`, but do not check whether a kernel gave up waiting."""
        self.stream.synchronize()
        self.order.drain(self.stream)

    def __repr__(self) -> str:
        return f"Rank(index={self.index}, device={self.device.index})"
