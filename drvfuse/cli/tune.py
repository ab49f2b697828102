# SPDX-License-Identifier: Apache-2.0
"""`drvfuse tune`: measure, store or remove the constants by which `algo="auto"` chooses."""

from __future__ import annotations

import argparse

from ..bench.tune import FULL, LEAST, measure, measured
from ..comm.group import Group
from ..errors import ArgumentError
from ..ops.collectives.shared import tuned
from ..runtime.device import device as open_device
from ..runtime.driver import get_driver
from .terminal import counting


def run_tune(arguments: argparse.Namespace) -> int:
    """Measure the constants of `plans.tuning` on `--gpus` devices and store them. With `--remove`, remove the stored
    constants of these devices. Returns 0."""
    driver = get_driver(arguments.driver)
    present = int(driver.cuDeviceGetCount())
    if not 2 <= arguments.gpus <= present:
        raise ArgumentError("--gpus", arguments.gpus, f"from 2 to {present}, the devices of the {driver.name} driver")
    devices = [open_device(index, driver=driver) for index in range(arguments.gpus)]
    file, name = tuned.path(), tuned.key(devices)
    known = tuned.stored(file)
    if arguments.remove:
        was = known.pop(name, None)
        tuned.store(file, known)
        print(f"{name}: {'removed from' if was else 'nothing stored in'} {file}")
        return 0
    emulated = driver.name == "emu"
    if emulated:
        print("the times of emulated devices have no meaning, so nothing is stored")
    blocks, effort = (4, LEAST) if emulated else (None, FULL)  # None: push launches may fill all multiprocessors
    found = {}
    with (
        counting("constants measured", len(measured(len(devices))), show=True) as done,
        Group.local(devices, driver=driver, max_blocks=blocks) as group,
    ):
        for field, cost in measure(group, effort):
            found[field] = cost
            done()
    for field, cost in found.items():
        print(f"{name}: {field:15} {cost.base_us:8.2f} us + {cost.bytes_per_us / 1e3:8.1f} GB/s")
    if not emulated:
        tuned.store(file, {**known, name: found})
        print(f"stored in {file}; drvfuse tune --remove restores the built-in constants")
    return 0
