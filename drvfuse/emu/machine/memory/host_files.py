# SPDX-License-Identifier: Apache-2.0
"""Finds the file that holds a range of this process's memory, or makes one for private memory.

The devices of a machine reach host memory by a second mapping of its file. Private memory, such as that of numpy's
arrays, has no file; `make_shared` moves its contents to a new file that is mapped at the same addresses.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path
from typing import NamedTuple

_MAPS = Path("/proc/self/maps")
_DESCRIPTORS = Path("/proc/self/fd")
_GROWTH = 1 << 40
"""Bytes by which the file is longer than the memory, as `realloc` may extend the mapping in place."""

_libc = ctypes.PyDLL(None)  # keeps Python's global lock, so no other Python thread writes while the pages are replaced
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_libc.write.restype = ctypes.c_ssize_t
_MAP_FIXED = 0x10


class FilePart(NamedTuple):
    """The file and the offset at which some memory lies. The caller owns `descriptor`, which can read and write."""

    descriptor: int
    offset: int


def behind(address: int, nbytes: int) -> FilePart | None:
    """The part of a file that a range of this process's memory maps with MAP_SHARED. The file is a memfd, or lies in
    /dev/shm.

    None if the range is other memory, if the file ends before the range, or if this process has no open descriptor of
    the file that can read and write.
    """
    found = _mapping(address, nbytes)
    if found is None:
        return None
    device, inode, offset = found
    for name in os.listdir(_DESCRIPTORS):
        try:
            status, mode = os.fstat(int(name)), fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE
            whole = status.st_size >= offset + nbytes  # an access beyond the end of the file would kill the process
            if whole and (status.st_dev, status.st_ino, mode) == (device, inode, os.O_RDWR):
                return FilePart(fcntl.fcntl(int(name), fcntl.F_DUPFD_CLOEXEC, 0), offset)
        except OSError:  # another thread has closed the descriptor
            continue
    return None


def make_shared(address: int, nbytes: int) -> FilePart | None:
    """Move private memory to a new file, map the file with MAP_SHARED at the addresses of that memory, and return the
    file.

    The pages stay shared, so processes that are forked later share them too. None for memory that cannot be written or
    is shared already. Threads that run no Python code must not write to the pages during the call.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE - start
    if not _private(start, start + size):
        return None
    descriptor = os.memfd_create("drvfuse-registered")
    try:
        os.ftruncate(descriptor, size + _GROWTH)
        written = 0
        while written < size:
            done = _libc.write(descriptor, start + written, size - written)
            if done <= 0:
                raise OSError(f"{size} bytes do not fit into a file in memory")
            written += done
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(start, size, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != start:
            raise OSError(f"{size} bytes of a file in memory cannot be mapped")
    except OSError:
        os.close(descriptor)
        return None
    return FilePart(descriptor, address - start)


def _private(start: int, end: int) -> bool:
    """True if all of a range is private memory that can be written."""
    at = start
    for line in _MAPS.read_text().splitlines():
        span, rights = line.split(maxsplit=2)[:2]
        first, last = (int(word, 16) for word in span.split("-"))
        if first <= at < last:
            if rights[:2] != "rw" or rights[3] != "p" or "[stack]" in line:
                return False
            at = last
        if at >= end:
            return True
    return False


def _mapping(address: int, nbytes: int) -> tuple[int, int, int] | None:
    """(device, inode, offset in the file) if the whole range is a shared, writable mapping of one part of a file, else
    None.
    """
    at, found = address, None
    for line in _MAPS.read_text().splitlines():
        span, rights, offset, device, inode = line.split(maxsplit=5)[:5]
        start, end = (int(word, 16) for word in span.split("-"))
        if not start <= at < end:
            continue
        major, minor = (int(word, 16) for word in device.split(":"))
        part = os.makedev(major, minor), int(inode), int(offset, 16) + address - start
        if rights[1] != "w" or rights[3] != "s" or part[1] == 0 or found not in (None, part):
            return None
        at, found = end, part
        if at >= address + nbytes:
            return found
    return None
