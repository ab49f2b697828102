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

    `index` is its number in the whole group, `device` its GPU and `stream` the stream that its collectives use unless
    told otherwise: the device's own default stream, so that arrays and groups on one device share an order.
    """

    def __init__(self, index: int, device: Device, group: Group) -> None:
        self._group = weakref.ref(group)  # a weak reference, as the group's finaliser holds its ranks
        self.index = index
        self.device = device
        self.stream: Stream = device.stream
        self.order = RankOrder()

    def array(self, host: npt.ArrayLike) -> Array:
        """A device array with the shape, dtype and contents of `host`. See `Device.array`; the stream is the rank's."""
        return self.device.array(host, stream=self.stream)

    def empty(self, shape: ShapeLike, dtype: DTypeLike) -> Array:
        """An array with undefined contents that every device of the group may access. See `Device.empty`; the stream is
        the rank's.
        """
        return self.device.empty(shape, dtype, stream=self.stream)

    def zeros(self, shape: ShapeLike, dtype: DTypeLike) -> Array:
        """`empty`, cleared in the order of the rank's stream."""
        return self.device.zeros(shape, dtype, stream=self.stream)

    def before_replay(self, stream: Stream) -> None:
        """Called before a graph that holds a collective of this rank is launched on `stream`. The launch is ordered as
        a call of the group is.
        """
        self.order.admit(stream, self.index)

    def after_replay(self, stream: Stream, event: Event | None) -> None:
        """Called after the launch of the graph, which then is the rank's last call."""
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
        """Wait like `synchronize`, but do not read the hang report."""
        self.stream.synchronize()
        self.order.drain(self.stream)

    def __repr__(self) -> str:
        return f"Rank(index={self.index}, device={self.device.index})"
