# SPDX-License-Identifier: Apache-2.0
"""Checks of the options that many ops have, and the levels of programmatic dependent launch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from ...comm.group import Group
from ...errors import ArgumentError, Unsupported, any_of, require_integer, require_kind, require_real, shown
from ...plans.quantisation import PER_ROW, Quantisation


class PDLLevel(IntEnum):
    """When a collective lets the next kernel in its stream start (programmatic dependent launch).

    With any level but OFF the collective itself is launched so that it may start before the previous kernel on its
    stream has finished. Before its own `griddepcontrol.wait` it reads neither inputs, nor the workspace, nor an
    epilogue's arrays, as the previous kernel may write them. Weights are the one exception, as they are fetched before
    the wait: gamma and beta of a fused norm, w and b of `drvfuse.coat`, and weight, gamma and weight_scales of
    `gemv_partial_norm`. Between a kernel that writes weights and the call there must be a launch without PDL, a wait
    for an event or a synchronisation. The next kernel on the stream, if it is launched with PDL, may start

    - with OFF, ON and OVERLAP_AT_END: once every block of the collective has come to its end (the trigger is the last
      thing that a block does). It sees the results only after its own wait;
    - with OVERLAP_AT_BEGINNING: at once. It must not write the collective's inputs, outputs or residuals before its own
      wait. The next kernel then occupies multiprocessors while the collective waits for its peers, and no group's
      budget counts these multiprocessors. So this level triggers at once only while the group is the only one open on
      its devices; while other groups share them it means ON. While a graph holds a collective that triggers at once, no
      further group can be opened on its devices.

    NO_WAIT_OVERLAP_AT_END would skip the wait. All ops of drvfuse refuse it.
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
    """Return the caller's `pdl_level`. Raises ArgumentError, or Unsupported for NO_WAIT_OVERLAP_AT_END."""
    try:
        level = value if isinstance(value, PDLLevel) else PDLLevel(require_integer("pdl_level", value, ""))
    except (ArgumentError, ValueError):
        accepted = (level for level in PDLLevel if level is not PDLLevel.NO_WAIT_OVERLAP_AT_END)
        raise ArgumentError(
            "pdl_level", shown(value), "one of " + ", ".join(f"PDLLevel.{level.name}" for level in accepted)
        ) from None
    if level is PDLLevel.NO_WAIT_OVERLAP_AT_END:
        raise Unsupported(
            "pdl_level NO_WAIT_OVERLAP_AT_END: without the wait the op would read its operands or its workspace "
            "while the previous kernel still changes them; use OVERLAP_AT_BEGINNING"
        )
    return level


def quantisation(value: Quantisation | None) -> Quantisation:
    """Return the quantisation of a call: `value`, or `PER_ROW` for None."""
    if value is None:
        return PER_ROW
    require_kind("quantisation", value, Quantisation, "a drvfuse.Quantisation or None")
    return value


def one_of(argument: str, value: Any, allowed: Sequence[str]) -> str:
    """Return `value`. Raise ArgumentError if it is not one of the names `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(argument, shown(value), any_of(list(map(repr, allowed))))
    return value


def block_limit(value: Any, budget: int) -> int:
    """Return the caller's `max_num_blocks`: an integer from 1 to `budget`, the group's max_blocks; None means
    `budget`."""
    if value is None:
        return budget
    expected = f"an integer from 1 to {budget}, the group's max_blocks"
    return require_integer("max_num_blocks", value, expected, 1, budget)


real = require_real
