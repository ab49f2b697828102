# SPDX-License-Identifier: Apache-2.0
"""Devices: the retained primary context, attributes, peer access, and the device's own stream and memory pool."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

from ..errors import ArgumentError, ClosedError, Unsupported, foreign, require_integer, require_kind
from .driver import Driver, DriverLike, Owner, enum_value, get_driver
from .lifetime import flush

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..dtypes import DTypeLike
    from .array import Array, ShapeLike
    from .pool import Pool
    from .stream import Event, Stream, StreamLike

_PEER_ALREADY_ENABLED = 704


def device(index: SupportsIndex = 0, *, driver: DriverLike = None) -> Device:
    """The device number `index` of a driver; there is one object for each driver and index.

    `driver` is "cuda", "emu", an emulated machine or process, or None for the setting `driver`. The device's primary
    context is retained on first use, and shared with every other library in the process. Raises ArgumentError for an
    index that the driver does not have, and DriverUnavailable, which says what to install or set, if the driver cannot
    be used.
    """
    opened = get_driver(driver)
    number = require_integer("index", index, "an int")
    count = opened.cuDeviceGetCount()
    if not 0 <= number < count:
        raise ArgumentError("index", number, f"a device of the {opened.name} driver, 0 to {count - 1}")
    with opened.lock:
        found = opened.devices.get(number)
        if found is None:
            found = opened.devices[number] = Device(opened, number)
        return found


class _Use:
    """Makes a context current and restores the previous one. It has no state, so it is reentrant, and threads share it.

    The two driver calls that do this (push and pop) are not kept in `calls.ring`, which they would fill. If the setting
    `trace_driver` writes calls to stderr or a file, these two are written as well.
    """

    __slots__ = ("_context", "_pop", "_push")

    def __init__(self, driver: Driver, context: Any) -> None:
        self._push, self._pop = driver.unrecorded("cuCtxPushCurrent"), driver.unrecorded("cuCtxPopCurrent")
        self._context = context

    def __enter__(self) -> None:
        self._push(self._context)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pop()


class Device(Owner):
    """One GPU. Get it from `device()`.

    `index` is its ordinal on `driver`, `name` its name, `capability` the compute capability (major, minor), `arch` the
    architecture, such as "sm_90a", and `sm_count` the number of multiprocessors. `handle` is the CUdevice, `context`
    the primary CUcontext. The methods that allocate or launch raise ClosedError after `close`.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        super().__init__()
        self.driver, self.index = driver, index
        self.handle = driver.cuDeviceGet(index)
        self.name = driver.cuDeviceGetName(256, self.handle).split(b"\0")[0].decode()
        self._attributes: dict[str, int] = {}
        self.capability = (
            self.attribute("COMPUTE_CAPABILITY_MAJOR"),
            self.attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        self.arch = "sm_{}{}".format(*self.capability) + ("a" if self.capability[0] >= 9 else "")
        self.sm_count = self.attribute("MULTIPROCESSOR_COUNT")
        self.context = driver.cuDevicePrimaryCtxRetain(self.handle)
        self._use: _Use | None = _Use(driver, self.context)
        self._peers: set[int] = {index}
        self._stream: Stream | None = None
        self._pool: Pool | None = None
        self.marks: dict[int, Event] = {}  # handle of a foreign stream -> the event that `Stream.mark` records

    def __repr__(self) -> str:
        return f"<Device {self.index} {self.name} ({self.driver.name})>"

    def use(self) -> _Use:
        """A context manager that makes this device's primary context current, and restores the previous one."""
        if self._use is None:
            raise ClosedError(f"device {self.index} was closed")
        return self._use

    def attribute(self, name: str) -> int:
        """A device attribute by its name without the prefix CU_DEVICE_ATTRIBUTE_, as in
        `attribute("MULTIPROCESSOR_COUNT")`. It is read once. Raises Unsupported for a name that the bindings lack.
        """
        require_kind("name", name, str, "the name of a device attribute")
        value = self._attributes.get(name)
        if value is None:
            member = enum_value(self.driver.types, "CUdevice_attribute", f"CU_DEVICE_ATTRIBUTE_{name}")
            value = self._attributes[name] = int(self.driver.cuDeviceGetAttribute(member, self.handle))
        return value

    @functools.cached_property
    def launch_limits(self) -> tuple[tuple[int, ...], ...]:
        """The largest grid and the largest block, each in its three dimensions."""
        return tuple(tuple(self.attribute(f"MAX_{what}_DIM_{axis}") for axis in "XYZ") for what in ("GRID", "BLOCK"))

    def can_access_peer(self, other: Device) -> bool:
        """True if kernels of this device can reach memory of `other` (True for the device itself)."""
        require_kind("other", other, Device, "a drvfuse.Device")
        if other.driver is not self.driver:
            return False
        return other is self or bool(self.driver.cuDeviceCanAccessPeer(self.handle, other.handle))

    def enable_peer(self, other: Device) -> None:
        """Let kernels and copies in this device's context access `cuMemAlloc` memory of the context of `other`. Does
        nothing if this access is enabled already. drvfuse never disables it.

        Memory pools and VMM mappings have access settings of their own. Raises Unsupported if the devices have no peer
        access.
        """
        require_kind("other", other, Device, "a drvfuse.Device")
        if other.index in self._peers and other.driver is self.driver:
            return
        if not self.can_access_peer(other):
            raise Unsupported(f"{self!r} cannot access the memory of {other!r}")
        with self.use():
            code, *_ = self.driver.result("cuCtxEnablePeerAccess", other.context, 0)
        if code and int(code) != _PEER_ALREADY_ENABLED:
            raise self.driver.error("cuCtxEnablePeerAccess", (other.context, 0), code)
        self._peers.add(other.index)

    def peer_enabled(self, other: Device) -> bool:
        """True if `enable_peer(other)` was called on this object."""
        require_kind("other", other, Device, "a drvfuse.Device")
        return other.driver is self.driver and other.index in self._peers

    def allow_peers(self, devices: Iterable[Device]) -> None:
        """Let kernels of `devices` read and write all arrays that this device has allocated or will allocate. Devices
        without peer access to this device are left out.
        """
        others = foreign("devices", "drvfuse Devices", lambda: list(devices))
        for other in others:
            require_kind("devices", other, Device, "drvfuse Devices")
        self.pool.allow(others)

    @property
    def stream(self) -> Stream:
        """The device's own non-blocking stream, made on first use."""
        found = self._stream
        if found is None or found.closed:
            from .stream import Stream

            with self.driver.lock:
                found = self._stream
                if found is None or found.closed:
                    found = self._stream = Stream(self)
        return found

    @property
    def pool(self) -> Pool:
        """The device's own memory pool, made on first use."""
        from .pool import Pool

        with self.driver.lock:
            if self._pool is None:
                self._pool = Pool(self)
            return self._pool

    def empty(self, shape: ShapeLike, dtype: DTypeLike, *, stream: StreamLike | None = None) -> Array:
        """An array with undefined contents, allocated in the order of `stream` (default: the device's own).

        Does not block. Raises ArgumentError for a wrong shape or dtype, CaptureError while the stream is being
        captured, and DriverError if the memory is exhausted.
        """
        from .array import allocate

        return allocate(self, shape, dtype, stream)

    def zeros(self, shape: ShapeLike, dtype: DTypeLike, *, stream: StreamLike | None = None) -> Array:
        """An array of zeros, made by `empty` and cleared in the order of `stream` (default: the device's own)."""
        array = self.empty(shape, dtype, stream=stream)
        array.stream.fill(array.ptr, 0, array.nbytes)
        return array

    def array(self, values: npt.ArrayLike, *, stream: StreamLike | None = None) -> Array:
        """A copy of a numpy array, or of any object that numpy converts to one, with its shape and dtype.

        The copy is made on `stream` (default: the device's own), which is synchronised, so `values` may be changed when
        the method returns. Raises ArgumentError for a dtype that drvfuse lacks, and the errors of `empty`.
        """
        from .array import from_numpy

        return from_numpy(self, values, stream)

    def synchronize(self) -> None:
        """Wait for everything queued on this device's context, then free the memory of dropped objects."""
        with self.use():
            self.driver.cuCtxSynchronize()
        flush(self.driver)

    def close(self) -> None:
        """Destroy this object's stream and pool and release the primary context. Idempotent.

        Arrays and streams of the device must not be used afterwards. `device()` makes a new object.
        """
        with self.driver.lock:
            if self._use is None:
                return
            self.driver.devices.pop(self.index, None)
            if self._stream is not None:
                self._stream.close()
            if self._pool is not None:
                self._pool.close()
            self._use = None
            self.driver.lost = False
            if not self.driver.closed:
                self.driver.cuDevicePrimaryCtxRelease(self.handle)
