# SPDX-License-Identifier: Apache-2.0
"""Multicast objects: their teams, their binds, and their lifetime.

The driver's documentation gives the order (all devices are added before memory is bound or mapped) and the sizes
(multiples of the granularity). For cases that it leaves open, the rules here are:

- A device supports multicast if its compute capability is 9.0 or above, and if it and all other devices of its machine
  reach each other, as devices on one switch do.
- A bind that overlaps another bind of the same device is refused. An unbind is refused unless its range is exactly
  that of a bind.
- A bind keeps its memory alive, as a mapping does. It lasts until no process has a mapping of the object or a
  reference to the object.
"""

from __future__ import annotations

import time

from ...bindings import R
from ...findings.reports import Report
from ...space.members import PIECE, Members
from ...space.pages import WindowError
from ..machine import Machine
from ..objects import Bind, Device, Handle, Memory, Multicast
from ..process import interrupts
from ..process.failure import Failure
from ..process.patience import GRACE_S, MOMENT_S, others, outside
from ..process.process import Process
from .allocation import Allocation


def supported(machine: Machine, device: Device) -> bool:
    """True if a device can be in the team of a multicast object: the compute capability is at least 9.0, and the device
    and every other device of the machine can access each other.
    """
    others = (other for other in machine.devices if other is not device)
    reached = all(machine.can_reach(device, o) and machine.can_reach(o, device) for o in others)
    return machine.capability >= (9, 0) and reached


def refused(message: str, device: Device | None = None, code: object = R.CUDA_ERROR_INVALID_VALUE) -> Failure:
    """The failure of a call that breaks a rule of multicast objects, with a report that names the rule."""
    return Failure(code, Report("multicast", message, device=None if device is None else device.index))


def create(proc: Process, nbytes: int, size: int, handle_types: int) -> Handle:
    return proc.open_handle(Multicast(nbytes, handle_types, size, Members(nbytes)))


def add_device(proc: Process, item: Multicast, device: Device) -> None:
    """Add a device to the team of a multicast object. Calls that wait for the team continue if it is complete."""
    if not supported(proc.machine, device):
        raise refused("cuMulticastAddDevice: this device has no multicast", device, R.CUDA_ERROR_NOT_SUPPORTED)
    if device in item.devices:
        raise refused("cuMulticastAddDevice: the device is in the team already", device)
    if item.complete:
        raise refused(f"cuMulticastAddDevice: the team of {item.size} devices is complete", device)
    item.devices.append(device)
    item.members.devices.append(device.index)
    proc.machine.lock.changed()


def await_team(proc: Process, handle: Handle, item: Multicast, call: str) -> None:
    """Wait until all devices were added to the object of a handle. Raises Failure, with a report, if no thread is left
    that could add a device.

    Other threads may call the driver during the wait, so the caller has to check its arguments again after it.
    """
    since, count = time.monotonic(), len(item.devices)
    with proc.blocking(lambda: item.complete or not handle.references or proc.closed):
        while not item.complete:
            interrupts.check()
            now = time.monotonic()
            if count != len(item.devices) or outside(proc.machine):
                since, count = now, len(item.devices)
            elif proc.machine.lock.choose(
                "give up", not others(proc) or now >= since + max(GRACE_S, proc.machine.host_wait)
            ):
                there = ", ".join(str(device.index) for device in item.devices) or "none"
                text = f"{call} waits until the team of {item.size} devices is complete (added: {there})"
                raise Failure(R.CUDA_ERROR_TIMEOUT, Report("deadlock", f"{text}, and no thread adds a device"))
            with proc.threads.waiting():
                proc.machine.lock.wait(MOMENT_S)
            if proc.closed:
                raise Failure(R.CUDA_ERROR_DEINITIALIZED)
            if not handle.references:
                raise refused(f"{call}: the multicast object was released while the call waited for its team")


def bind(proc: Process, item: Multicast, offset: int, source: Memory | Allocation, at: int, nbytes: int) -> None:
    """Bind part of a physical allocation, or of a pool's allocation, to part of the object. The caller has checked the
    ranges.
    """
    device = source.device
    if device not in item.devices:
        text = "a bind of memory of a device that is not in the team"
        raise refused(text, device, R.CUDA_ERROR_INVALID_DEVICE)
    assert device is not None
    for other in item.binds:
        if other.device is device and offset < other.offset + other.nbytes and other.offset < offset + nbytes:
            text = f"a bind of {_range(offset, nbytes)} overlaps that of {_range(other.offset, other.nbytes)}"
            raise refused(text, device)
    memory = source if isinstance(source, Memory) else None
    if isinstance(source, Memory):
        try:
            address = proc.machine.window.mappings.alias(nbytes, source.physical, at)
        except WindowError as error:
            why = f"{error}: set DRVFUSE_EMU_WINDOW_GIB to a larger number"
            raise proc.memory.full(device, nbytes, why) from None
        proc.machine.mappables.hold(source)
    else:
        address = source.base + at
    item.binds.append(Bind(device, offset, nbytes, address, memory))
    item.members.bind(device.index, offset, nbytes, address)


def unbind(proc: Process, item: Multicast, device: Device, offset: int, nbytes: int) -> None:
    """Undo one bind of a device. The range must be exactly that of the bind."""
    if device not in item.devices:
        raise refused("cuMulticastUnbind: the device is not in the team", device, R.CUDA_ERROR_INVALID_DEVICE)
    ours = [b for b in item.binds if b.device is device]
    found = next((b for b in ours if (b.offset, b.nbytes) == (offset, nbytes)), None)
    if found is None:
        bound = ", ".join(_range(b.offset, b.nbytes) for b in ours) or "nothing"
        text = f"cuMulticastUnbind of {_range(offset, nbytes)}: it needs a range as it was bound ({bound})"
        raise refused(text, device)
    proc.machine.mappables.unbind(item, found)


def aligned(*values: int) -> bool:
    """True if all values are multiples of the granularity."""
    return all(value >= 0 and value % PIECE == 0 for value in values)


def _range(offset: int, nbytes: int) -> str:
    return f"[0x{offset:x}, 0x{offset + nbytes:x})"
