# SPDX-License-Identifier: Apache-2.0
"""Memory that is not an array: symmetric and virtual memory, pinned host memory, the pool, and plain byte copies."""

from __future__ import annotations

from .device import Device
from .lifetime import launch_group as launch_group
from .pinned import PinnedBuffer as PinnedBuffer
from .pool import Pool as Pool
from .stream import Stream
from .vmm import AddressRange as AddressRange
from .vmm import Mapping as Mapping
from .vmm import PhysicalMemory as PhysicalMemory
from .vmm import SymmetricBuffer as SymmetricBuffer
from .vmm import Undo as Undo
from .vmm import granularity as granularity


def fill(device: Device, ptr: int, value: int, nbytes: int, stream: Stream) -> None:
    """Set `nbytes` bytes at `ptr` to `value`, in order on `stream`; does not wait."""
    if nbytes:
        with device.use():
            device.driver.cuMemsetD8Async(ptr, value, nbytes, stream.handle)
