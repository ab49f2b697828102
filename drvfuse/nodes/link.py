# SPDX-License-Identifier: Apache-2.0
"""The additional parts of a group over several nodes: its engine, and the bound on the engine's waits."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import config
from ..errors import CaptureError, ExchangeTimeout, Unsupported
from ..runtime.pinned import PinnedBuffer
from ..runtime.vmm import Undo
from ..structures import laid_out, record
from .exchange import Exchange, Gather, Member, Part, Pieces
from .layout import Nodes

if TYPE_CHECKING:
    from ..runtime.graph import Graph
    from ..runtime.stream import Stream


@laid_out("collectives/nodes/progress.cuh")
class Progress(ctypes.Structure):
    """What the kernels before and after exchanges report to the host, one for each local rank."""


_POLLS_PER_TIMEOUT = 16
PROGRESS_DTYPE = record(Progress, ctypes.sizeof(Progress))


class NodeLink:
    """The nodes of a group, the engine by which its ranks exchange partial sums and bytes, and the order in which the
    partial sums are added.

    `timeout` is the argument of `engine.open`. `progress[i]` is the address of local rank i's `Progress`. `failure` is
    the error of an exchange that took too long, until `reset`. `bound` is the value of the setting `spin_timeout` at
    the last exchange. The group owns this object.
    """

    def __init__(
        self, nodes: Nodes, members: Sequence[Member], engine: Exchange, order: str, gather: Gather, timeout: float
    ) -> None:
        """Connects the engine: collective over the group, and bounded by about `timeout` seconds."""
        self.nodes, self.members, self.engine, self.order = nodes, tuple(members), engine, order
        self.places = nodes.count if order == "fixed" else 1
        self.failure: ExchangeTimeout | None = None
        self._gather, self.timeout = gather, timeout
        self._admit = self._admitting()
        self.bound = 0.0
        self._watchdog: _Watchdog | None = None
        self._pinned = PinnedBuffer(members[0].device.driver, PROGRESS_DTYPE.itemsize * len(members))
        with Undo() as undo:
            undo.append(self._pinned.close)
            undo.append(engine.close)
            engine.open(nodes, self.members, gather, timeout)
            undo.commit()
        size = PROGRESS_DTYPE.itemsize
        self.progress = tuple(self._pinned.ptr + size * position for position in range(len(members)))

    @property
    def words(self) -> np.ndarray:
        """The `Progress` of each local rank, as the devices have last written it."""
        return self._pinned.view(PROGRESS_DTYPE)

    def exchange(self, parts: Sequence[Part]) -> None:
        """Let the engine exchange `parts`, on their streams."""
        self._watch()
        (self.engine.all_gather if self.order == "fixed" else self.engine.all_reduce)(parts)

    def _watch(self) -> None:
        """Read the time-out of the exchange that is queued next, and start the watchdog if the engine needs one."""
        self.bound = config.get("spin_timeout")
        if self.engine.watched and self._watchdog is None:
            self._watchdog = _Watchdog(self)

    def require_all_to_all(self, op: str) -> None:
        """Raise Unsupported if the engine lacks the method that moves the bytes of a call of `op`."""
        if not hasattr(self.engine, "all_to_all"):
            raise Unsupported(
                f"{op} over several nodes needs an engine with the method all_to_all "
                f"(drvfuse.nodes.exchange.Exchange), and {self.engine.name} has none: add it, name another engine by "
                "exchange=, or call the op on the groups that group.split(group.node) makes"
            )

    def move(self, parts: Sequence[Pieces]) -> None:
        """Let the engine move the pieces of all local ranks, on their streams. If the engine is watched, the caller
        queues work that adds 1 to `Progress.sending` before the exchange and to `Progress.received` after it.
        """
        self._watch()
        self.engine.all_to_all(parts)

    def captured(self, graph: Graph) -> None:
        """Record that the graph holds an exchange. Such a graph cannot be launched any more after `reset` has connected
        the engine again.
        """
        graph.before_launch(self._admit)

    def _admitting(self) -> Callable[[Stream], None]:
        """Return a new check for `Graph.before_launch`. The check raises CaptureError once `reset` has run again.
        Graphs that are captured before that reset share the check, so that each graph adds it only once.
        """

        def admit(stream: Stream) -> None:
            if self._admit is not admit:
                raise CaptureError(
                    f"the graph holds exchanges between nodes by connections of {self.engine.name} that group.reset() "
                    "has replaced; capture it again"
                )

        return admit

    def give_up(self, position: int, seconds: float) -> None:
        """Abort the engine's work, so that the kernels that wait for it can run, and set `failure`. Called by the
        watchdog.
        """
        member = self.members[position]
        others = [rank for rank, of in enumerate(self.nodes.of) if of != member.node]
        peers = [rank for rank in others if self.nodes.place(rank) == member.place]
        self.failure = ExchangeTimeout(member.rank, member.node, peers, self.engine.name, seconds)
        self.engine.abort()

    def reset(self) -> None:
        """Connect the engine again. Collective over the group; no work of the group may be queued."""
        self.stop()
        self.engine.close()
        self._admit = self._admitting()
        self.words[:] = 0
        self.engine.open(self.nodes, self.members, self._gather, self.timeout)
        self.failure = None

    def close(self) -> None:
        """Close the engine's connections. Idempotent; no work of the group may be queued."""
        self.stop()
        self.engine.close()
        self._pinned.close()

    def stop(self) -> None:
        """Stop the watchdog; the next exchange starts a new one. Afterwards the memory of `progress` may be freed."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None


class _Watchdog:
    """A thread that reads the progress of the local ranks, and calls `give_up` if a rank has been in one exchange for
    longer than the setting `spin_timeout`."""

    def __init__(self, link: NodeLink) -> None:
        self._link, self._ended = link, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="drvfuse exchange watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread of the watchdog, and wait until it has ended."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        words = self._link.words
        # for a local rank with an unfinished exchange: that exchange, and the time when it was first seen
        since: dict[int, tuple[tuple[int, int], float]] = {}
        while not self._ended.wait(self._link.bound / _POLLS_PER_TIMEOUT):
            bound, now = self._link.bound, time.monotonic()
            for position, (begun, ended, sending, received) in enumerate(words.tolist()):
                exchange = begun, sending
                if begun <= ended and sending <= received:
                    since.pop(position, None)
                elif since.setdefault(position, (exchange, now))[0] != exchange:
                    since[position] = (exchange, now)
                elif now - since[position][1] > bound:
                    self._link.give_up(position, bound)
                    return
