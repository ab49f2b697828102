# SPDX-License-Identifier: Apache-2.0
"""What the tests of emulated multicast share: objects by the driver's own calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as types
from emu.driver_helpers import ok, primary

PIECE = 2 << 20
READ_WRITE = types.CUmemAccess_flags(3)


def located(device: int) -> Any:
    location = types.CUmemLocation()
    location.type = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def memory_prop(device: int) -> Any:
    prop = types.CUmemAllocationProp()
    prop.type = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location = located(device)
    return prop


def object_prop(devices: int, nbytes: int = PIECE) -> Any:
    prop = types.CUmulticastObjectProp()
    prop.numDevices, prop.size = devices, nbytes
    return prop


def access(*devices: int, flags: Any = READ_WRITE) -> list[Any]:
    found = []
    for device in devices:
        item = types.CUmemAccessDesc()
        item.location, item.flags = located(device), flags
        found.append(item)
    return found


def team(cuda: Any, devices: int, nbytes: int = PIECE) -> Any:
    """A multicast object with all its devices."""
    handle = ok(cuda.cuMulticastCreate(object_prop(devices, nbytes)))
    for device in range(devices):
        ok(cuda.cuMulticastAddDevice(handle, device))
    return handle


def mapped(cuda: Any, handle: Any, nbytes: int, devices: int, flags: Any = READ_WRITE) -> int:
    """An address of memory, or of an object, that the first devices have access to."""
    address = ok(cuda.cuMemAddressReserve(nbytes, 0, 0, 0))
    ok(cuda.cuMemMap(address, nbytes, 0, handle, 0))
    ok(cuda.cuMemSetAccess(address, nbytes, access(*range(devices), flags=flags), devices))
    return int(address)


@dataclass
class Shared:
    """Memory of every device, each at an address of its own, and the address of all of it."""

    handle: Any
    multicast: int
    memories: list[Any]
    own: list[int]
    nbytes: int

    def close(self, cuda: Any) -> None:
        for device in range(len(self.own)):
            ok(cuda.cuMulticastUnbind(self.handle, device, 0, self.nbytes))
        for address in (self.multicast, *self.own):
            ok(cuda.cuMemUnmap(address, self.nbytes))
            ok(cuda.cuMemAddressFree(address, self.nbytes))
        for handle in (self.handle, *self.memories):
            ok(cuda.cuMemRelease(handle))


def shared(cuda: Any, devices: int, nbytes: int = PIECE) -> Shared:
    """A complete set-up over the first devices, whose contexts exist; that of device 0 is current."""
    for device in reversed(range(devices)):
        primary(cuda, device)
    handle = team(cuda, devices, nbytes)
    memories = [ok(cuda.cuMemCreate(nbytes, memory_prop(device), 0)) for device in range(devices)]
    for memory in memories:
        ok(cuda.cuMulticastBindMem(handle, 0, memory, 0, nbytes, 0))
    own = [mapped(cuda, memory, nbytes, devices) for memory in memories]
    return Shared(handle, mapped(cuda, handle, nbytes, devices), memories, own, nbytes)
