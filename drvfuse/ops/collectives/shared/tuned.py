# SPDX-License-Identifier: Apache-2.0
"""The constants by which `algo="auto"` chooses: those that `drvfuse tune` has stored for a machine, or built-in ones.

The file of the setting `tuning` holds them as JSON: for each kind of device and number of devices (`key`), the base
time and the bandwidth of each algorithm that was measured. Without the file, or after `drvfuse tune --remove`, the
built-in constants are used.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .... import config, own_files
from ....errors import ArgumentError
from ....plans.tuning import Cost, Costs, costs
from . import plan

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....comm.transport import Member
    from ....runtime.device import Device

Measured = Mapping[str, Cost]
"""Costs by the name of a field of `Costs`. Fields without an entry keep the built-in constants."""


def key(devices: Sequence[Device | Member]) -> str:
    """Return the key under which constants are stored, from the devices of all ranks, such as "2 x NVIDIA H200"."""
    return f"{len(devices)} x {' + '.join(sorted({device.name for device in devices}))}"


def path() -> Path:
    """Return the path of the tuning file: the setting `tuning`, or by default "tuning.json" in `cache_dir`."""
    return Path(config.get("tuning") or Path(config.get("cache_dir")) / "tuning.json")


def stored(file: Path) -> dict[str, Measured]:
    """Return the contents of the file; empty if there is none. Raises ArgumentError if it is not what `drvfuse tune`
    writes, or if another user may have written it. A link is followed, since the user has chosen the path."""
    try:
        text = own_files.read(os.path.realpath(file))
        return {name: _measured(values) for name, values in json.loads(text).items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, own_files.Untrusted) as error:
        expected = "as `drvfuse tune` writes it; delete it, or run `drvfuse tune` with another setting `tuning`"
        raise ArgumentError(f"the tuning file {str(file)!r}", f"unreadable ({error})", expected) from None


def store(file: Path, all_costs: dict[str, Measured]) -> None:
    """Replace the file atomically by one that only this user can write, or remove it if there are no costs. Of a link
    the target is replaced or removed."""
    file = Path(os.path.realpath(file))
    if not all_costs:
        file.unlink(missing_ok=True)
        return
    own_files.make_folder(file.parent)
    partial = file.with_name(f"{file.name}-{uuid.uuid4().hex}")
    try:
        own_files.write(partial, json.dumps(all_costs, indent=1).encode())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _measured(values: dict[str, Any]) -> Measured:
    found = {name: Cost(*map(float, pair)) for name, pair in values.items()}
    if not found or not found.keys() <= set(Costs._fields):
        raise ValueError(f"it has constants of {', '.join(found) or 'nothing'}; allowed are {', '.join(Costs._fields)}")
    if not all(math.isfinite(number) and number > 0 for cost in found.values() for number in cost):
        raise ValueError("a constant is not a finite number above zero")
    return found


class Tuned:
    """The constants by which `algo="auto"` chooses for a group, in the attribute `costs`. The first `group.part(Tuned)`
    reads the tuning file; later ones return the same object."""

    def __init__(self, group: Group) -> None:
        found = stored(path()).get(key(group.transport.members), {})
        self.costs = costs(plan.capability(group))._replace(**found)
