# SPDX-License-Identifier: Apache-2.0
"""Stream-ordered device memory: one driver pool per device. When an array is dropped, its memory is only queued to be
freed (see `lifetime`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from ..errors import CaptureError
from .device import Device
from .driver import Driver
from .lifetime import Owned, flush, retire
from .stream import Event, Stream
from .vmm import access_descriptors

_KEEP_EVERYTHING = (1 << 64) - 1


class Block:
    """An allocation: its address, the stream `home` on which it is freed, and `users`, the streams whose work comes
    before the free.

    A foreign stream may be destroyed before the free. So `events` has an event after the work of each foreign stream,
    in place of the stream.
    """

    __slots__ = ("events", "home", "nbytes", "ptr", "users")

    def __init__(self, ptr: int, nbytes: int, home: Stream) -> None:
        self.ptr, self.nbytes, self.home = ptr, nbytes, home
        self.users: dict[object, Stream] = {}
        self.events: dict[int, Event] = {}

    def used_before(self, event: Event) -> None:
        """Record that the memory is in use until `event` is complete. The event may be recorded again, but only after
        later work, so that the free waits for that work too."""
        self.events[id(event)] = event

    def order(self, stream: Stream) -> None:
        """Order later work on `stream` after all earlier uses of the memory on other streams.

        Raises CaptureError, and queues nothing, while one of those streams is being captured.
        """
        streams = [user for user in (self.home, *self.users.values()) if user is not stream]
        if any(not user.closed and user.capture_id() is not None for user in streams):
            raise CaptureError("the memory is in use on a stream that is being captured")
        for event in self.events.values():
            stream.wait(event)
        for user in streams:
            stream.follow(user)

    def used_on(self, stream: Stream) -> None:
        if stream is self.home:
            return
        key = (stream.device.index, stream.handle)
        if stream.foreign:
            if stream.capture_id() is None:  # no event is needed in a capture, as the graph keeps the array alive
                self.used_before(stream.mark())
            return
        known = self.users.get(key)
        if known is not None and known is not stream and known.closed:
            # The driver has given the handle of the closed stream `known` to `stream`. The free waits for both streams.
            self.users[id(known)] = known
        self.users[key] = stream


def _destroy(driver: Driver, handle: object) -> None:
    driver.cuMemPoolDestroy(handle)


def _free(driver: Driver, pool: Pool, block: Block) -> None:
    pool._free(block)


def _dropped(weak: weakref.ref[Pool], ptr: int) -> None:
    """Queue a block to be freed. As a finalizer it makes no driver call and keeps no reference to the driver."""
    pool = weak()
    if pool is not None:
        retire(pool.device.driver, _free, pool, pool._blocks.pop(ptr))


class Pool(Owned):
    """A device's memory pool. It keeps freed memory for reuse."""

    def __init__(self, device: Device) -> None:
        self.device = device
        driver, types = device.driver, device.driver.types
        properties = types.CUmemPoolProps()
        properties.allocType = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.index
        self.handle = driver.cuMemPoolCreate(properties)
        self._owns(driver, _destroy, self.handle)
        threshold = types.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        driver.cuMemPoolSetAttribute(self.handle, threshold, types.cuuint64_t(_KEEP_EVERYTHING))
        self._allowed = {device.index}
        self._blocks: dict[int, Block] = {}

    def allow(self, devices: Iterable[Device]) -> None:
        """Give `devices`, except those that cannot be peers, read and write access to all memory of this pool."""
        self._check_open()
        wanted = {d.index: d for d in devices if d.can_access_peer(self.device) and d.index not in self._allowed}
        if wanted:
            descriptors = access_descriptors(self.device.driver, wanted.values())
            self.device.driver.cuMemPoolSetAccess(self.handle, descriptors, len(descriptors))
            self._allowed.update(wanted)

    def allocate(self, nbytes: int, stream: Stream) -> Block:
        """Allocate `nbytes` > 0 for later work on `stream`. Raises CaptureError while the stream is being captured."""
        self._check_open()
        if stream.capture_id() is not None:
            raise CaptureError(f"memory cannot be allocated on {stream!r} while it is captured; allocate it before")
        self.flush()
        with self.device.use():
            ptr = self.device.driver.cuMemAllocFromPoolAsync(nbytes, self.handle, stream.handle)
        block = self._blocks[int(ptr)] = Block(int(ptr), nbytes, stream)
        return block

    def free_with(self, owner: object, block: Block) -> None:
        """Free the block some time after `owner` was collected."""
        weakref.finalize(owner, _dropped, weakref.ref(self), block.ptr).atexit = False

    def flush(self) -> None:
        """Free the queued blocks, each after the work of every stream that used it (`lifetime.flush`)."""
        flush(self.device.driver)

    def _free(self, block: Block) -> None:
        if self.closed:
            return
        home = self.device.stream if block.home.closed else block.home
        if home.capture_id() is not None:
            raise CaptureError(f"memory cannot be freed on {home!r} while it is captured")
        block.order(home)
        with self.device.use():
            self.device.driver.cuMemFreeAsync(block.ptr, home.handle)
