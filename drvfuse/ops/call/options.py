# SPDX-License-Identifier: Apache-2.0
"""The options that every collective has."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from ...comm.group import Group
from ...errors import ArgumentError, Unsupported, any_of, require_kind, require_real


class PDLLevel(IntEnum):
    """When a collective lets the next kernel in its stream start (programmatic dependent launch).

    With any level but OFF the collective itself is launched so that it may start before the kernel in front of it has
    finished; it reads nothing that kernel may write, the workspace and an epilogue's arrays included, before its
    `griddepcontrol.wait`. The one exception are weights, which are fetched before the wait: gamma and beta of a fused
    norm, w and b of `drvfuse.coat`, and weight, gamma and weight_scales of `gemv_partial_norm`. Between a kernel that
    writes them and the call there must be a launch without PDL, a wait for an event or a synchronisation. The kernel
    behind it, if launched with PDL, may start

    - OFF, ON, OVERLAP_AT_END: once every block has come to its end (the trigger is the last thing a block does). Only
      the dependent's own wait makes results visible;
    - OVERLAP_AT_BEGINNING: at once. It must not write the collective's inputs, outputs or residuals before its own
      wait. It holds multiprocessors while the collective waits for its peers, which no block budget counts, so a
      collective does this only while its group is the only one open on its devices: while there are others this level
      is ON. While a graph holds a collective that triggers at once, no further group can be opened on its devices.

    NO_WAIT_OVERLAP_AT_END would skip the wait; drvfuse's own collectives refuse it.
    """

    OFF = 0
    ON = 1
    OVERLAP_AT_END = 1
    OVERLAP_AT_BEGINNING = 2
    NO_WAIT_OVERLAP_AT_END = 3


def open_group(group: Group) -> None:
    """Raise ArgumentError for a value that is not a group, and ClosedError for a closed group."""
    require_kind("group", group, Group, "a drvfuse.Group")
    group.require_open()


def pdl_level(value: Any) -> PDLLevel:
    """The level, or ArgumentError; Unsupported for the level that no op can honour."""
    try:
        level = value if isinstance(value, PDLLevel) else PDLLevel(value)
    except ValueError:
        accepted = (level for level in PDLLevel if level is not PDLLevel.NO_WAIT_OVERLAP_AT_END)
        raise ArgumentError(
            "pdl_level", repr(value), "one of " + ", ".join(f"PDLLevel.{level.name}" for level in accepted)
        ) from None
    if level is PDLLevel.NO_WAIT_OVERLAP_AT_END:
        raise Unsupported(
            "pdl_level NO_WAIT_OVERLAP_AT_END: without the wait the op would read its operands or its workspace "
            "while the kernel in front still changes them; use OVERLAP_AT_BEGINNING"
        )
    return level


def one_of(argument: str, value: Any, allowed: Sequence[str]) -> str:
    """`value` if it is one of the allowed names, else ArgumentError."""
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(argument, repr(value), any_of(list(map(repr, allowed))))
    return value


def block_limit(value: Any, budget: int) -> int:
    """`max_num_blocks`: None for the group's budget, else an integer from 1 to it."""
    if value is None:
        return budget
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= budget:
        raise ArgumentError("max_num_blocks", repr(value), f"an integer from 1 to {budget}, the group's max_blocks")
    return int(value)


real = require_real  # among the options, for the ops
