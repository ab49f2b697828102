# SPDX-License-Identifier: Apache-2.0
"""Host memory that processes of one host share, and that kernels of each of them can read and write."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Any

from .device import Device
from .driver import Driver
from .lifetime import Owned, flush
from .vmm import Undo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PORTABLE, _DEVICE_MAPPED = 1, 2


def create(nbytes: int) -> int:
    """Make `nbytes` of zeroed, nameless memory of fixed size. Returns a file descriptor, which the caller owns."""
    descriptor = os.memfd_create("drvfuse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class SharedHostMemory(Owned):
    """`nbytes` bytes of the memory of a file descriptor, which `create` has returned in this process or in another one.

    `ptr` is its address for the kernels of this process. The caller keeps the descriptor, and may close it. Views keep
    the memory mapped; after close() kernels cannot use it.
    """

    def __init__(self, device: Device, descriptor: int, nbytes: int) -> None:
        driver = device.driver
        self._mapped = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        flush(driver)
        with Undo() as undo, device.use():
            driver.cuMemHostRegister(address, nbytes, _PORTABLE | _DEVICE_MAPPED)
            undo.append(driver.cuMemHostUnregister, address)
            self.ptr = int(driver.cuMemHostGetDevicePointer(address, 0))
            undo.commit()
        self._owns(driver, _unregister, address, self._mapped)

    def view(self, dtype: npt.DTypeLike) -> np.ndarray[Any, Any]:
        """The memory as a 1-D numpy array. `dtype` may be structured; bytes after the last whole element are left
        out."""
        import numpy as np

        self._check_open()
        element = np.dtype(dtype)
        return np.frombuffer(self._mapped, element, len(self._mapped) // element.itemsize)


def _unregister(driver: Driver, address: int, mapped: mmap.mmap) -> None:
    """Unregister the memory. `mapped` is an argument so that the mapping lives until this call."""
    driver.cuMemHostUnregister(address)
