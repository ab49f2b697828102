# SPDX-License-Identifier: Apache-2.0
"""The file behind shared memory of this process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

_MAPS = Path("/proc/self/maps")
_DESCRIPTORS = Path("/proc/self/fd")


class FilePart(NamedTuple):
    """Where in an open file, which can be written too, some memory is. `descriptor` belongs to who asked for it."""

    descriptor: int
    offset: int


def behind(address: int, nbytes: int) -> FilePart | None:
    """The part of a file that a range of this process's memory is a shared mapping of (a memfd, or a file in /dev/shm).

    None if it is anything else, if the file ends before the range does, or if this process has no open descriptor of
    the file that can read and write.
    """
    found = _mapping(address, nbytes)
    if found is None:
        return None
    device, inode, offset = found
    for name in os.listdir(_DESCRIPTORS):
        try:
            status, mode = os.fstat(int(name)), fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE
            whole = status.st_size >= offset + nbytes  # a use of what is behind its end would kill the process
            if whole and (status.st_dev, status.st_ino, mode) == (device, inode, os.O_RDWR):
                return FilePart(fcntl.fcntl(int(name), fcntl.F_DUPFD_CLOEXEC, 0), offset)
        except OSError:  # another thread has closed it
            continue
    return None


def _mapping(address: int, nbytes: int) -> tuple[int, int, int] | None:
    """(device, inode, offset) of the file that all of a range is one shared, writable piece of."""
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
