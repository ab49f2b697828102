# SPDX-License-Identifier: Apache-2.0
"""Presents one real GPU as several devices, so that tests of several ranks run where only one GPU is present.

`divide("4")` replaces the functions of `cuda.bindings.driver` in this process: see `DividedGpu`. The four devices share
GPU 0 and its primary context. Each reports a quarter of the GPU's multiprocessors, so that the blocks of all ranks are
resident together; `divide("4:132")` lets each report 132, for tests that need more and whose grids are small. Streams,
memory and contexts keep the device for which they were made. Rights of access are recorded, but not enforced.

The kernels of all ranks run at once and communicate through the memory of the GPU. So a run shows that results are
right and that nothing hangs on real hardware, with the memory ordering of one GPU. It shows nothing about NVLink, peer
mappings or speed. The devices share the legacy default stream and the synchronisation of the context, so tests of these
fail. Many streams and graphs of one context share hardware queues, so `drvfuse bench` and the longest stress test time
out. Ranks in several processes work too, but slowly, because the GPU alternates between their kernels.

Functions of the driver that are not named here act on GPU 0.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cuda.bindings import driver as bindings

from drvfuse.runtime.driver import Driver

_OK, _INVALID_VALUE, _ALREADY_ENABLED = 0, 1, 704


class DividedDevice(int):
    """A CUdevice of the divided GPU: its index."""


class DividedContext:
    """The primary context of a divided device. Its number differs from that of every other device's context."""

    def __init__(self, real: Any, index: int) -> None:
        self.real, self.index = real, index

    def __int__(self) -> int:
        return int(self.real) + self.index


