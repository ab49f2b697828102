# SPDX-License-Identifier: Apache-2.0
"""Planted faults of the host: in a `with` block another method replaces a method of the library.

All replacements are in this file, and each uses only its arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..comm.group import Group
from ..comm.ordering import RankOrder
from ..comm.partial import PartialCalls
from ..nodes.in_process import InProcess
from ..ops.collectives.moves import moving, over_nodes
from ..runtime.kernel import Kernel
from ..runtime.launch import Configuration, Launch
from ..runtime.stream import Stream

_Method = Callable[..., Any]
_COLLECTIVES = "allreduce"  # the faults below concern kernels whose names begin with it: those of the all-reduces
_FLAG_BYTES = 4096  # bytes at the start of a workspace, enough for the counter and the flags of a few blocks


@dataclass(frozen=True)
class Substitution:
    """Replaces the method `name` of the class `owner` by `by(original)`, in which `original` is that method."""

    owner: Any
    name: str
    by: Callable[[_Method], _Method]

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        original = vars(self.owner)[self.name]
        setattr(self.owner, self.name, self.by(original))
        try:
            yield
        finally:
            setattr(self.owner, self.name, original)


def nothing(original: _Method) -> _Method:
    """Return a method that does nothing."""
    return lambda *args, **kwargs: None


def _on_other_grid(configure: _Method) -> _Method:
    def configured(kernel: Kernel, grid: int, *args: Any, **options: Any) -> Configuration:
        if kernel.info.name.startswith(_COLLECTIVES):
            grid = max(1, grid - options["device"].index % 2)
        found: Configuration = configure(kernel, grid, *args, **options)
        return found

    return configured


def _not_on_first_device(call: _Method) -> _Method:
    def called(launch: Launch, stream: Stream) -> None:
        if launch.device.index != 0 or not launch.kernel.info.name.startswith(_COLLECTIVES):
            call(launch, stream)

    return called


def _with_cleared_flags(admit: _Method) -> _Method:
    def admitted(group: Group, streams: Sequence[Stream]) -> None:
        admit(group, streams)
        for rank, pointer in zip(group, group.workspace.pointers, strict=True):
            for stream in streams:
                if stream.device is rank.device:
                    stream.fill(pointer, 0, _FLAG_BYTES)

    return admitted


def _always(original: _Method) -> _Method:
    return lambda *args, **kwargs: True


def _never(original: _Method) -> _Method:
    return lambda *args, **kwargs: False


OTHER_GRID = Substitution(Kernel, "configure", _on_other_grid)
NO_ORDER = Substitution(RankOrder, "admit", nothing)
NOT_LAUNCHED = Substitution(Launch, "__call__", _not_on_first_device)
CLEARED_FLAGS = Substitution(Group, "admit", _with_cleared_flags)
NO_MEETING = Substitution(InProcess, "_meet", nothing)
ANY_ORDER = Substitution(PartialCalls, "begin", nothing)
NEVER_STAGED = Substitution(moving.MoveCall, "direct", _always)
NO_BARRIER_FIRST = Substitution(over_nodes.NodeMoveCall, "_barrier_first", _never)
