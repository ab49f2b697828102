# SPDX-License-Identifier: Apache-2.0
"""The memory window: addressable bytes, aliases of one physical memory, and errors for freed memory."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys

import numpy as np
import pytest

from drvfuse.emu import abi
from drvfuse.emu.abi import Kind
from drvfuse.emu.space.pages import GRANULE, WindowError
from drvfuse.emu.space.window import Window
from drvfuse.errors import ArgumentError


@pytest.fixture
def window():
    w = Window(1)
    yield w
    w.close()


def shadow(window: Window, address: int, nbytes: int) -> list[int]:
    return window.view(address + abi.SHADOW_OFFSET, nbytes).tolist()


def test_an_allocation_is_addressable_to_the_byte(window):
    address = window.alloc(1001, 2, 0b101, 0b100)
    assert address % 256 == 0
    assert shadow(window, address, 1003) == [abi.SHADOW_ADDRESSABLE] * 1001 + [0, 0]
    assert window.access(address) == (0b101, 0b100)
    assert window.index.find(address + 1000).nbytes == 1001
    assert window.index.find(address + 1001) is None
    assert window.index.covers(address, 1001) and not window.index.covers(address, 1002)


def test_memory_of_whole_granules_needs_no_shadow_to_be_addressable(window):
    address = window.alloc(3 * GRANULE + 5, 0, 1, 1)
    assert shadow(window, address, 4) == [0] * 4
    assert shadow(window, address + 3 * GRANULE, 6) == [1] * 5 + [0]


def test_neighbouring_allocations_do_not_overlap(window):
    a, b = window.alloc(100, 0, 1, 1), window.alloc(100, 0, 1, 1)
    assert b - a >= 2 * GRANULE
    assert window.access(a + GRANULE) == (0, 0)


def test_freed_memory_is_inaccessible_and_named(window):
    address = window.alloc(4096, 1, 0xFF, 0xFF)
    window.view(address, 4096)[:] = 7
    window.mark_initialised(address, 4096)
    window.free(address)
    assert window.access(address) == (0, 0)
    assert window.index.find(address) is None
    assert "which was freed" in window.index.nearest(address + 12)
    assert "12 bytes into 4096 bytes" in window.index.nearest(address + 12)
    other = window.alloc(4096, 1, 0xFF, 0xFF)
    assert other != address, "addresses are not reused while there are fresh ones"
    with pytest.raises(ArgumentError, match="live allocation"):
        window.free(address)


def test_addresses_are_reused_when_the_window_is_full(window):
    for _ in range(100):
        address = window.alloc(100 << 20, 0, 1, 1)
        window.view(address, 4)[:] = 9
        window.mark_initialised(address, 4)
        window.free(address)
    address = window.alloc(100 << 20, 0, 1, 1)
    assert window.view(address, 4).tolist() == [0] * 4
    assert window.uninitialised(address, 4) == address


def test_a_full_window_is_an_error(window):
    with pytest.raises(WindowError, match="no room for"):
        window.alloc(2 << 30, 0, 1, 1)


def test_the_nearest_allocation_of_an_address_is_found(window):
    address = window.alloc(1000, 3, 1, 1)
    assert (
        window.index.nearest(address + 1008)
        == f"8 bytes past the end of 1000 bytes at 0x{address:x} (device of device 3)"
    )
    assert window.index.nearest(address - 4).startswith("4 bytes before")
    assert window.index.nearest(0) == "outside of device memory: a null pointer, or close to one"
    assert window.index.nearest(1 << 30).startswith("outside of device memory, as is memory of the host")


def test_two_addresses_alias_one_physical_memory(window):
    rng = np.random.default_rng(0)
    physical = window.mappings.physical.create(2 * GRANULE, 1)
    base = window.mappings.reserve(4 * GRANULE)
    window.mappings.map(base, 2 * GRANULE, physical)
    window.mappings.map(base + 2 * GRANULE, GRANULE, physical, GRANULE)
    alias = base + 2 * GRANULE
    assert window.access(base) == (0, 0), "mapped memory is inaccessible until access is set"
    window.set_access(base, 2 * GRANULE, 0b11, 0b10)
    assert window.access(base) == (0b11, 0b10) and window.access(alias) == (0, 0)
    data = rng.integers(0, 256, 5000, dtype=np.uint8)
    window.view(base + GRANULE, 5000)[:] = data
    window.mark_initialised(base + GRANULE, 5000)
    assert (window.view(alias, 5000) == data).all()
    assert window.uninitialised(alias, 5000) is None
    assert window.uninitialised(alias, 5001) == alias + 5000


def test_physical_memory_lives_until_unmapped_and_released(window):
    physical = window.mappings.physical.create(GRANULE, 0)
    base = window.mappings.reserve(2 * GRANULE)
    window.mappings.map(base, GRANULE, physical)
    window.view(base, 4)[:] = 5
    window.mappings.physical.release(physical)
    assert window.view(base, 4).tolist() == [5] * 4
    window.mappings.unmap(base, GRANULE)
    assert window.access(base) == (0, 0)
    again = window.mappings.physical.create(GRANULE, 0)
    window.mappings.map(base, GRANULE, again)
    assert window.view(base, 4).tolist() == [0] * 4
    with pytest.raises(ArgumentError, match="nothing mapped"):
        window.mappings.free_reservation(base, 2 * GRANULE)
    window.mappings.unmap(base, GRANULE)
    window.mappings.free_reservation(base, 2 * GRANULE)


def test_wrong_mappings_are_refused(window):
    physical = window.mappings.physical.create(2 * GRANULE, 0)
    base = window.mappings.reserve(4 * GRANULE)
    window.mappings.map(base, 2 * GRANULE, physical)
    for address, nbytes, offset in [
        (base, GRANULE, 0),
        (base + 3 * GRANULE, 2 * GRANULE, 0),
        (base + 2 * GRANULE, 2 * GRANULE, GRANULE),
        (base + 2 * GRANULE, 100, 0),
        (base + 64 * GRANULE, GRANULE, 0),
    ]:
        with pytest.raises(ArgumentError):
            window.mappings.map(address, nbytes, physical, offset)
    with pytest.raises(ArgumentError, match="whole mappings"):
        window.mappings.unmap(base, GRANULE)


def test_a_copy_keeps_which_bytes_are_initialised(window):
    a, b = window.alloc(64, 0, 1, 1), window.alloc(64, 0, 1, 1)
    window.view(a, 64)[:] = np.arange(64)
    window.mark_initialised(a + 8, 8)
    window.copy(b, a, 32)
    assert window.uninitialised(b + 8, 8) is None
    assert window.uninitialised(b, 32) == b
    assert shadow(window, b, 64)[31:33] == [1, 1]
    host = np.arange(64, dtype=np.uint8)[::-1].copy()
    window.copy(b, host.ctypes.data, 64)
    assert window.uninitialised(b, 64) is None
    assert (window.view(b, 64) == host).all()


def test_pinned_memory_counts_as_initialised(window):
    address = window.host_alloc(1000)
    assert window.uninitialised(address, 1000) is None
    assert window.index.find(address).kind is Kind.HOST
    assert window.access(address) == (0xFF, 0xFF)


def test_several_windows_do_not_overlap():
    first, second = Window(1), Window(1)
    assert first.base != second.base
    second.close()
    third = Window(1)
    assert third.base == second.base
    first.close()
    third.close()
    third.close()


def test_a_dropped_window_is_unmapped_with_its_last_view():
    window = Window(1)
    view, release = window.view(window.alloc(8, 0, 1, 1), 8), window._release
    del window
    view[:] = 3
    assert release.alive
    del view
    assert not release.alive


def test_too_many_windows_are_an_error():
    windows = []
    with pytest.raises(WindowError, match="close machines"):
        for _ in range(17):
            windows.append(Window(64))
    for window in windows:
        window.close()


def test_a_window_too_large_for_the_process_is_made_smaller_with_a_warning():
    program = """
import logging, sys
logging.basicConfig(stream=sys.stdout)
from drvfuse.emu.space.window import Window
w = Window(64)
a = w.alloc(1 << 20, 0, 1, 1)
w.view(a, 1 << 20)[:] = 1
print(w.nbytes >> 20)
"""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))

    run = subprocess.run(
        [sys.executable, "-c", program], preexec_fn=limit, capture_output=True, text=True, timeout=60, check=True
    )
    lines = run.stdout.splitlines()
    assert "asked for 64 GiB" in lines[0] and "ulimit -v" in lines[0]
    assert lines[-1] == "2048"


def test_the_default_window_fits_without_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "drvfuse"):
        Window().close()
    assert not caplog.records
