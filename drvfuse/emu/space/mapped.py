# SPDX-License-Identifier: Apache-2.0
"""Checks whether memory of this process can be read, written or called. A check never crashes.

A call of the emulated driver reads and writes addresses in the caller's process, as the real driver does. If nothing is
mapped there, the real driver crashes the process. The emulated driver first checks each address that it gets as a
number. `madvise(MADV_POPULATE_READ or _WRITE)` maps the pages in, and fails if a read or a write would be a fault; it
takes some microseconds. Where madvise gives no answer (Linux before 5.14, memory of a device), /proc/self/maps is read
instead. The checks do not protect against another thread that unmaps the memory at the same time.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Sequence

_POPULATE_READ, _POPULATE_WRITE = 22, 23
_PAGE = mmap.PAGESIZE
_END = 1 << 64
_PIECES = 256  # the most ranges that one system call reads; Linux allows up to 1024
_STRING = 256  # `string` first reads this many bytes
_PIECE = struct.Struct("QQ")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.process_vm_readv.argtypes = (
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_called: set[int] = set()  # addresses that are known to be executable


def readable(address: int, nbytes: int) -> bool:
    """True if the `nbytes` bytes at an address can be read."""
    return _populated(address, nbytes, _POPULATE_READ, "r")


def writable(address: int, nbytes: int) -> bool:
    """True if the `nbytes` bytes at an address can be written."""
    return _populated(address, nbytes, _POPULATE_WRITE, "w")


def usable(address: int, nbytes: int, write: bool) -> bool:
    """True if the `nbytes` bytes at an address can be written or, without `write`, read."""
    return writable(address, nbytes) if write else readable(address, nbytes)


def present(address: int, nbytes: int) -> bool:
    """True if the `nbytes` bytes at an address can be read. This check maps no page in."""
    return nbytes <= 0 or (0 < address <= _END - nbytes and _listed(address, nbytes, "r"))


def executable(address: int) -> bool:
    """True if there is code at an address."""
    if address not in _called and _listed(address, 1, "x"):
        _called.add(address)
    return address in _called


def _populated(address: int, nbytes: int, advice: int, permission: str) -> bool:
    if nbytes <= 0:
        return True
    if not 0 < address <= _END - nbytes:
        return False
    first = address // _PAGE * _PAGE
    if _libc.madvise(first, -(-(address + nbytes) // _PAGE) * _PAGE - first, advice) == 0:
        return True
    return ctypes.get_errno() == errno.EINVAL and _listed(address, nbytes, permission)


def _listed(address: int, nbytes: int, permission: str) -> bool:
    """Whether the system's list of mappings covers a range without a gap, with a permission ("r", "w" or "x")."""
    with open("/proc/self/maps") as mappings:
        for line in mappings:
            span, permissions = line.split(" ", 2)[:2]
            start, end = (int(number, 16) for number in span.split("-"))
            if start <= address < end:
                if permission not in permissions:
                    return False
                nbytes -= end - address
                address = end
                if nbytes <= 0:
                    return True
    return False


def gathered(pieces: Sequence[tuple[int, int]]) -> bytes | None:
    """The bytes of all ranges (address, size), one after the other. None if one of the ranges cannot be read."""
    found = b""
    for first in range(0, len(pieces), _PIECES):
        part = _gathered(pieces[first : first + _PIECES])
        if part is None:
            return None
        found += part
    return found


def _gathered(pieces: Sequence[tuple[int, int]]) -> bytes | None:
    """The bytes of at most _PIECES ranges (address, size), one after the other. None if a range cannot be read."""
    total, sources = 0, b""
    for address, size in pieces:
        if size:
            if not 0 < address <= _END - size:
                return None
            total += size
            sources += _PIECE.pack(address, size)
    if not total:
        return b""
    memory = (ctypes.c_char * total)()
    target = _PIECE.pack(ctypes.addressof(memory), total)
    copied_bytes = _libc.process_vm_readv(os.getpid(), target, 1, sources, len(sources) // _PIECE.size, 0)
    if copied_bytes == total:
        return memory.raw
    # A sandbox may forbid process_vm_readv. The ranges are then read directly, after `readable` has checked them.
    forbidden = copied_bytes < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)
    if not forbidden or not all(readable(address, size) for address, size in pieces):
        return None
    return b"".join(ctypes.string_at(address, size) for address, size in pieces)


def copied(address: int, nbytes: int) -> bytes | None:
    """A copy of the bytes at an address. None if they cannot be read."""
    return _gathered(((address, nbytes),))


def string(address: int) -> bytes | None:
    """The C string at an address, without the final zero byte. None if it cannot be read."""
    found: list[bytes] = []
    size = _STRING
    while True:
        # A part does not cross the end of a page: the string may end there, and the next page may not be mapped.
        room = _PAGE - address % _PAGE
        part = copied(address, min(size, room))
        if part is None:
            return None
        end = part.find(b"\0")
        if end >= 0:
            return b"".join((*found, part[:end]))
        found.append(part)
        address += len(part)
        size *= 2
