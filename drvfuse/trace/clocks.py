# SPDX-License-Identifier: Apache-2.0
"""The clocks of devices: their resolution and rate, and the offsets between the global timers of several devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DrvfuseError
from ..runtime.kernel import Kernel
from ..runtime.lifetime import launch_group
from ..runtime.module import Module, compile

if TYPE_CHECKING:
    from ..runtime.device import Device

CU = Path(__file__).parents[1] / "cu"
SPAN_NS = 1_000_000
TICK_ROUNDS = 1 << 20
MEETINGS = 64
POLLS = 1 << 20  # polls until a kernel gives up: they take a second or more over NVLink or PCIe


@dataclass(frozen=True)
class Clock:
    """The clocks of one device.

    `resolution_ns` is the step of the device's global timer, which gives the time of a block's entry. `cycles_per_ns`
    is the rate of the SMs' clocks, which give times inside a block. `offset_ns` is this global timer minus the global
    timer of the first rank's device. Its error is at most `error_ns`, which is infinite if the two timers could not be
    compared.
    """

    resolution_ns: float
    cycles_per_ns: float
    offset_ns: float
    error_ns: float


VIRTUAL = Clock(resolution_ns=0.0, cycles_per_ns=1.0, offset_ns=0.0, error_ns=0.0)
"""The clocks of emulated devices, which share one counter, in cycles of one nanosecond."""


def kernels(device: Device) -> Module:
    """The compiled module of cu/trace/trace_clocks.cu, with the kernels `trace_ticks` and `trace_meet`."""
    return compile(CU / "trace" / "trace_clocks.cu", driver=device.driver, arch=device.arch, include=[CU])


def measure(devices: Sequence[Device], readable: bool) -> tuple[Clock, ...]:
    """The clocks of `devices`. If the devices can read each other's memory (`readable`), each clock is compared with
    the clock of the first device.

    Runs small kernels on the devices' own streams, for one device after the other, and waits for them.
    """
    if devices[0].driver.name == "emu":
        return (VIRTUAL,) * len(devices)
    module = kernels(devices[0])
    ticks = [_ticks(module["trace_ticks"], device) for device in devices]
    found = [Clock(*ticks[0], 0.0, 0.0)]
    for device, own in zip(devices[1:], ticks[1:], strict=True):
        apart = _apart(module["trace_meet"], devices[0], device) if readable else None
        offset, error = apart or (0.0, math.inf)
        found.append(Clock(*own, offset, error + (ticks[0][0] + own[0]) / 2))
    return tuple(found)


def _ticks(kernel: Kernel, device: Device) -> tuple[float, float]:
    """(step of the global timer in ns, cycles of the SM's clock per ns)."""
    found = device.zeros(3, "uint64")
    launch = kernel.prepare(1, 1, found, SPAN_NS, TICK_ROUNDS)
    for _ in range(2):  # the first run lets an idle device reach its usual clock
        launch(device.stream)
    step, cycles, took = (float(value) for value in found.numpy())
    if not took:
        raise DrvfuseError(f"the global timer of {device!r} does not run")
    return step, cycles / took


def _apart(kernel: Kernel, first: Device, second: Device) -> tuple[float, float] | None:
    """(the global timer of `second` minus that of `first`, largest error), both in ns. None if the kernels on the two
    devices did not run at the same time."""
    flags = [device.zeros(1, "uint64") for device in (first, second)]
    times = [first.zeros((MEETINGS, 2), "uint64"), second.zeros(MEETINGS, "uint64")]
    launches = [
        kernel.prepare(1, 1, flags[i], flags[1 - i].ptr, times[i], MEETINGS, int(i == 0), POLLS) for i in range(2)
    ]
    for device in (first, second):
        device.stream.synchronize()
    with launch_group():
        for launch, device in zip(launches, (first, second), strict=True):
            launch(device.stream)
    called, answered = (array.numpy().astype(np.int64) for array in times)
    if not called.all() or not answered.all():
        return None
    return bounds(called[:, 0], called[:, 1], answered)


def bounds(sent: np.ndarray, heard: np.ndarray, answered: np.ndarray) -> tuple[float, float]:
    """(first timer minus second timer, largest error of this offset). In each round the first timer was read
    (`answered`) between two readings (`sent` and `heard`) of the second timer.

    Every round gives a lower and an upper bound of the offset, and the narrowest bounds are used. Half of the sum of
    the two timers' steps is added to the error, since a reading may be up to one step early.
    """
    low, high = int((answered - heard).max()), int((answered - sent).min())
    return (low + high) / 2, abs(high - low) / 2
