# SPDX-License-Identifier: Apache-2.0
"""The options that every collective has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...call import options
from ...call.options import PDLLevel
from ...call.tracing import CallTrace

if TYPE_CHECKING:
    from ....comm.group import Group


@dataclass(frozen=True)
class CallOptions:
    """The checked options of a call of `op`, and its group, which is open.

    `blocks` is the number of multiprocessors that the grid may fill, and `alone` that number while no other group is
    open on the devices.
    """

    op: str
    group: Group
    algo: str
    pdl: PDLLevel
    blocks: int
    alone: int
    trace: CallTrace | None

    @classmethod
    def of(
        cls, op: str, group: Group, algo: str, allowed: Sequence[str], pdl_level: Any, max_num_blocks: Any, trace: Any
    ) -> CallOptions:
        """Check the options that the caller of `op` gave; the algorithms in `allowed` are the op's.

        Raises ArgumentError, Unsupported for a level of PDL that no op honours, and ClosedError for a closed group.
        """
        options.open_group(group)
        options.one_of("algo", algo, allowed)
        pdl = options.pdl_level(pdl_level)
        blocks = options.block_limit(max_num_blocks, group.max_blocks)
        traced = None if trace is None else CallTrace([rank.device for rank in group], trace, "group")
        # Push launches of a group that is alone may have more blocks, but a trace has room for `blocks` only.
        limited = max_num_blocks is not None or traced is not None
        return cls(op, group, algo, pdl, blocks, blocks if limited else group.max_blocks_alone, traced)
