# SPDX-License-Identifier: Apache-2.0
"""One rank of a group: its device, its stream, its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..runtime.stream import Stream
from .ordering import RankOrder

if TYPE_CHECKING:
    import numpy as np

    from ..dtypes import DType
    from ..runtime.array import Array
    from ..runtime.device import Device


class Rank:
    """A rank that this process drives.

    `index` is its number in the whole group, `device` its GPU and `stream` the stream that its collectives use unless
    told otherwise: the device's own default stream, so that arrays and groups on one device share an order.
    """

    def __init__(self, index: int, device: Device) -> None:
        self.index = index
        self.device = device
        self.stream: Stream = device.stream
        self.order = RankOrder()
        self._foreign: dict[int, Stream] = {}

    def array(self, host: np.ndarray[Any, Any]) -> Array:
        """A device array with the shape, dtype and contents of `host`; the copy is queued on `stream`."""
        return self.device.array(host, stream=self.stream)

    def empty(self, shape: int | Sequence[int], dtype: str | DType) -> Array:
        """An uninitialised array that every device of the group may access, allocated in the order of `stream`."""
        return self.device.empty(shape, dtype, stream=self.stream)

    def zeros(self, shape: int | Sequence[int], dtype: str | DType) -> Array:
        """Like `empty`, filled with zeros on `stream`."""
        return self.device.zeros(shape, dtype, stream=self.stream)

    def before_replay(self, stream: Stream) -> None:
        """Called before a graph that holds a collective of this rank is launched on `stream`.

        The replay counts as the rank's last call: it is ordered after the one before, and the next one after it.
        """
        self.order.admit(stream, self.index)
        self.order.launched(stream)

    def wrap(self, stream: Any) -> Stream:
        """A Stream of this rank's device for a Stream, an object with `__cuda_stream__`, or an int.

        The same object comes back for the same handle.
        """
        found = Stream.wrap(self.device, stream)
        return found if found is stream else self._foreign.setdefault(found.handle, found)

    def synchronize(self) -> None:
        """Wait until the rank's own stream and that of its last collective are idle. Does not read the hang report."""
        self.stream.synchronize()
        self.order.drain(self.stream)

    def __repr__(self) -> str:
        return f"Rank(index={self.index}, device={self.device.index})"
