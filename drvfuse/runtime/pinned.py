# SPDX-License-Identifier: Apache-2.0
"""Page-locked host memory that kernels of every device can read and write."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from .device import device
from .driver import Driver
from .lifetime import Owned, flush

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PORTABLE, _DEVICE_MAPPED = 1, 2


def _free(driver: Driver, address: int) -> None:
    driver.cuMemFreeHost(address)


class PinnedBuffer(Owned):
    """`nbytes` of zeroed host memory, usable by every device of `driver` at the same address `ptr`.

    Views keep the buffer object alive; after close() they must not be touched.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        if nbytes <= 0:
            raise ArgumentError("nbytes", nbytes, "positive")
        flush(driver)
        some = next(iter(driver.devices.values()), None) or device(0, driver=driver)
        with some.use():
            self.ptr = int(driver.cuMemHostAlloc(nbytes, _PORTABLE | _DEVICE_MAPPED))
        self.nbytes = nbytes
        self._owns(driver, _free, self.ptr)
        ctypes.memset(self.ptr, 0, nbytes)

    def view(self, dtype: npt.DTypeLike) -> np.ndarray[Any, Any]:
        """The buffer as a 1-D numpy array over the same memory. `dtype` may be structured; bytes after the last whole
        element are left out."""
        import numpy as np

        self._check_open()
        element = np.dtype(dtype)
        storage = (ctypes.c_ubyte * self.nbytes).from_address(self.ptr)
        storage.owner = self  # type: ignore[attr-defined]  # numpy keeps `storage`, and that keeps the buffer
        return np.ndarray(self.nbytes // element.itemsize, element, buffer=memoryview(storage))
