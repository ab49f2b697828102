# SPDX-License-Identifier: Apache-2.0
"""Reads the PTX in fat binaries, which nvcc and the tool `fatbinary` write.

A fat binary is a header of 16 bytes (magic, version, size of the header, size of all entries) and entries. An entry is
a header with its kind (1: PTX, 2: machine code), its sizes, the architecture and flags, and its content. The content
may be compressed, as a block of LZ4 (older toolkits, and --compress-mode=speed) or by Zstandard (newer toolkits). The
system's libzstd decompresses Zstandard.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import Any

MAGIC = b"\x50\xed\x55\xba"
_HEADER = struct.Struct("<4sHHQ")  # magic, version, size of the header, size of all entries
_ENTRY = struct.Struct("<HHIQII4xI8xQ8xQ")
_PTX = 1
_LZ4, _ZSTD = 0x2000, 0x8000
_MOST = 1 << 31  # the maximum size of decompressed PTX in bytes


class FatbinError(Exception):
    """A fat binary cannot be read; the message says why."""


@dataclass(frozen=True)
class Entry:
    """One image. `content` is its bytes, which may be compressed; `size` is their number after decompression."""

    ptx: bool
    arch: int
    flags: int
    content: bytes
    size: int

    def text(self) -> bytes:
        """The PTX without its padding. Raises FatbinError if it cannot be decompressed."""
        content = self.content
        if self.flags & _LZ4:
            content = _lz4(content, self.size)
        elif self.flags & _ZSTD:
            content = _zstd(content, self.size)
        return content.rstrip(b"\0")


def entries(image: bytes) -> list[Entry]:
    """The images of a fat binary, in their order. Raises FatbinError."""
    if len(image) < _HEADER.size or image[:4] != MAGIC:
        raise FatbinError("the image does not begin with the header of a fat binary")
    _, _, at, size = _HEADER.unpack_from(image)
    end = at + size
    if end > len(image):
        raise FatbinError(f"the header of the fat binary says {end} bytes, and there are {len(image)}")
    found = []
    while at < end:
        if at + _ENTRY.size > end:
            raise FatbinError("the last entry of the fat binary is cut off")
        kind, _, header, padded, compressed, _, arch, flags, unpacked = _ENTRY.unpack_from(image, at)
        start = at + header
        at = start + padded
        if header < _ENTRY.size or at > end:
            raise FatbinError("an entry of the fat binary has an impossible size in its header")
        content = image[start : start + (compressed or padded)]
        found.append(Entry(kind == _PTX, arch, flags, content, unpacked or padded))
    return found


def _lz4(block: bytes, size: int) -> bytes:
    """The decompressed content of one LZ4 block."""
    out, at = bytearray(), 0
    try:
        while at < len(block):
            token = block[at]
            literals, at = _lz4_length(block, at + 1, token >> 4)
            out += block[at : at + literals]
            at += literals
            if at >= len(block):
                break  # the last sequence has literals and no copy
            back = block[at] | block[at + 1] << 8
            count, at = _lz4_length(block, at + 2, token & 15)
            start = len(out) - back
            if not 0 < back <= len(out):
                raise FatbinError("a compressed entry refers to bytes before its beginning")
            if len(out) + count > size:
                raise FatbinError(f"a compressed entry has more than the {size} bytes that it should have")
            for i in range(start, start + count + 4):  # byte by byte, since the copy may read bytes that it has written
                out.append(out[i])
    except IndexError:
        raise FatbinError("a compressed entry is cut off") from None
    if len(out) != size:
        raise FatbinError(f"a compressed entry has {len(out)} bytes, and should have {size}")
    return bytes(out)


def _lz4_length(block: bytes, at: int, length: int) -> tuple[int, int]:
    """The length that begins with the nibble `length`, and the offset after its last byte. If the nibble is 15, the
    bytes at `at`, up to the first one that is not 255, are added to it.
    """
    if length == 15:
        while True:
            length += block[at]
            at += 1
            if block[at - 1] != 255:
                break
    return length, at


@functools.cache
def _libzstd() -> Any:
    try:
        library = ctypes.CDLL("libzstd.so.1")
    except OSError:
        words = "the PTX is compressed by Zstandard, and this system has no libzstd.so.1; compile with"
        raise FatbinError(f"{words} -Xfatbin -compress-mode=speed or none") from None
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    return library


def _zstd(content: bytes, size: int) -> bytes:
    if size > _MOST:
        raise FatbinError(f"the header of a compressed entry says {size} bytes; at most {_MOST} are supported")
    out = ctypes.create_string_buffer(size)
    if _libzstd().ZSTD_decompress(out, size, content, len(content)) != size:
        raise FatbinError("a compressed entry cannot be decompressed")
    return out.raw
