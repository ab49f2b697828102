# SPDX-License-Identifier: Apache-2.0
"""System calls that reserve the areas of a window (data, shadow, access words, cells; see `space/window.py`) and map
files into them, and `Ranges`, which allocates parts of an area or of a file.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import gc
import mmap
import os
from dataclasses import dataclass, field

from ...errors import DrvfuseError
from .. import abi

GRANULE = 1 << abi.GRANULE_SHIFT


class WindowError(DrvfuseError):
    """The window cannot be reserved, or has no room left."""


@dataclass
class Ranges:
    """An allocator of the space from `start` to `end`, which are addresses or offsets in a file. It begins at the
    front, and allocates what was given back only when the rest is used up. `name` names the space in the message of
    an error.
    """

    start: int
    end: int
    name: str
    next: int = field(init=False)  # addresses or offsets from this one on have never been taken
    free: list[tuple[int, int]] = field(default_factory=list)  # (start, end) of what was given back, sorted and merged

    def __post_init__(self) -> None:
        self.next = self.start

    def take(self, nbytes: int, alignment: int, asked: int | None = None) -> int:
        """Take `nbytes` of free space and return its start. WindowError if there is no room; its message names `asked`
        bytes if that is given, else `nbytes`.
        """
        start = -(-self.next // alignment) * alignment
        if start + nbytes <= self.end:
            if start > self.next:
                self.give(self.next, start - self.next)
            self.next = start + nbytes
            return start
        for i, (low, high) in enumerate(self.free):
            start = -(-low // alignment) * alignment
            if start + nbytes <= high:
                self.free[i : i + 1] = [r for r in ((low, start), (start + nbytes, high)) if r[0] < r[1]]
                return start
        raise WindowError(f"no room for {nbytes if asked is None else asked} bytes in {self.name}")

    def give(self, start: int, nbytes: int) -> None:
        """Give back space that was taken."""
        end = start + nbytes
        i = bisect.bisect_left(self.free, (start, end))
        if i < len(self.free) and self.free[i][0] == end:
            end = self.free.pop(i)[1]
        if i and self.free[i - 1][1] == start:
            i -= 1
            start = self.free.pop(i)[0]
        self.free.insert(i, (start, end))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

_FIXED = 0x10
_NORESERVE = 0x4000
_FIXED_NOREPLACE = 0x100000
_PUNCH_HOLE = 0x02 | 0x01  # the flags FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE
_NO_ACCESS = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE


def _map_at(
    address: int, nbytes: int, flags: int, fd: int = -1, offset: int = 0, protection: int = _READ_WRITE
) -> None:
    got = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    if got == ctypes.c_void_p(-1).value or got is None:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if got != address:  # before Linux 4.17, the address is only a hint with _FIXED_NOREPLACE
        _libc.munmap(got, nbytes)
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))


def access_address(address: int) -> int:
    """The address of the access word, in the table of the first process, for the granule in which `address` lies."""
    return abi.ACCESS_BASE + ((address - abi.WINDOW_BASE) >> abi.GRANULE_SHIFT) * 4


def map_file(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Map part of a file at an address in a reserved area."""
    _map_at(address, nbytes, mmap.MAP_SHARED | _FIXED | _NORESERVE, fd, offset)


def map_empty(address: int, nbytes: int) -> None:
    """Map new zeroed memory at an address in a reserved area."""
    _map_at(address, nbytes, _ANONYMOUS | _FIXED)


def keep_free(address: int, nbytes: int) -> None:
    """Reserve a range of addresses, so that nothing else is mapped there. OSError if something is mapped there."""
    _map_at(address, nbytes, _ANONYMOUS | _FIXED_NOREPLACE, protection=_NO_ACCESS)


def keep_free_again(address: int, nbytes: int) -> None:
    """Unmap everything in a range that `keep_free` has reserved, and keep the range reserved."""
    _map_at(address, nbytes, _ANONYMOUS | _FIXED, protection=_NO_ACCESS)


def give_up(address: int, nbytes: int) -> None:
    """Release a range that `keep_free` has reserved, with everything that is mapped in it."""
    _libc.munmap(address, nbytes)


def drop(address: int, nbytes: int) -> None:
    """Give the pages of a range back to the system. The range reads as zero afterwards."""
    _libc.madvise(address, nbytes, mmap.MADV_DONTNEED)


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give the pages of part of a file back to the system."""
    _libc.fallocate(fd, _PUNCH_HOLE, offset, nbytes)


def round_up(nbytes: int, alignment: int) -> int:
    """The least multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment


def cell_address(address: int) -> int:
    """The address of the race detector's cell for the line in which `address` lies."""
    return abi.CELL_BASE + ((address - abi.WINDOW_BASE) >> abi.LINE_SHIFT) * 4


def areas(base: int, nbytes: int, cells: bool) -> tuple[tuple[int, int], ...]:
    """(address, bytes) of each area of a window at `base` with `nbytes` of data: data, shadow, access words and, if
    `cells` is true, the race detector's cells.
    """
    words = round_up((nbytes >> abi.GRANULE_SHIFT) * 4, mmap.PAGESIZE)
    found = (base, nbytes), (base + abi.SHADOW_OFFSET, nbytes), (access_address(base), words)
    return (*found, (cell_address(base), nbytes >> abi.LINE_SHIFT << 2)) if cells else found


def reserve(asked: int, cells: bool, last: bool = False) -> tuple[int, int]:
    """Reserve a window and return (base, bytes). The window lies at the first free place or, with `last`, at the last
    free place. It is as large as the process may reserve, up to `asked` bytes.

    Before a smaller window is tried, the garbage collector runs, since it releases windows of dropped machines.
    """
    # `refusal` is the text of an exception. The exception itself would keep its traceback, and so the frames of the
    # callers and the window that they construct, alive after that window is dropped.
    refusal, taken, collected = "", False, False
    nbytes = asked
    slots = range(abi.WINDOW_BASE, abi.WINDOW_BASE + abi.SHADOW_OFFSET - asked + 1, asked)
    while nbytes >= 256 << 20:
        for base in slots[::-1] if last else slots:
            done = []
            try:
                for address, size in areas(base, nbytes, cells):
                    _map_at(address, size, _ANONYMOUS | _FIXED_NOREPLACE)
                    done.append((address, size))
                return base, nbytes
            except OSError as error:
                refusal, taken = str(error), error.errno == errno.EEXIST
                for address, size in done:
                    _libc.munmap(address, size)
                if not taken:
                    break
        if collected:
            nbytes //= 2
        else:
            gc.collect()
            collected = True
    if taken:
        raise WindowError(f"no room for a window of {asked >> 30} GiB in addition to the open ones: close machines")
    raise WindowError(f"no address space for the emulated driver: {refusal}")


def arena(nbytes: int) -> mmap.mmap:
    """New zeroed memory. Only pages that are touched take real memory."""
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)


def unmap(base: int, nbytes: int, cells: bool, *files: int) -> None:
    """Release a window that `reserve` has returned, and close the descriptors `files`."""
    for address, size in areas(base, nbytes, cells):
        _libc.munmap(address, size)
    for file in files:
        os.close(file)
