# SPDX-License-Identifier: Apache-2.0
"""Memory that the race detector ignores by request: accepted arguments, their extent, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import drvfuse as df
from drvfuse.emu import Machine
from drvfuse.errors import ArgumentError

SOURCE = """
extern "C" __global__ void both(unsigned* word) { *word = blockIdx.x; }
"""


@pytest.fixture(params=[True, False], ids=["race", "no-race"])
def device(request: pytest.FixtureRequest) -> Iterator[df.Device]:
    with Machine(devices=1, race=request.param) as machine:
        yield df.device(0, driver=machine)


def _races(device: df.Device, address: int) -> bool:
    """Whether two blocks that write the word at this address are reported as a race."""
    machine = device.driver.machine
    before = len(machine.reports)
    module = df.compile(f"// {before}\n{SOURCE}", driver=machine)
    module["both"].prepare(2, 1, address, device=device)(device.stream)
    device.synchronize()
    return len(machine.reports) > before


WAYS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "array": lambda array: (array,),
    "address": lambda array: (array.ptr, array.nbytes),
    "words of an array": lambda array: (array, 4),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_array_of_any_size_can_be_declared(device: df.Device, way: str, count: int) -> None:
    machine = device.driver.machine
    polled, other = device.zeros((count,), "uint32"), device.zeros((count,), "uint32")
    machine.declare_polled(*WAYS[way](polled))
    last = 0 if way == "words of an array" else 4 * (count - 1)
    assert not _races(device, polled.ptr + last)
    assert _races(device, other.ptr + last) == (machine.detector is not None)


def test_words_next_to_the_declared_ones_are_still_checked(device: df.Device) -> None:
    machine = device.driver.machine
    words = device.zeros((12,), "uint32")
    machine.declare_polled(words.ptr + 20, 4)
    machine.declare_polled(words.ptr + 28, 8)
    checked = machine.detector is not None
    declared = [5, 7, 8]
    assert [_races(device, words.ptr + 4 * i) for i in range(12)] == [i not in declared and checked for i in range(12)]
    machine.declare_polled(words)
    assert not any(_races(device, words.ptr + 4 * i) for i in range(12))


def test_memory_that_is_not_allocated_is_refused_with_a_specific_message(device: df.Device) -> None:
    machine = device.driver.machine
    array = device.zeros((5,), "uint32")
    pointer = array.ptr
    for arguments, text in (
        ((pointer,), "nbytes is not given"),
        ((pointer, 0), "nbytes is 0; it must be an integer of at least 1"),
        ((pointer, 1.5), "nbytes is 1.5"),
        ((array, 21), r"memory is 21 bytes at 0x\w+ \(0 bytes into 20 bytes at"),
        ((pointer + 20, 4), "0 bytes past the end of"),
        ((0x12345678, 4), "outside of device memory"),
        (("flags", 4), "memory is 'flags'; it must be an array or an address"),
    ):
        with pytest.raises(ArgumentError, match=text):
            machine.declare_polled(*arguments)
    with device.use():
        pointer = int(device.driver.cuMemAlloc(20))
        device.driver.cuMemFree(pointer)
    with pytest.raises(ArgumentError, match="which was freed"):
        machine.declare_polled(pointer, 20)
