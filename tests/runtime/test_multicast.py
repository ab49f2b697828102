# SPDX-License-Identifier: Apache-2.0
"""`Multicast`, call by call, on the emulated driver: what it refuses, and that it leaves nothing allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from multicast_forms import BIND

import drvfuse as df
from drvfuse.errors import CaptureError, ClosedError, DriverError, MulticastError, Unsupported
from drvfuse.runtime.driver import Driver, get_driver
from drvfuse.runtime.lifetime import flush
from drvfuse.runtime.multicast import _properties
from drvfuse.runtime.vmm import AddressRange, MappedMemory, Mapping, PhysicalMemory, allocation_properties

pytestmark = pytest.mark.emulated

UNIT = 2 << 20
Refused = Callable[..., None]


@pytest.fixture
def machine() -> Iterator[df.emu.Machine]:
    with df.emu.Machine(devices=3) as machine:
        yield machine


@pytest.fixture
def devices(machine: df.emu.Machine) -> list[df.Device]:
    return [df.device(index, driver=machine) for index in (2, 0, 1)]


def complete(devices: list[df.Device], nbytes: int = 2 * UNIT) -> df.Multicast:
    multicast = df.Multicast(devices, nbytes)
    for device in devices:
        multicast.add(device)
    return multicast


def calls(count: int) -> list[str]:
    """Names of the last driver calls."""
    return [call.split("(")[0] for call in df.last_calls(count)]


def test_a_multicast_object_is_made_used_and_released_in_the_order_the_driver_requires(
    machine: df.emu.Machine, devices: list[df.Device]
) -> None:
    before = machine.held()
    memories = [PhysicalMemory(device, 2 * UNIT) for device in devices]
    with complete(devices) as multicast:
        for device, memory in zip(devices, memories, strict=True):
            multicast.bind_memory(device, memory)
        ptr = multicast.map()
        for device in devices:
            multicast.set_access(ptr, device)
        assert calls(12) == [
            "cuMulticastCreate", *["cuMulticastAddDevice"] * 3, *[BIND] * 3,
            "cuMemAddressReserve", "cuMemMap", *["cuMemSetAccess"] * 3,
        ]  # fmt: skip
        assert ptr % UNIT == 0 and "3 ranges bound" in repr(multicast)
        held = machine.held()
        assert (held["multicast"], held["binds"], held["mappings"]) == (1, 3, 1)
    assert calls(6) == ["cuMemUnmap", "cuMemAddressFree", *["cuMulticastUnbind"] * 3, "cuMemRelease"]
    assert "closed" in repr(multicast)
    multicast.close()
    for memory in memories:
        memory.close()
    assert machine.held() == before and not machine.reports


def test_parts_of_memory_are_bound_at_offsets_and_unbound_as_they_were_bound(
    machine: df.emu.Machine, devices: list[df.Device], refused: Refused
) -> None:
    before = machine.held()
    memory = MappedMemory(devices[1], 3 * UNIT, devices)
    multicast = complete(devices)
    multicast.bind_memory(devices[1], memory.memory, offset=UNIT, memory_offset=2 * UNIT)
    multicast.bind_address(devices[1], memory.ptr, UNIT)
    assert machine.held()["binds"] == 2
    for wrong in ((devices[1], 0, 2 * UNIT), (devices[0], 0, UNIT), (devices[1], 2 * UNIT, UNIT)):
        refused(lambda wrong=wrong: multicast.unbind(*wrong), "offset, nbytes", "a range as it was bound")
    multicast.unbind(devices[1], UNIT, UNIT)
    assert machine.held()["binds"] == 1
    refused(lambda: multicast.unbind(devices[1], UNIT, UNIT), "offset, nbytes")
    multicast.bind_memory(devices[1], memory.memory, offset=UNIT, nbytes=UNIT)
    multicast.close()
    memory.close()
    assert machine.held() == before and not machine.reports


def test_an_address_of_another_devices_memory_is_refused(
    machine: df.emu.Machine, devices: list[df.Device], refused: Refused
) -> None:
    """The older bind function takes no device. It would bind the memory, and the unbind would name the wrong device."""
    memory, multicast = MappedMemory(devices[0], UNIT, devices), complete(devices)
    refused(lambda: multicast.bind_address(devices[1], memory.ptr, UNIT), "ptr", f"memory of {devices[1]!r}")
    refused(lambda: multicast.bind_address(devices[1], 1 << 40, UNIT), "ptr", f"memory of {devices[1]!r}")
    assert machine.held()["binds"] == 0 and not machine.reports
    multicast.close()
    memory.close()


def test_mappings_can_be_added_and_removed(machine: df.emu.Machine, devices: list[df.Device], refused: Refused) -> None:
    multicast = complete(devices)
    first, second = multicast.map(), multicast.map()
    multicast.unmap(first)
    refused(lambda: multicast.unmap(first), "ptr", "map() has returned")
    refused(lambda: multicast.set_access(first, devices[0]), "ptr")
    multicast.set_access(second, devices[0])
    assert machine.held()["mappings"] == 1
    multicast.close()
    assert machine.held()["mappings"] == machine.held()["reservations"] == 0


def test_the_granularity_is_that_of_the_driver(devices: list[df.Device]) -> None:
    assert df.Multicast.granularity(devices) == UNIT
    assert df.Multicast.granularity(devices, recommended=True) > UNIT


def test_wrong_sizes_and_offsets_are_refused_before_a_driver_call(
    machine: df.emu.Machine, devices: list[df.Device], refused: Refused
) -> None:
    for nbytes in (0, -UNIT, UNIT + 4096, 1.5 * UNIT, True, None):
        refused(lambda nbytes=nbytes: df.Multicast(devices, nbytes), "nbytes", f"a multiple of {UNIT}")
    memory, multicast = PhysicalMemory(devices[0], 2 * UNIT), complete(devices)

    def bind(**options: Any) -> None:
        multicast.bind_memory(devices[0], memory, **options)

    held = machine.held()
    refused(lambda: bind(offset=4096, nbytes=UNIT), "offset", f"from 0 to {UNIT}")
    refused(lambda: bind(offset=UNIT), "offset", "from 0 to 0")
    refused(lambda: bind(offset="0"), "offset", "'0'")
    refused(lambda: bind(offset=-UNIT), "offset")
    refused(lambda: bind(nbytes=4096), "nbytes")
    refused(lambda: bind(nbytes=0), "nbytes")
    refused(lambda: bind(memory_offset=4096), "memory_offset")
    refused(lambda: bind(memory_offset=2 * UNIT), "memory_offset")
    refused(lambda: bind(memory_offset=UNIT, nbytes=2 * UNIT), "nbytes", f"from 0 to {UNIT}")
    refused(lambda: bind(nbytes=1.0), "nbytes")
    refused(lambda: bind(memory_offset=-UNIT, nbytes=UNIT), "memory_offset")
    refused(lambda: multicast.bind_address(devices[0], UNIT + 4096, UNIT), "ptr")
    refused(lambda: multicast.bind_address(devices[0], 0, UNIT), "ptr")
    refused(lambda: multicast.bind_memory(devices[1], memory), "memory", "memory of <Device 0")
    refused(lambda: multicast.bind_memory(devices[0], 5), "memory", "an int")  # type: ignore[arg-type]
    assert machine.held() == held and not machine.reports
    bind(nbytes=UNIT)
    refused(lambda: bind(), "offset", "does not overlap")


def test_lists_of_devices_that_cannot_form_a_team_are_refused(
    machine: df.emu.Machine, devices: list[df.Device], refused: Refused
) -> None:
    refused(lambda: df.Multicast([], UNIT), "devices", "two devices or more")
    refused(lambda: df.Multicast([devices[0], devices[1], devices[0]], UNIT), "devices", "[2, 0, 2]")
    refused(lambda: df.Multicast([0, 1], UNIT), "devices", "an int")  # type: ignore[list-item]
    refused(lambda: df.Multicast(2, UNIT), "devices", "an int")  # type: ignore[arg-type]
    refused(lambda: df.Multicast.granularity(None), "devices", "None")  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="two devices or more"):
        df.Multicast(devices[:1], UNIT)
    with df.emu.Machine(devices=2) as other:
        refused(lambda: df.Multicast([devices[0], df.device(1, driver=other)], UNIT), "devices", "several drivers")
    with df.emu.Machine(devices=2, arch="sm_80") as old:
        pair = [df.device(index, driver=old) for index in range(2)]
        for call in (lambda: df.Multicast(pair, UNIT), lambda: df.Multicast.granularity(pair)):
            with pytest.raises(Unsupported, match=r"devices \[0, 1\] have no multicast"):
                call()
    with df.Multicast(devices[:2], UNIT) as multicast:
        refused(lambda: multicast.add(devices[2]), "device", "devices [2, 0]")
        multicast.add(devices[0])
        refused(lambda: multicast.add(devices[0]), "device", "not added before")
        multicast.add(devices[1])
        ptr = multicast.map()
        refused(lambda: multicast.set_access(ptr, devices[2]), "device", "devices [2, 0]")
        foreign = PhysicalMemory(devices[2], UNIT)
        refused(lambda: multicast.bind_memory(devices[2], foreign), "device", "devices [2, 0]")
    foreign.close()
    assert machine.held()["multicast"] == machine.held()["binds"] == 0


def test_binding_and_mapping_are_refused_before_all_devices_are_added(
    machine: df.emu.Machine, devices: list[df.Device], refused: Refused
) -> None:
    memory = MappedMemory(devices[0], UNIT, devices)
    with df.Multicast(devices, UNIT) as multicast:
        for device in devices[:2]:
            multicast.add(device)
        for call in (
            lambda: multicast.bind_memory(devices[0], memory.memory),
            lambda: multicast.bind_address(devices[0], memory.ptr, UNIT),
            multicast.map,
        ):
            refused(call, "the set of added devices", "without [1]")
        assert machine.held()["binds"] == 0 and not machine.reports
    memory.close()


@pytest.mark.parametrize("exportable", [False, True])
def test_a_multicast_object_is_exportable_where_memory_is(
    devices: list[df.Device], monkeypatch: pytest.MonkeyPatch, exportable: bool
) -> None:
    """Emulated devices export no memory. A driver binds to an exportable object only memory that is exportable too."""
    monkeypatch.setattr(df.Device, "attribute", lambda self, name: exportable)
    of_memory = [int(allocation_properties(device).requestedHandleTypes) for device in devices]
    assert of_memory == [int(exportable)] * len(devices)
    assert int(_properties(devices, UNIT).handleTypes) == int(exportable)


def test_a_closed_object_or_memory_is_refused(devices: list[df.Device]) -> None:
    memory = PhysicalMemory(devices[0], UNIT)
    with complete(devices, UNIT) as multicast:
        memory.close()
        with pytest.raises(ClosedError, match="PhysicalMemory"):
            multicast.bind_memory(devices[0], memory)
    for call in (
        lambda: multicast.add(devices[0]),
        lambda: multicast.bind_address(devices[0], UNIT, UNIT),
        lambda: multicast.unbind(devices[0], 0, UNIT),
        multicast.map,
        lambda: multicast.unmap(UNIT),
    ):
        with pytest.raises(ClosedError, match="Multicast was closed"):
            call()


def test_nothing_is_created_during_a_capture(machine: df.emu.Machine, devices: list[df.Device]) -> None:
    with df.Graph.capture([devices[1].stream]), pytest.raises(CaptureError, match="multicast cannot be set up"):
        df.Multicast(devices, UNIT)
    assert machine.held()["multicast"] == 0


def test_a_garbage_collected_object_is_released_at_the_next_flush(
    machine: df.emu.Machine, devices: list[df.Device]
) -> None:
    memory, multicast = PhysicalMemory(devices[0], UNIT), complete(devices, UNIT)
    multicast.bind_memory(devices[0], memory)
    multicast.map()
    del multicast
    gc.collect()
    assert machine.held()["binds"] == 1  # a finalizer makes no driver call
    flush(get_driver(machine))
    memory.close()
    assert not any(machine.held().values())


def test_bound_memory_lives_as_long_as_its_bind(machine: df.emu.Machine, devices: list[df.Device]) -> None:
    multicast = complete(devices, UNIT)
    multicast.bind_memory(devices[0], PhysicalMemory(devices[0], UNIT))
    gc.collect()
    flush(get_driver(machine))
    assert machine.held()["physical"] == 1
    multicast.close()
    del multicast
    gc.collect()
    flush(get_driver(machine))
    assert not any(machine.held().values())


def forms(api: Driver, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> list[tuple[str, tuple[Any, ...]]]:
    """Leave the driver object only these of the four bind functions. Return a record of their calls."""
    made: list[tuple[str, tuple[Any, ...]]] = []

    def missing(*args: Any) -> None:
        raise Unsupported("the installed driver has no such function")

    for kind in ("Mem", "Addr"):
        for name in (f"cuMulticastBind{kind}", f"cuMulticastBind{kind}_v2"):
            call = (lambda *args, name=name: made.append((name, args))) if name in names else missing
            monkeypatch.setitem(api.__dict__, name, call)
    return made


@pytest.mark.parametrize("newest", [False, True], ids=["12.9", "13"])
def test_both_versions_of_the_bindings_bind(
    machine: df.emu.Machine, devices: list[df.Device], monkeypatch: pytest.MonkeyPatch, newest: bool
) -> None:
    """The bind functions with the suffix _v2, which take a device, are called if they exist. Older drivers have only
    those without a device."""
    memory, multicast = PhysicalMemory(devices[0], 2 * UNIT), complete(devices)
    mapped = MappedMemory(devices[0], UNIT, devices)
    plain = ["cuMulticastBindMem", "cuMulticastBindAddr"]
    suffix, device = ("_v2", (devices[0].handle,)) if newest else ("", ())
    made = forms(get_driver(machine), monkeypatch, [*plain, *(f"{name}_v2" for name in plain if newest)])
    multicast.bind_memory(devices[0], memory, offset=UNIT, memory_offset=UNIT)
    multicast.bind_address(devices[0], mapped.ptr, UNIT)
    handle = multicast.handle
    assert made == [
        (plain[0] + suffix, (handle, *device, UNIT, memory.handle, UNIT, UNIT, 0)),
        (plain[1] + suffix, (handle, *device, 0, mapped.ptr, UNIT, 0)),
    ]
    multicast._made.bound.clear()  # nothing to unbind, as the stand-ins have bound no memory


@pytest.mark.parametrize(
    "function,code,text",
    [
        ("cuMulticastCreate", 800, "container lacks the device nodes"),
        ("cuMulticastAddDevice", 401, "nvidia-fabricmanager"),
        (BIND, 802, "did not form the team in time"),
        (BIND, 1, "granularity, or the fabric's multicast state is corrupt"),
        ("cuMemMap", 401, "nvidia-fabricmanager"),
        ("cuMemSetAccess", 401, "the device is not in the team"),
        ("cuMulticastGetGranularity", 801, "has no multicast"),
    ],
)
def test_an_error_explains_its_code_for_multicast(
    machine: df.emu.Machine, devices: list[df.Device], function: str, code: int, text: str
) -> None:
    memory = PhysicalMemory(devices[0], UNIT)
    before = machine.held()
    machine.inject(function, code)

    def use() -> None:
        with df.Multicast(devices, UNIT) as multicast:
            for device in devices:
                multicast.add(device)
            multicast.bind_memory(devices[0], memory)
            multicast.set_access(multicast.map(), devices[0])

    with pytest.raises(MulticastError, match=text) as caught:
        use()
    error = caught.value
    assert isinstance(error, DriverError) and (error.call, error.code, error.rank) == (function, code, None)
    assert "The driver: " in error.explanation
    assert machine.held() == before
    use()
    assert machine.held() == before


def test_a_mapping_that_failed_to_unmap_is_released_with_the_object(
    machine: df.emu.Machine, devices: list[df.Device]
) -> None:
    before = machine.held()
    multicast = complete(devices)
    ptr = multicast.map()
    machine.inject("cuMemUnmap", 1)
    with pytest.raises(MulticastError, match="cuMemUnmap"):
        multicast.unmap(ptr)
    multicast.close()
    assert machine.held() == before


def test_a_teardown_continues_after_a_failing_call(machine: df.emu.Machine, devices: list[df.Device]) -> None:
    memory, multicast = PhysicalMemory(devices[0], UNIT), complete(devices, UNIT)
    multicast.bind_memory(devices[0], memory)
    multicast.map()
    machine.inject("cuMulticastUnbind", 1)
    with pytest.raises(DriverError, match="cuMulticastUnbind"):
        multicast.close()
    assert calls(4) == ["cuMemUnmap", "cuMemAddressFree", "cuMulticastUnbind", "cuMemRelease"]
    assert multicast.closed and machine.held()["mappings"] == 0


def test_plain_mappings_of_bound_memory_belong_to_the_caller(machine: df.emu.Machine, devices: list[df.Device]) -> None:
    """Memory may have an address before it is bound and may keep it after the object is closed."""
    memory, addresses = PhysicalMemory(devices[0], UNIT), AddressRange(get_driver(machine), UNIT)
    with Mapping(addresses, memory, devices) as mapping:
        with complete(devices, UNIT) as multicast:
            multicast.bind_address(devices[0], mapping.ptr, UNIT)
        devices[0].stream.fill(mapping.ptr, 7, UNIT)
        assert (df.view(mapping.ptr, (64,), "uint8", devices[0]).numpy() == 7).all()
    addresses.close()
    memory.close()
    assert not machine.reports
