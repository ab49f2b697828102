# SPDX-License-Identifier: Apache-2.0
"""Addresses of any owner: the device that holds the memory at an address, and the devices that can read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError
from .device import Device, device
from .driver import Driver
from .vmm import granularity

_DEVICE_MEMORY = 2
_INVALID_VALUE, _NOT_SUPPORTED = 1, 801


def _attribute(driver: Driver, name: str, ptr: int) -> int | None:
    """A pointer attribute as an int; None if the driver does not know the pointer or the attribute."""
    member = getattr(driver.types.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    code, *values = driver.result("cuPointerGetAttribute", member, ptr)
    if int(code) in (_INVALID_VALUE, _NOT_SUPPORTED):
        return None
    if code:
        raise driver.error("cuPointerGetAttribute", (member, ptr), code)
    return int(values[0])


def owner_index(driver: Driver, ptr: int, argument: str) -> int:
    """Index of the device that holds `ptr`; ArgumentError if it is host memory or unknown to the driver."""
    if _attribute(driver, "MEMORY_TYPE", ptr) != _DEVICE_MEMORY:
        raise ArgumentError(argument, f"{ptr:#x}, not device memory", f"device memory of the {driver.name} driver")
    return driver.pointer_device(ptr) or 0


def readable_by(ptr: int, nbytes: int, reader: Device) -> bool:
    """True if kernels of `reader` can read `nbytes` bytes at `ptr`, which may belong to any device of its driver.

    For memory of a pool the access settings of the pool decide, for virtual memory those of every mapping in the range,
    and for memory of cuMemAlloc peer access between the primary contexts (`reader.enable_peer`). Host memory, and
    memory that the driver does not know, counts as not readable.
    """
    return _reached_by(ptr, nbytes, reader, _peer_enabled)


def copyable_by(ptr: int, nbytes: int, copier: Device) -> bool:
    """True if cuMemcpyDtoDAsync in the context of `copier` can copy the `nbytes` bytes at `ptr`, which may belong to
    any device.

    The rules are those of `readable_by`, except that memory of cuMemAlloc needs no peer access. (cuMemcpyPeerAsync
    needs no peer access for any memory.)
    """
    return _reached_by(ptr, nbytes, copier, lambda *_: True)


def _peer_enabled(ptr: int, holder: Device, reader: Device) -> bool:
    return reader.peer_enabled(holder) and _attribute(reader.driver, "CONTEXT", ptr) == int(holder.context)


def _reached_by(ptr: int, nbytes: int, user: Device, plain: Callable[[int, Device, Device], bool]) -> bool:
    """Whether kernels of `user` can access the `nbytes` bytes at `ptr`. If they are cuMemAlloc memory of another
    device, `holder`, the result is `plain(ptr, holder, user)`."""
    if nbytes == 0:
        return True
    driver = user.driver
    with user.use():
        if _attribute(driver, "MEMORY_TYPE", ptr) != _DEVICE_MEMORY:
            return False
        owner = driver.pointer_device(ptr)
        if owner is None:
            return False
        location = driver.types.CUmemLocation()
        location.type = driver.types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = user.index
        pool = _attribute(driver, "MEMPOOL_HANDLE", ptr)
        if pool:
            return owner == user.index or _allows(driver, "cuMemPoolGetAccess", pool, location)
        holder = device(owner, driver=driver)
        if is_virtual(driver, ptr):
            step = granularity(holder)
            places = [ptr, *range(ptr // step * step + step, ptr + nbytes, step)]
            return all(_allows(driver, "cuMemGetAccess", location, place) for place in places)
        return owner == user.index or plain(ptr, holder, user)


def _allows(driver: Driver, query: str, *args: Any) -> bool:
    code, *values = driver.result(query, *args)
    return not code and bool(int(values[0]) & 1)


def is_virtual(driver: Driver, ptr: int) -> bool:
    """Whether `ptr` is in memory that was mapped by the virtual memory functions of the driver."""
    code, *values = driver.result("cuMemRetainAllocationHandle", ptr)
    if code:
        return False
    driver.cuMemRelease(values[0])
    return True
