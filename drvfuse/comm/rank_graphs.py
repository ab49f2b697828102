# SPDX-License-Identifier: Apache-2.0
"""One CUDA graph per rank of a group, captured together and launched together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import ArgumentError, counted, shown
from ..runtime.graph import Graph
from ..runtime.lifetime import launch_group

if TYPE_CHECKING:
    from ..runtime.stream import Stream, StreamLike
    from .group import Group


class RankGraphs:
    """A CUDA graph for each local rank of a group: `graphs[i]` belongs to local rank i. Made by `Group.capture`.

    The driver does not order the graphs of different GPUs: the collectives in them wait for one another on the devices.
    (One graph over the streams of all ranks would wait for all GPUs at its begin and at its end.) Buffers are kept
    alive only as `Graph` describes.
    """

    def __init__(self, group: Group, streams: Sequence[Stream], graphs: Sequence[Graph]) -> None:
        self._group, self._streams, self.graphs = group, tuple(streams), tuple(graphs)

    @classmethod
    @contextlib.contextmanager
    def capture(cls, group: Group, streams: Sequence[StreamLike] | None) -> Iterator[RankGraphs]:
        """Capture a graph for each rank, as `Group.capture` describes."""
        chosen = _one_per_rank(group, [rank.stream for rank in group] if streams is None else streams)
        with contextlib.ExitStack() as captures:
            graphs = [captures.enter_context(Graph.capture(stream)) for stream in chosen]
            yield cls(group, chosen, graphs)
        for graph, stream in zip(graphs, chosen, strict=True):
            # Otherwise the first launch would upload it, while kernels of earlier ranks are waiting already.
            graph.upload(stream)

    def launch(self, streams: Sequence[StreamLike] | None = None) -> None:
        """Queue every rank's graph, each on its stream of the capture or of `streams`; does not wait.

        Raises the errors of a call on the group, such as BarrierTimeout, before the first graph is queued.
        """
        chosen = self._streams if streams is None else _one_per_rank(self._group, streams)
        pairs = list(zip(self.graphs, chosen, strict=True))
        for graph, stream in pairs:
            graph.admit(stream)
        try:
            with launch_group():
                for graph, stream in pairs:
                    graph.queue(stream)
        except BaseException:
            self._group.state.abandon()
            raise

    def close(self) -> None:
        """Destroy the graphs. Idempotent."""
        for graph in self.graphs:
            graph.close()


def _one_per_rank(group: Group, streams: Sequence[StreamLike]) -> list[Stream]:
    if not isinstance(streams, (list, tuple)) or len(streams) != len(group):
        got = f"a list of {counted(len(streams), 'stream')}" if isinstance(streams, (list, tuple)) else shown(streams)
        raise ArgumentError("streams", got, f"a list of {counted(len(group), 'stream')}, one per local rank")
    return [rank.wrap(stream, f"streams[{i}]") for i, (rank, stream) in enumerate(zip(group, streams, strict=True))]
