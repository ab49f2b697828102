# SPDX-License-Identifier: Apache-2.0
"""`Group.symmetric(multicast=True)`, `multicast_at` and the staging memory of ops: results, driver calls, errors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from multicast_forms import BIND

import drvfuse as df
from drvfuse.comm import multicast
from drvfuse.errors import ArgumentError, CaptureError, ClosedError, DriverError, MulticastError, Unsupported
from drvfuse.runtime.lifetime import flush

pytestmark = pytest.mark.emulated

UNIT = 2 << 20

SOURCE = """
extern "C" __global__ void sum(const unsigned* everywhere, unsigned* out) {
  unsigned v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.u32 %0, [%1];"
               : "=r"(v) : "l"(everywhere + threadIdx.x) : "memory");
  out[threadIdx.x] = v;
}

extern "C" __global__ void spread(unsigned* everywhere, const unsigned* values) {
  asm volatile("multimem.st.relaxed.sys.global.u32 [%0], %1;"
               :: "l"(everywhere + threadIdx.x), "r"(values[threadIdx.x]) : "memory");
  asm volatile("fence.proxy.alias;" ::: "memory");
}
"""


@pytest.fixture
def machine() -> Iterator[df.emu.Machine]:
    with df.emu.Machine(devices=4) as machine:
        yield machine


def local(machine: df.emu.Machine, devices: int | list[int], **options: int) -> df.Group:
    return df.Group.local(devices, driver=machine, **{"workspace_bytes": 3 << 20, "max_blocks": 4, **options})


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("nbytes", [1, UNIT, UNIT + 1, 5 * UNIT - 16])
def test_a_multicast_buffer_has_an_address_per_rank_and_a_multicast_address(
    machine: df.emu.Machine, rng: np.random.Generator, ranks: int, nbytes: int
) -> None:
    with local(machine, list(range(ranks))[::-1]) as group:
        before = machine.held()
        with group.symmetric(nbytes, multicast=True) as buffer:
            assert nbytes <= buffer.nbytes < nbytes + UNIT and buffer.nbytes % UNIT == 0
            assert buffer.multicast_ptr is not None and len({buffer.multicast_ptr, *buffer.ptrs}) == ranks + 1
            held = machine.held()
            assert (held["multicast"], held["binds"]) == (1, ranks)
            hosts = [rng.integers(0, 256, 333, np.uint8) for _ in group]
            for array, host in zip(buffer.arrays(333, "uint8", buffer.nbytes - 333), hosts, strict=True):
                array.copy_from(host)
            for array, host in zip(buffer.arrays(333, "uint8", buffer.nbytes - 333), hosts, strict=True):
                np.testing.assert_array_equal(array.numpy(), host)
            del array
        assert machine.held() == before and not machine.reports


@pytest.mark.parametrize("devices", [[1, 0], [3, 0, 2], [2, 3, 0, 1]], ids=len)
def test_a_store_to_the_multicast_address_reaches_every_rank(
    machine: df.emu.Machine, rng: np.random.Generator, devices: list[int]
) -> None:
    """At any offset of any buffer, a reduction adds the values of all ranks, and a store writes to all ranks."""
    count = 64
    with local(machine, devices) as group:
        module = df.compile(SOURCE, driver=machine, arch=group[0].device.arch)
        first, second = group.symmetric(UNIT, multicast=True), group.symmetric(3 * UNIT, multicast=True)
        for buffer, offset in ((first, 0), (second, 0), (second, 2 * UNIT - 128), (second, 3 * UNIT - 4 * count)):
            parts = buffer.arrays(count, "uint32", offset)
            hosts = rng.integers(0, 2**32, (len(group) + 1, count), np.uint32)
            for part, host in zip(parts, hosts, strict=False):
                part.copy_from(host)
            group.synchronize()
            ptr = group.multicast_at([p + offset for p in buffer.ptrs], 4 * count)
            for rank in group:
                out, device = rank.zeros(count, "uint32"), rank.device
                module["sum"].prepare(1, count, ptr, out, device=device)(rank.stream)
                np.testing.assert_array_equal(out.numpy(), hosts[:-1].sum(0, dtype=np.uint32))
            last = group[-1]
            module["spread"].prepare(1, count, ptr, last.array(hosts[-1]), device=last.device)(last.stream)
            group.synchronize()
            for part in parts:
                np.testing.assert_array_equal(part.numpy(), hosts[-1])
        first.close()
        second.close()
    assert not machine.reports


def test_an_unbound_rank_is_found_at_the_first_multicast_access(
    machine: df.emu.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = multicast.bind
    monkeypatch.setattr(multicast, "bind", lambda item, parts: original(item, parts[:-1]))
    with local(machine, 3) as group:
        with group.symmetric(UNIT, multicast=True) as buffer:
            kernel = df.compile(SOURCE, driver=machine, arch=group[0].device.arch)["sum"]
            kernel.prepare(1, 32, buffer.multicast_ptr, group[0].empty(32, "uint32"))(group[0].stream)
            with pytest.raises(DriverError):
                group.synchronize()
        assert machine.reports[0].kind == "multicast_unbound"
        assert "the device(s) 2 of its team have bound no memory" in machine.reports[0].message


def test_a_buffer_is_released_in_reverse_order_of_its_set_up(machine: df.emu.Machine) -> None:
    """The multicast object is released before the memory that is bound to it."""
    with local(machine, 2) as group:
        group.symmetric(UNIT, multicast=True).close()
        names = [call.split("(")[0] for call in df.last_calls(11)]
    part = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]
    assert names == [*part[:2], "cuMulticastUnbind", "cuMulticastUnbind", part[2], *part, *part]


def test_memory_without_multicast_has_no_multicast_address_and_makes_no_multicast_call(
    machine: df.emu.Machine, counted_calls: Callable[..., list[str]]
) -> None:
    with local(machine, 2) as group:

        def use() -> None:
            group.symmetric(UNIT).close()
            df.allreduce(group, [rank.zeros(64, "float32") for rank in group])

        assert not any("Multicast" in name for name in counted_calls(group.driver, use))
        with group.symmetric(UNIT) as buffer:
            assert buffer.multicast_ptr is None
            assert group.multicast_at(buffer.ptrs, 64) is None
            assert not machine.held()["multicast"]


def test_multicast_at_gives_the_address_of_arrays_at_equal_offsets(machine: df.emu.Machine) -> None:
    with local(machine, 3) as group, local(machine, 3) as other:
        first, second = (group.symmetric(2 * UNIT, multicast=True) for _ in range(2))
        assert first.multicast_ptr is not None and second.multicast_ptr is not None
        for buffer in (first, second):
            for offset, nbytes in ((0, buffer.nbytes), (16, 1), (buffer.nbytes - 8, 8), (buffer.nbytes, 0)):
                found = group.multicast_at([ptr + offset for ptr in buffer.ptrs], nbytes)
                assert buffer.multicast_ptr is not None and found == buffer.multicast_ptr + offset
        a, b, c = first.ptrs
        for ptrs, nbytes in (
            ([a, b, c + 16], 16),  # arrays at different offsets
            ([a + 16, b, c], 16),
            ([b, c, a], 16),  # arrays of the wrong ranks
            ([a, b, second.ptrs[2]], 16),  # arrays of two buffers
            ([a - 16, b - 16, c - 16], 16),  # an address before the buffer
            ([a, b, c], first.nbytes + 1),  # an address beyond the buffer
            ([a + 16, b + 16, c + 16], first.nbytes),
        ):
            assert group.multicast_at(ptrs, nbytes) is None
        assert other.multicast_at(first.ptrs, 16) is None  # memory of another group
        ptrs = first.ptrs
        first.close()
        assert group.multicast_at(ptrs, 16) is None
        assert group.multicast_at(second.ptrs, 16) == second.multicast_ptr
        second.close()


def test_a_closed_buffer_gives_no_addresses(machine: df.emu.Machine) -> None:
    with local(machine, 2) as group:
        for options in ({}, {"multicast": True}):
            buffer = group.symmetric(UNIT, **options)
            buffer.close()
            for name in ("ptrs", "multicast_ptr"):
                with pytest.raises(ClosedError, match="SymmetricBuffer"):
                    getattr(buffer, name)


def test_a_garbage_collected_buffer_is_freed_at_the_next_flush(machine: df.emu.Machine) -> None:
    with local(machine, 2) as group:
        before = machine.held()
        group.symmetric(UNIT, multicast=True)
        gc.collect()
        assert machine.held()["multicast"] == 1
        flush(group.driver)
        assert machine.held() == before


def test_a_buffer_outlives_its_group(machine: df.emu.Machine) -> None:
    group = local(machine, 2)
    buffer = group.symmetric(UNIT, multicast=True)
    group.close()
    assert machine.held()["binds"] == 2
    buffer.close()
    assert machine.held()["multicast"] == machine.held()["physical"] == 0


def test_staging_memory_is_made_at_its_first_use_and_freed_with_the_group(machine: df.emu.Machine) -> None:
    with local(machine, 2) as group:
        before = machine.held()
        assert before["multicast"] == 0
        staging = group.multicast_staging()
        assert staging.nbytes >= group.workspace.payload_bytes and staging.multicast_ptr is not None
        held = machine.held()
        assert held["multicast"] == 1
        assert group.multicast_staging() is staging and machine.held() == held
        assert group.multicast_at(staging.ptrs, staging.nbytes) == staging.multicast_ptr
    assert staging.closed and not any(machine.held()[kind] for kind in ("multicast", "binds", "physical"))


def test_staging_memory_that_failed_once_can_be_made_later(machine: df.emu.Machine) -> None:
    with local(machine, 2) as group:
        before = machine.held()
        machine.inject(BIND, 401, device=1)
        with pytest.raises(MulticastError, match="rank 1"):
            group.multicast_staging()
        assert machine.held() == before
        assert group.multicast_staging().multicast_ptr is not None


def test_no_multicast_memory_is_made_during_a_capture(machine: df.emu.Machine) -> None:
    with local(machine, 2) as group:
        before = machine.held()
        foreign = df.Stream(group[1].device)
        with df.Graph.capture([group[1].stream]):
            for call in (lambda: group.symmetric(UNIT, multicast=True), group.multicast_staging):
                with pytest.raises(CaptureError, match="rank 1"):
                    call()
        with df.Graph.capture([foreign]), pytest.raises(CaptureError, match="before the capture"):
            group.multicast_staging([group[0].stream, foreign])
        assert {**machine.held(), "allocations": 0} == {**before, "allocations": 0}
        staging = group.multicast_staging([foreign])
        with df.Graph.capture([foreign]):
            assert group.multicast_staging([foreign]) is staging


def test_groups_without_multicast_support_are_refused(machine: df.emu.Machine) -> None:
    def everything(group: df.Group) -> list[Callable[[], object]]:
        return [
            lambda: group.symmetric(UNIT, multicast=True),
            group.multicast_staging,
            group.require_multicast,
            lambda: df.allreduce(group, [rank.zeros(4, "float32") for rank in group], use_multimem=True),
        ]

    with local(machine, 1) as alone:
        for call in everything(alone):
            with pytest.raises(Unsupported, match="two devices or more"):
                call()
    group = local(machine, 2)
    with pytest.raises(ArgumentError, match="nbytes"):
        group.symmetric(0, multicast=True)
    group.close()
    for call in everything(group)[:3]:
        with pytest.raises(ClosedError):
            call()
    for options, text in (({"arch": "sm_80"}, "have no multicast"), ({"peers": False}, "have no multicast")):
        with df.emu.Machine(devices=2, **options) as other, local(other, 2) as lacking:
            for call in everything(lacking):
                with pytest.raises(Unsupported, match=text):
                    call()
            assert other.held()["multicast"] == 0
    assert not machine.reports
