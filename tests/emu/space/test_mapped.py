# SPDX-License-Identifier: Apache-2.0
"""Whether memory of this process can be read, written or executed is found without touching it."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from drvfuse.emu.space import mapped

PAGE = mmap.PAGESIZE
FAR = 2**47 - PAGE  # an unmapped address at the end of the address space


@pytest.fixture(params=["by the kernel", "by the list"])
def pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The address of two pages, of which only the first is accessible."""
    if request.param == "by the list":  # as on Linux kernels that lack or forbid the calls that `Old` refuses
        monkeypatch.setattr(mapped, "_libc", Old())
    memory = mmap.mmap(-1, 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(start + PAGE, PAGE, 0) == 0
    yield start
    assert protect(start + PAGE, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0


class Old:
    """The C library of a system on which memory can be probed neither with MADV_POPULATE nor with process_vm_readv."""

    @staticmethod
    def madvise(address: int, nbytes: int, advice: int) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    @staticmethod
    def process_vm_readv(*args: object) -> int:
        ctypes.set_errno(errno.ENOSYS)
        return -1


def test_a_range_is_accessible_to_its_last_byte(pages: int) -> None:
    for test in (mapped.readable, mapped.writable, mapped.present):
        assert test(pages, PAGE) and test(pages + PAGE - 1, 1) and test(pages + 5, 0)
        assert not test(pages, PAGE + 1) and not test(pages + PAGE, 1) and not test(pages + PAGE - 1, 2)
        assert not any(test(address, 8) for address in (0, 1, FAR, 2**63, 2**64 - 1, 2**64 - 8))
        assert not test(pages, 2**63)


def test_read_only_memory_is_readable_and_not_writable(pages: int) -> None:
    constant = mmap.mmap(-1, PAGE, prot=mmap.PROT_READ)
    address = np.frombuffer(constant, np.uint8).ctypes.data
    assert mapped.readable(address, PAGE) and not mapped.writable(address, 1)


def test_an_address_is_code_if_it_is_executable(pages: int) -> None:
    function = ctypes.CFUNCTYPE(None)(lambda: None)
    code = ctypes.cast(function, ctypes.c_void_p).value
    assert code is not None and mapped.executable(code)
    assert not any(mapped.executable(address) for address in (pages, pages + PAGE, 0, 7, FAR, 2**64 - 1))


def test_ranges_are_read_completely_or_not_at_all(pages: int, rng: np.random.Generator) -> None:
    values = rng.integers(0, 256, PAGE, np.uint8)
    ctypes.memmove(pages, values.ctypes.data, PAGE)
    content = values.tobytes()
    assert mapped.copied(pages + 3, 100) == content[3:103]
    pieces = [(int(start), int(size)) for start, size in zip(*rng.integers(0, 99, (2, 300)), strict=True)]
    expected = b"".join(content[start : start + size] for start, size in pieces)
    assert mapped.gathered([(pages + start, size) for start, size in pieces]) == expected
    assert mapped.gathered([(pages, 4), (pages + PAGE - 2, 4)]) is None
    assert mapped.gathered([(pages, 4), (0, 8)]) is None and mapped.gathered([]) == b""


@pytest.mark.parametrize("length", [0, 1, 255, 256, 3000])
def test_a_string_is_read_to_its_end_and_no_further(pages: int, length: int) -> None:
    """The string ends at the end of its page, and the next page cannot be read."""
    at = pages + PAGE - length - 1
    ctypes.memmove(at, b"x" * length + b"\0", length + 1)
    assert mapped.string(at) == b"x" * length
    ctypes.memset(pages + PAGE - 1, ord("y"), 1)
    assert mapped.string(at) is None
