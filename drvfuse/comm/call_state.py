# SPDX-License-Identifier: Apache-2.0
"""The calls that a group has launched since its last reset, and the failure that makes a reset necessary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import DrvfuseError, LaunchError, RankEnded
from ..runtime.lifetime import hold, release
from .history import History, Noted
from .partial import PartialCalls
from .reports import error_of
from .workspace import EXCHANGE

if TYPE_CHECKING:
    from ..nodes.link import NodeLink
    from .alone import AloneLaunches
    from .calls import ComparedCalls
    from .transport import Transport
    from .workspace import Workspace


class CallState:
    """The calls that were launched on the local ranks, and whether a call has failed."""

    def __init__(
        self,
        transport: Transport,
        partial: PartialCalls,
        alone: AloneLaunches,
        workspace: Workspace,
        link: NodeLink | None,
    ) -> None:
        self._transport, self._workspace, self._link = transport, workspace, link
        self._partial, self._alone = partial, alone
        self.history = History(transport.indices)
        self._error: Callable[[], DrvfuseError] | None = None
        self._stale = False
        self._held = False

    def admit(self, calls: ComparedCalls | None) -> bool:
        """Whether the group must be reset before its next call: True if `check` has raised an error before, or a call
        was abandoned.

        If no reset is due, raises the error of `check` if there is a new one, or RankEnded if the process of a rank has
        ended.
        """
        if self._stale or self._error is not None:
            return True
        if self._workspace.reported() or (self._link is not None and self._link.failure is not None):
            self.check(calls)
        elif self._transport.ended:
            rank, how = next(iter(self._transport.ended.items()))  # the rank that ended first
            raise RankEnded("a call of the group", rank, how)
        return False

    def check(self, calls: ComparedCalls | None) -> None:
        """Raise the error that a kernel has reported since the last reset, or the error of an exchange between nodes
        that took too long.

        `calls` has the names of compared calls. Reads host memory only.
        """
        failure = None if self._link is None else self._link.failure
        if self._error is None and self._workspace.reported():
            report, ended = self._workspace.first_report(), self._transport.ended
            # A report that another node gave up is ignored after an aborted exchange, since no node's status arrived.
            if failure is None or report["kind"] != EXCHANGE:
                self._error = error_of(report, self.history, calls, ended, self._workspace.nodes)
        if self._error is not None:
            raise self._error()
        if failure is not None:
            self._stale = True
            raise failure

    def refuse(self, calls: ComparedCalls | None) -> None:
        """Raise the error that says why all processes of the group must reset it: the error of `check` if a call has
        failed, else a LaunchError.
        """
        self.check(calls)
        raise LaunchError(
            "an earlier call of the group could not be launched on this rank, and the other ranks wait for it or have "
            "given up: call group.reset() on all ranks"
        )

    def begin(self, positions: Sequence[int], call: Noted) -> None:
        """Record that `call` is launched next on the local ranks at `positions`. Not for captures.

        Raises LaunchError if another call is launched on other ranks but not yet on one of these ranks, since kernels
        of the two calls would wait for each other. While a call has been launched on some ranks only, no memory is
        freed.
        """
        if self._partial.begin(positions, call):
            self._held = True
            hold(self)
        elif self._held:
            self._held = False
            release(self)
        if call.note.adapts:
            self._alone.launched()
        self.history.launched(positions, call.note)

    def abandon(self) -> None:
        """Require a reset of the group before its next call. Called when a launch on some of the ranks has failed."""
        self._stale = True

    def forget_partial(self) -> None:
        """Drop the calls that were launched on some ranks only: they need not be launched on the other ranks any
        more."""
        self._partial.clear()
        self._held = False
        release(self)

    def clear(self) -> None:
        """Forget all calls and their error. Called when the group was reset."""
        self.history.clear()
        self._error = None
        self._stale = False