class _Ranges:
    """A table of address ranges: the device that owns each range, and the devices that were given access to it."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._found: dict[int, tuple[int, int, set[int]]] = {}
        self._lock = threading.Lock()

    def add(self, start: int, nbytes: int, owner: int) -> None:
        with self._lock:
            if start not in self._found:
                bisect.insort(self._starts, start)
            self._found[start] = start + nbytes, owner, set()

    def remove(self, start: int) -> None:
        with self._lock:
            if self._found.pop(start, None) is not None:
                self._starts.remove(start)

    def find(self, address: int) -> tuple[int, int, set[int]] | None:
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            found = self._found[self._starts[at]] if at >= 0 else None
            return found if found is not None and address < found[0] else None

    def allow(self, start: int, nbytes: int, devices: set[int]) -> None:
        with self._lock:
            for first in self._starts:
                if start <= first < start + nbytes:
                    self._found[first][2].update(devices)


def _plain(value: Any) -> Any:
    """The argument for the real driver function: devices and contexts of the divided GPU become the real ones."""
    if isinstance(value, DividedDevice):
        return bindings.CUdevice(0)
    return value.real if isinstance(value, DividedContext) else value


class DividedGpu:
    """A driver API with the functions of the driver API `real`. Each of its devices is a part of device 0 of `real`.

    `how` is the number of devices, as in "4", or also the number of multiprocessors that each reports, as in "4:132".
    """

    def __init__(self, real: Any, how: str) -> None:
        count, _, multiprocessors = how.partition(":")
        self._count, self._multiprocessors, self._real = int(count), int(multiprocessors or 0), real
        self._current = threading.local()
        self._streams: dict[int, int] = {}
        self._pools: dict[int, tuple[int, set[int]]] = {}
        self._physical: dict[int, int] = {}
        self._peers: set[tuple[int, int]] = set()
        self.ranges = _Ranges()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._real, name)
        return lambda *args: function(*map(_plain, args))

    def _call(self, name: str, *args: Any) -> Any:
        return getattr(self._real, name)(*map(_plain, args))

    @property
    def _stack(self) -> list[int]:
        try:
            stack: list[int] = self._current.stack
        except AttributeError:
            stack = self._current.stack = []
        return stack

    def _index(self) -> int:
        return self._stack[-1] if self._stack else 0

    def cuDeviceGetCount(self) -> Any:
        status, count = self._call("cuDeviceGetCount")
        return status, self._count if count else 0

    def cuDeviceGet(self, index: int) -> Any:
        status, _ = self._call("cuDeviceGet", 0)
        return status, DividedDevice(index)

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> Any:
        status, value = self._call("cuDeviceGetAttribute", attribute, device)
        if attribute == bindings.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
            value = self._multiprocessors or value // self._count
        return status, value

    def cuDeviceGetUuid(self, device: Any) -> Any:
        name = "cuDeviceGetUuid_v2" if hasattr(self._real, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        status, uuid = self._call(name, device)
        *first, last = uuid.bytes
        return status, SimpleNamespace(bytes=bytes([*first, last ^ int(device)]))

    cuDeviceGetUuid_v2 = cuDeviceGetUuid

    def cuDeviceCanAccessPeer(self, device: Any, peer: Any) -> Any:
        return bindings.CUresult(_OK), int(device != peer)

    def cuDeviceGetP2PAttribute(self, attribute: Any, device: Any, peer: Any) -> Any:
        return bindings.CUresult(_OK), 1

    def cuCtxEnablePeerAccess(self, context: Any, flags: int) -> Any:
        pair = self._index(), context.index
        known = pair in self._peers
        self._peers.add(pair)
        return (bindings.CUresult(_ALREADY_ENABLED if known else _OK),)

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        status, context = self._call("cuDevicePrimaryCtxRetain", device)
        return status, DividedContext(context, int(device))

    def cuCtxPushCurrent(self, context: Any) -> Any:
        result = self._call("cuCtxPushCurrent", context)
        self._stack.append(context.index if isinstance(context, DividedContext) else 0)
        return result

    def cuCtxPopCurrent(self) -> Any:
        result = self._call("cuCtxPopCurrent")
        if self._stack:
            self._stack.pop()
        return result

    def cuCtxGetDevice(self) -> Any:
        status, device = self._call("cuCtxGetDevice")
        return status, DividedDevice(self._index()) if not status else device

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        status, stream = self._call("cuStreamCreateWithPriority", flags, priority)
        self._streams[int(stream)] = self._index()
        return status, stream

    def cuStreamCreate(self, flags: int) -> Any:
        status, stream = self._call("cuStreamCreate", flags)
        self._streams[int(stream)] = self._index()
        return status, stream

    def cuStreamGetCtx(self, stream: Any) -> Any:
        status, context = self._call("cuStreamGetCtx", stream)
        return status, DividedContext(context, self._streams.get(int(stream), self._index()))

    def cuMemAlloc(self, nbytes: int) -> Any:
        status, ptr = self._call("cuMemAlloc", nbytes)
        self._own(status, ptr, nbytes, self._index())
        return status, ptr

    def _own(self, status: Any, ptr: Any, nbytes: int, owner: int) -> None:
        if not status:
            self.ranges.add(int(ptr), nbytes, owner)

    def cuMemFree(self, ptr: Any) -> Any:
        self.ranges.remove(int(ptr))
        return self._call("cuMemFree", ptr)

    def cuMemPoolCreate(self, properties: Any) -> Any:
        owner, properties.location.id = properties.location.id, 0
        status, pool = self._call("cuMemPoolCreate", properties)
        self._pools[int(pool)] = owner, {owner}
        return status, pool

    def cuMemPoolSetAccess(self, pool: Any, descriptors: Any, count: int) -> Any:
        self._pools[int(pool)][1].update(descriptor.location.id for descriptor in descriptors)
        return (bindings.CUresult(_OK),)

    def cuMemPoolGetAccess(self, pool: Any, location: Any) -> Any:
        return bindings.CUresult(_OK), 3 * (location.id in self._pools[int(pool)][1])

    def cuMemAllocFromPoolAsync(self, nbytes: int, pool: Any, stream: Any) -> Any:
        status, ptr = self._call("cuMemAllocFromPoolAsync", nbytes, pool, stream)
        self._own(status, ptr, nbytes, self._pools[int(pool)][0])
        return status, ptr

    def cuMemFreeAsync(self, ptr: Any, stream: Any) -> Any:
        self.ranges.remove(int(ptr))
        return self._call("cuMemFreeAsync", ptr, stream)

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> Any:
        owner, properties.location.id = properties.location.id, 0
        status, handle = self._call("cuMemCreate", nbytes, properties, flags)
        self._physical[int(handle)] = owner
        return status, handle

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> Any:
        properties.location.id = 0
        return self._call("cuMemGetAllocationGranularity", properties, option)

    def cuMemMap(self, ptr: Any, nbytes: int, offset: int, handle: Any, flags: int) -> Any:
        result = self._call("cuMemMap", ptr, nbytes, offset, handle, flags)
        self._own(result[0], ptr, nbytes, self._physical.get(int(handle), 0))
        return result

    def cuMemUnmap(self, ptr: Any, nbytes: int) -> Any:
        self.ranges.remove(int(ptr))
        return self._call("cuMemUnmap", ptr, nbytes)

    def cuMemSetAccess(self, ptr: Any, nbytes: int, descriptors: Any, count: int) -> Any:
        devices = {descriptor.location.id for descriptor in descriptors}
        descriptors[0].location.id = 0
        result = self._call("cuMemSetAccess", ptr, nbytes, descriptors[:1], 1)
        if not result[0]:
            self.ranges.allow(int(ptr), nbytes, devices)
        return result

    def cuMemGetAccess(self, location: Any, ptr: Any) -> Any:
        found = self.ranges.find(int(ptr))
        if found is None:
            return bindings.CUresult(_INVALID_VALUE), 0
        return bindings.CUresult(_OK), 3 * (location.id in found[2])

    def cuPointerGetAttribute(self, attribute: Any, ptr: Any) -> Any:
        status, value = self._call("cuPointerGetAttribute", attribute, ptr)
        found, attributes = self.ranges.find(int(ptr)), bindings.CUpointer_attribute
        if found is not None and attribute == attributes.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            return status, found[1]
        if found is not None and attribute == attributes.CU_POINTER_ATTRIBUTE_CONTEXT and int(value):
            return status, int(value) + found[1]
        return status, value


def divide(how: str) -> None:
    """Replace the functions of `cuda.bindings.driver` by those of a `DividedGpu`. Call this before drvfuse opens the
    driver.

    The streams of all ranks must be able to run at once, so CUDA_DEVICE_MAX_CONNECTIONS is set to its largest value.
    """
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    names = [name for name in dir(bindings) if name[:2] == "cu" and name[2:3].isupper()]
    real = {name: getattr(bindings, name) for name in names if not isinstance(getattr(bindings, name), type)}
    gpu = DividedGpu(SimpleNamespace(**real), how)
    for name in real:
        if name != "cuMulticastCreate":  # multicast_refusal.py has replaced this function
            setattr(bindings, name, getattr(gpu, name))

    def pointer_device(self: Driver, ptr: int) -> int | None:
        found = gpu.ranges.find(ptr)
        return None if found is None else found[1]

    Driver.pointer_device = pointer_device  # type: ignore[method-assign]
