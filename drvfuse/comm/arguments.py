# SPDX-License-Identifier: Apache-2.0
"""Arguments of groups, checked: numbers, devices and the driver that they name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, counted, require_integer, shown
from ..runtime.device import Device
from ..runtime.device import device as open_device
from ..runtime.driver import get_driver
from .workspace import MAX_RANKS

if TYPE_CHECKING:
    from ..runtime.driver import Driver, DriverLike

MIN_WORKSPACE_BYTES = 4096


def integer(argument: str, value: Any, least: int, expected: str = "") -> int:
    """`value` as an int. Raises ArgumentError for a value that is no integer of at least `least`."""
    return require_integer(argument, value, expected or f"an integer, at least {least}", least)


def sizes(workspace_bytes: Any, max_blocks: Any) -> tuple[int, int | None]:
    """`workspace_bytes` and `max_blocks` of a group, checked."""
    nbytes = integer("workspace_bytes", workspace_bytes, MIN_WORKSPACE_BYTES)
    return nbytes, None if max_blocks is None else integer("max_blocks", max_blocks, 1)


def colors(ranks: int, color: Any, key: Any) -> tuple[list[int | None], list[int]]:
    """The colour and the key of each local rank, from the arguments of `Group.split`."""
    found = []
    for name, value in (("color", color), ("key", key)):
        entries = list(value) if isinstance(value, (list, tuple)) else [value]
        if len(entries) == 1 and name == "key" and not isinstance(value, (list, tuple)):
            entries *= ranks
        if len(entries) != ranks:
            got = (
                f"a list of {counted(len(entries), 'entry', 'entries')}"
                if isinstance(value, (list, tuple))
                else shown(value)
            )
            raise ArgumentError(name, got, f"a list of {counted(ranks, 'entry', 'entries')}, one for each local rank")
        found.append(entries)
    chosen = [None if c is None else integer("color", c, 0, "an integer of at least 0, or None") for c in found[0]]
    return chosen, [require_integer("key", k, "an integer") for k in found[1]]


def local_devices(devices: Any, driver: DriverLike) -> list[Device]:
    """The Device objects for the argument `devices` of `Group.local`. Their driver is `driver`; if `driver` is None, it
    is the driver of the Device objects in `devices`."""
    ids = _device_ids(devices)
    chosen = _driver_of(devices, driver)
    present = int(chosen.cuDeviceGetCount())
    for index in ids:
        if not 0 <= index < present:
            raise ArgumentError("devices", list(ids), f"device ids from 0 to {present - 1}: {present} are present")
    return [open_device(index, driver=chosen) for index in ids]


def own_device(device: int | Device | None, local_rank: int | None, driver: DriverLike) -> Device:
    """The device of the one rank of this process.

    If `device` is None, it is the device whose number is the local rank that the launcher has given the process, or the
    only visible device.
    """
    if isinstance(device, Device):
        if driver is not None and get_driver(driver) is not device.driver:
            raise ArgumentError("device", shown(device), f"a device of {get_driver(driver)!r}")
        return device
    chosen = get_driver(driver)
    present = int(chosen.cuDeviceGetCount())
    if device is not None:
        index = integer("device", device, 0, "a device id, a Device or None")
        if index >= present:
            raise ArgumentError("device", index, f"a device id from 0 to {present - 1}: {present} are present")
    elif local_rank is not None and local_rank < present:
        index = local_rank
    elif present == 1:
        index = 0
    else:
        said = "not given" if local_rank is None else f"not given, for local rank {local_rank}"
        raise ArgumentError(
            "device", said, f"given: the launcher names none of the {counted(present, 'device')} present"
        )
    return open_device(index, driver=chosen)


def _driver_of(devices: Any, driver: DriverLike) -> Driver:
    """The driver `driver`; if it is None, the driver of the Device objects in `devices`. These must be of one
    driver."""
    objects = [d for d in devices if isinstance(d, Device)] if isinstance(devices, Sequence) else []
    chosen = objects[0].driver if objects and driver is None else get_driver(driver)
    if any(found.driver is not chosen for found in objects):
        raise ArgumentError("devices", shown(list(devices)), f"devices of one driver, {chosen!r}")
    return chosen


def _device_ids(devices: Any) -> tuple[int, ...]:
    if isinstance(devices, Sequence) and not isinstance(devices, (str, bytes)):
        ids = tuple(d.index if isinstance(d, Device) else integer("devices", d, 0) for d in devices)
    else:
        expected = f"an integer from 1 to {MAX_RANKS}, or a list of device ids"
        ids = tuple(range(require_integer("devices", devices, expected, 1, MAX_RANKS)))
    if not 1 <= len(ids) <= MAX_RANKS:
        raise ArgumentError("devices", shown(devices), f"from 1 to {MAX_RANKS} devices")
    if len(set(ids)) != len(ids):
        raise ArgumentError("devices", list(ids), "distinct device ids, one per rank")
    return ids
