# SPDX-License-Identifier: Apache-2.0
"""Multicast objects: a store to their one address reaches memory of every device, and a load from it can return the
reduction (such as the sum) over that memory.

The driver prescribes an order of steps, which `Multicast` enforces:

1. Create the object for a number of devices and a size.
2. Add every device. If memory were bound or the object mapped before, the driver would wait for the missing devices,
   for ever if one thread does all steps. So `Multicast` raises an error for a bind or a map before all devices are
   added.
3. Bind memory of each device at an offset of the object. Ranges bound at one offset belong together.
4. Map the object at an address and give each device access to it. When every device has memory bound over a range,
   kernels may use the addresses of that range, by `multimem` instructions only. Between these accesses and accesses to
   the same memory by its unicast address there must be a `fence.proxy.alias` or the end of a kernel.

Teardown is in reverse order: unmap the object, unbind the ranges exactly as they were bound (any other range is
undefined behaviour), release the handle. `drvfuse.comm.multicast` makes the multicast memory of a group in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import (
    ArgumentError,
    CaptureError,
    DriverError,
    MulticastError,
    Unsupported,
    kind_of,
    require_integer,
    require_kind,
    shown,
)
from .device import Device
from .lifetime import Owned, flush
from .multicast_support import require_multicast
from .vmm import AddressRange, PhysicalMemory, Undo, access_descriptors, allocation_properties, descriptors_of

if TYPE_CHECKING:
    from .driver import Driver

_ANY_SIZE = 2 << 20  # for queries of the granularity, which does not depend on the size
NOT_READY = 802
"""CUDA_ERROR_SYSTEM_NOT_READY: the fabric manager did not answer in time. A retry may help after this error only."""

_MEANINGS = {
    1: "a size, an offset or an address is not a multiple of the multicast granularity, or the fabric's multicast "
    "state is corrupt: if other programs fail too, restart the fabric manager and reset the GPUs",
    2: "memory or the switches' room for multicast objects is exhausted; objects of other processes count too",
    47: "the switches have no room for another multicast object; objects of other processes count too",
    401: "the fabric manager or a switch is in a broken state: look at the log of nvidia-fabricmanager, restart it and "
    "reset the GPUs",
    800: "multicast is not permitted here: the container lacks the device nodes or the capabilities for it "
    "(/dev/nvidia-caps, IMEX channels)",
    801: "this driver or this machine's fabric has no multicast",
    802: "the fabric manager did not form the team in time: it is still starting, or it is stuck",
}
_NO_MEMBER = "the device is not in the team of the multicast object"


def explained(error: DriverError, rank: int | None = None) -> MulticastError:
    """The MulticastError for a failed call. Its `explanation` begins with what the error code means
    for multicast."""
    if isinstance(error, MulticastError):
        explanation = error.explanation
    else:
        no_member = (error.call, error.code) == ("cuMemSetAccess", 401)
        meaning = _NO_MEMBER if no_member else _MEANINGS.get(error.code)
        explanation = f"{meaning}. The driver: {error.explanation}" if meaning else error.explanation
    return MulticastError(error.call, error.args_text, error.code, error.name, explanation, error.calls, rank)


class _Bound(NamedTuple):
    device: Device
    offset: int
    nbytes: int
    memory: PhysicalMemory | None = None  # the bound memory, kept alive while it is bound


class _Made(NamedTuple):
    """The driver objects that a Multicast has made and must free, in the order of their creation."""

    handle: Any
    bound: list[_Bound]
    mapped: list[AddressRange]


def _unbind(driver: Driver, handle: Any, bound: _Bound) -> None:
    with bound.device.use():
        driver.cuMulticastUnbind(handle, bound.device.handle, bound.offset, bound.nbytes)


def _unmap(driver: Driver, addresses: AddressRange) -> None:
    with Undo() as undo:
        undo.append(addresses.close)
        undo.append(driver.cuMemUnmap, addresses.ptr, addresses.nbytes)


def _undo(driver: Driver, made: _Made) -> None:
    with Undo() as undo:
        undo.append(driver.cuMemRelease, made.handle)
        for bound in made.bound:
            undo.append(_unbind, driver, made.handle, bound)
        for addresses in made.mapped:
            undo.append(_unmap, driver, addresses)


class Multicast(Owned):
    """A multicast object for `nbytes` bytes of memory on each of `devices`. `nbytes` is a multiple of
    `Multicast.granularity(devices)`.

    The constructor only creates the object; call `add`, `bind_memory` or `bind_address`, `map` and `set_access` in this
    order. `close()` undoes these steps in reverse order; no kernel may use the addresses then. Close the object before
    the memory that is bound to it is freed. The methods of the object use no stream: they act at once, and may wait for
    the fabric manager.

    Raises Unsupported if a veto forbids multicast (checked before any driver call), for a single device, and for a
    device without multicast; ArgumentError for wrong sizes and devices; CaptureError while the device's own stream is
    being captured; MulticastError, with the meaning of the code, if a driver call fails.

    If the devices belong to several processes, `devices` are those of this process, `count` is the number of devices in
    all processes, and `nbytes` is the same in all processes. One process creates the object and exports a descriptor;
    the others pass it as `descriptor`, and still own it. Binding and mapping wait for the devices of all processes,
    which cannot be checked here.
    """

    def __init__(
        self, devices: Sequence[Device], nbytes: int, *, count: int | None = None, descriptor: int | None = None
    ) -> None:
        self.devices = _devices(devices, count)
        for device in self.devices:
            if device.stream.capture_id() is not None:
                raise CaptureError(f"multicast cannot be set up while {device.stream!r} is being captured")
        self.driver: Driver = self.devices[0].driver
        self._count = len(self.devices) if count is None else count
        self.unit = _granularity(self.devices, self._count, recommended=False)
        self.nbytes = _multiple("nbytes", nbytes, self.unit, self.unit)
        flush(self.driver)
        if descriptor is None:
            self.handle = self._call("cuMulticastCreate", _properties(self.devices, self.nbytes, self._count))
        else:
            self.handle = self._call("cuMemImportFromShareableHandle", descriptor, descriptors_of(self.driver))
        self._made = _Made(self.handle, [], [])
        self._added: list[Device] = []
        self._owns(self.driver, _undo, self._made)

    def export(self) -> int:
        """A new file descriptor of the object, for another process of this host. The caller owns and closes it."""
        self._check_open()
        return int(self._call("cuMemExportToShareableHandle", self.handle, descriptors_of(self.driver), 0))

    @staticmethod
    def granularity(devices: Sequence[Device], *, recommended: bool = False, count: int | None = None) -> int:
        """The granularity in bytes: sizes, offsets and addresses must be multiples of it. Creates nothing.

        `recommended` selects the fastest granularity, which can be hundreds of MiB; the minimum is 2 MiB. Raises the
        errors of the constructor.
        """
        members = _devices(devices, count)
        return _granularity(members, len(members) if count is None else count, recommended)

    def add(self, device: Device) -> None:
        """Make `device` a member of the team, for the life of the object."""
        self._check_open()
        self._require_member(device)
        if device in self._added:
            raise ArgumentError("device", shown(device), "a device that was not added before")
        self._call("cuMulticastAddDevice", self.handle, device.handle)
        self._added.append(device)

    def bind_memory(
        self,
        device: Device,
        memory: PhysicalMemory,
        *,
        offset: int = 0,
        memory_offset: int = 0,
        nbytes: int | None = None,
    ) -> None:
        """Bind `nbytes` (default: the rest) of `memory` from `memory_offset` on, at `offset` of the object.

        `memory` is a `drvfuse.runtime.vmm.PhysicalMemory` on `device`; the object keeps it alive while it is bound.
        """
        require_kind("memory", memory, PhysicalMemory, "PhysicalMemory")
        memory._check_open()
        if memory.device is not device:
            raise ArgumentError("memory", f"memory of {memory.device!r}", f"memory of {device!r}")
        memory_offset = _multiple("memory_offset", memory_offset, self.unit, 0, memory.nbytes - self.unit)
        left = memory.nbytes - memory_offset
        bound = self._range(device, offset, _multiple("nbytes", left if nbytes is None else nbytes, self.unit, 0, left))
        self._bind("cuMulticastBindMem", bound._replace(memory=memory), memory.handle, memory_offset, bound.nbytes, 0)

    def bind_address(self, device: Device, ptr: int, nbytes: int, *, offset: int = 0) -> None:
        """Bind memory of `device` at `offset` of the object: the `nbytes` bytes that are mapped at `ptr`.

        The memory must belong to a `SymmetricBuffer`, to `PhysicalMemory`, or to a memory pool whose memory can be
        exported. (The pools of drvfuse's arrays are not of that kind.) The caller must keep the memory.
        """
        ptr = _multiple("ptr", ptr, self.unit, self.unit)
        bound = self._range(device, offset, nbytes)
        with device.use():
            owner = self.driver.pointer_device(ptr)
        # Checked here, since the older form of cuMulticastBindAddr takes no device, and would bind memory of
        # another device.
        if owner != device.index:
            raise ArgumentError("ptr", f"{ptr:#x}", f"an address of memory of {device!r}")
        self._bind("cuMulticastBindAddr", bound, ptr, bound.nbytes, 0)

    def unbind(self, device: Device, offset: int, nbytes: int) -> None:
        """Undo one bind. The range must be exactly one that was bound, and no kernel may use its addresses."""
        self._check_open()
        for bound in self._made.bound:
            if (bound.device, bound.offset, bound.nbytes) == (device, offset, nbytes):
                _unbind(self.driver, self.handle, bound)
                self._made.bound.remove(bound)
                return
        ranges = [(b.offset, b.nbytes) for b in self._made.bound if b.device is device]
        raise ArgumentError("offset, nbytes", (offset, nbytes), f"a range as it was bound on {device!r}: {ranges}")

    def map(self) -> int:
        """Map the whole object and return the first address. No device has access to it before `set_access`."""
        self._require_team("mapped")
        addresses = AddressRange(self.driver, self.nbytes, self.unit)
        try:
            self._call("cuMemMap", addresses.ptr, self.nbytes, 0, self.handle, 0)
        except BaseException:
            addresses.close()
            raise
        self._made.mapped.append(addresses)
        return addresses.ptr

    def set_access(self, ptr: int, device: Device) -> None:
        """Let kernels of `device` use the mapping at `ptr`, which `map` has returned."""
        self._mapping(ptr)
        self._require_member(device)
        self._call("cuMemSetAccess", ptr, self.nbytes, access_descriptors(self.driver, [device]), 1)

    def unmap(self, ptr: int) -> None:
        """Undo the mapping at `ptr`, which `map` has returned. No kernel may use its addresses."""
        addresses = self._mapping(ptr)
        self._call("cuMemUnmap", addresses.ptr, addresses.nbytes)
        self._made.mapped.remove(addresses)
        addresses.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._added)} added, {len(self._made.bound)} ranges bound"
        return f"<Multicast of {self.nbytes} bytes over {self._team()}: {state}>"

    def _team(self) -> str:
        return f"devices {[device.index for device in self.devices]}"

    def _require_team(self, what: str) -> None:
        """Raise ArgumentError if a device was not added yet, since the driver would wait for it."""
        self._check_open()
        missing = [device.index for device in self.devices if device not in self._added]
        if missing:
            expected = f"complete before anything is {what}, as the driver would wait for the missing devices"
            raise ArgumentError("the set of added devices", f"without {missing}", expected)

    def _require_member(self, device: Device) -> None:
        if device not in self.devices:
            raise ArgumentError("device", shown(device), f"one of the devices of the object, {self._team()}")

    def _range(self, device: Device, offset: int, nbytes: int) -> _Bound:
        """The range of a bind. Raises ArgumentError for a wrong device, for a range that is misaligned, outside the
        object or already bound, and while a device is missing."""
        self._require_team("bound")
        self._require_member(device)
        nbytes = _multiple("nbytes", nbytes, self.unit, self.unit, self.nbytes)
        offset = _multiple("offset", offset, self.unit, 0, self.nbytes - nbytes)
        for bound in self._made.bound:
            if bound.device is device and bound.offset < offset + nbytes and offset < bound.offset + bound.nbytes:
                taken = f"the {bound.nbytes} bytes that are bound at offset {bound.offset}"
                raise ArgumentError("offset", offset, f"one whose range does not overlap {taken}")
        return _Bound(device, offset, nbytes)

    def _bind(self, name: str, bound: _Bound, *args: Any) -> None:
        """Bind by the form of the call that names the device, or by the older form if the newer one is missing."""
        with bound.device.use():
            try:
                self._call(f"{name}_v2", self.handle, bound.device.handle, bound.offset, *args)
            except Unsupported:  # cuda-bindings 12.9 and 13.0, and older drivers, lack the newer form
                self._call(name, self.handle, bound.offset, *args)
        self._made.bound.append(bound)

    def _mapping(self, ptr: int) -> AddressRange:
        self._check_open()
        for addresses in self._made.mapped:
            if addresses.ptr == ptr:
                return addresses
        raise ArgumentError(
            "ptr", shown(ptr), "an address that map() has returned and that was not passed to unmap() since"
        )

    def _call(self, name: str, *args: Any) -> Any:
        return _call(self.driver, name, *args)


def _devices(devices: Sequence[Device], count: int | None = None) -> tuple[Device, ...]:
    if not isinstance(devices, Sequence):
        raise ArgumentError("devices", kind_of(devices), "a list of drvfuse.Device objects")
    members = tuple(devices)
    for device in members:
        require_kind("devices", device, Device, "drvfuse.Device objects")
    require_multicast(members, count)
    return members


def _multiple(argument: str, value: object, unit: int, least: int, most: int | None = None) -> int:
    """`value` as an int, or ArgumentError unless it is a multiple of `unit` from `least` to `most`."""
    span = f"from {least} to {most}" if most is not None else f"{least} or more"
    expected = f"a multiple of {unit}, the granularity, {span}"
    number = require_integer(argument, value, expected, least, most)
    if number % unit:
        raise ArgumentError(argument, shown(value), expected)
    return number


def _call(driver: Driver, name: str, *args: Any) -> Any:
    try:
        return getattr(driver, name)(*args)
    except DriverError as error:
        raise explained(error) from error


def _granularity(devices: tuple[Device, ...], count: int, recommended: bool) -> int:
    driver = devices[0].driver
    flags = driver.types.CUmulticastGranularity_flags
    kind = flags.CU_MULTICAST_GRANULARITY_RECOMMENDED if recommended else flags.CU_MULTICAST_GRANULARITY_MINIMUM
    return int(_call(driver, "cuMulticastGetGranularity", _properties(devices, _ANY_SIZE, count), kind))


def _properties(devices: Sequence[Device], nbytes: int, count: int | None = None) -> Any:
    """CUmulticastObjectProp. Its handle types are equal to those of memory on `devices`, as a bind requires.

    `count` is the number of devices in all processes, if `devices` are not all."""
    driver = devices[0].driver
    properties = driver.types.CUmulticastObjectProp()
    properties.numDevices, properties.size, properties.flags = count or len(devices), nbytes, 0
    properties.handleTypes = int(allocation_properties(devices[0]).requestedHandleTypes)
    return properties
