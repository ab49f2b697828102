# SPDX-License-Identifier: Apache-2.0
"""The engine on mpi4py, for machines without NCCL and for emulated GPUs. It blocks, and copies through host memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import config
from ..errors import ExchangeError, Unsupported
from ..runtime.pinned import PinnedBuffer
from .exchange import Gather, Member, Part, Piece, Pieces

if TYPE_CHECKING:
    from .layout import Nodes

_FLOAT = 4
_MESSAGE_BYTES = 1 << 30
_POLL_SECONDS = 0.0001
_abandoned: list[tuple[Any, PinnedBuffer | None]] = []
"""Requests whose wait was given up. They are kept since MPI may write to their memory as long as the process lives."""


class Mpi:
    """The engine on MPI. It needs one rank of the group in each process, and all ranks in one communicator, in any
    order.

    A call waits for the stream, exchanges by MPI, and copies back, so it blocks the host and cannot be captured. One
    rank computes the sums of `all_reduce` and sends them to the others, since MPI guarantees equal bits in no other
    way.

    `open` makes a communicator when all ranks have called it. If a rank ends while the communicator is made, MPI
    decides how long the other ranks wait.
    """

    name = "MPI"
    watched = False  # no watchdog is needed, as `_wait` bounds every wait

    def __init__(self, communicator: Any = None) -> None:
        """`communicator` is a communicator of mpi4py, by default COMM_WORLD. Raises Unsupported where mpi4py cannot be
        loaded."""
        try:
            from mpi4py import MPI
        except Exception as error:  # also RuntimeError, where no MPI library is found
            raise Unsupported(
                f'exchange="mpi" needs mpi4py and an MPI library, which cannot be loaded ({error}): '
                "install drvfuse[mpi]"
            ) from error
        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD if communicator is None else communicator
        self._rail: Any = None
        self._buffer: PinnedBuffer | None = None

    def open(self, nodes: Nodes, members: Sequence[Member], gather: Gather, timeout: float) -> None:
        if len(members) != 1:
            raise Unsupported(f"the exchange by MPI needs one rank in each process; this process has {len(members)}")
        (member,) = members
        found = [int(value) for value in gather([str(self._world.Get_rank()).encode()])]
        peers = [found[nodes.ranks(node)[member.place]] for node in range(nodes.count)]
        if len({*found}) != len(found):
            problem = f"needs every rank in one communicator; its ranks are {found}: start the processes with mpiexec"
            raise ExchangeError(member.rank, self.name, problem)
        with self._calls(member.rank):
            self._rail = self._world.Create_group(self._world.Get_group().Incl(peers), member.place)

    def check_captures(self, captures: Sequence[int | None]) -> None:
        if captures[0] is not None:
            raise Unsupported("the exchange by MPI goes through the host, so it cannot be captured in a graph")

    def all_gather(self, parts: Sequence[Part]) -> None:
        (part,) = parts
        self._compare_sizes(part)
        numbers = self._numbers(part, self._rail.Get_size())
        own = numbers[part.member.node]
        self._copy(part, own, part.address + _FLOAT * part.count * part.member.node, to_host=True)
        with self._calls(part.member.rank):
            self._wait(part, self._rail.Iallgather(self._mpi.IN_PLACE, [numbers, self._mpi.FLOAT]))
        self._copy(part, numbers, part.address, to_host=False)

    def all_reduce(self, parts: Sequence[Part]) -> None:
        (part,) = parts
        self._compare_sizes(part)
        own, total = self._numbers(part, 2)
        self._copy(part, own, part.address, to_host=True)
        with self._calls(part.member.rank):
            self._wait(part, self._rail.Ireduce([own, self._mpi.FLOAT], [total, self._mpi.FLOAT], self._mpi.SUM, 0))
            self._wait(part, self._rail.Ibcast([total, self._mpi.FLOAT], 0))
        self._copy(part, total, part.address, to_host=False)

    def all_to_all(self, parts: Sequence[Pieces]) -> None:
        (part,) = parts
        nodes = range(self._rail.Get_size())
        sent = [[piece for piece in part.sent if piece.node == node] for node in nodes]
        received = [[piece for piece in part.received if piece.node == node] for node in nodes]
        sizes = np.array([sum(piece.nbytes for piece in of_node) for of_node in (*sent, *received)], np.int64)
        self._compare_pieces(part, sizes[: len(nodes)], sizes[len(nodes) :])
        memory = self._memory(part.member, int(sizes.sum()))
        blocks = np.split(memory, np.cumsum(sizes)[:-1])
        for pieces, block in zip(sent, blocks, strict=False):
            self._copy_pieces(part, pieces, block, to_host=True)
        part.stream.synchronize()
        requests = []
        with self._calls(part.member.rank):
            for node in nodes:
                for message in _messages(blocks[len(nodes) + node]):
                    requests.append(self._rail.Irecv([message, self._mpi.BYTE], node))
            for node in nodes:
                for message in _messages(blocks[node]):
                    requests.append(self._rail.Isend([message, self._mpi.BYTE], node))
            for request in requests:
                self._wait(part, request)
        for pieces, block in zip(received, blocks[len(nodes) :], strict=True):
            self._copy_pieces(part, pieces, block, to_host=False)
        part.stream.synchronize()

    def _compare_pieces(self, part: Pieces, sent: np.ndarray[Any, Any], received: np.ndarray[Any, Any]) -> None:
        """Raise where a peer sends more or less than this rank receives from it: MPI could cut the message, or wait."""
        theirs = np.empty_like(sent)
        kind = self._mpi.INT64_T
        with self._calls(part.member.rank):
            self._wait(part, self._rail.Ialltoall([sent, kind], [theirs, kind]))
        if (theirs != received).any():
            pairs = enumerate(zip(theirs, received, strict=True))
            sizes = "; ".join(f"node {node} sends {nbytes} bytes for {own} expected" for node, (nbytes, own) in pairs)
            raise ExchangeError(part.member.rank, self.name, f"differs in size between nodes: {sizes}")

    def _copy_pieces(self, part: Pieces, pieces: Sequence[Piece], host: np.ndarray[Any, Any], to_host: bool) -> None:
        """Queue the copies between `pieces` and the host memory in which they follow one another without gaps."""
        driver, handle, begin = part.member.device.driver, part.stream.handle, host.ctypes.data
        with part.member.device.use():
            for piece in pieces:
                if to_host:
                    driver.cuMemcpyDtoHAsync(begin, piece.address, piece.nbytes, handle)
                else:
                    driver.cuMemcpyHtoDAsync(piece.address, begin, piece.nbytes, handle)
                begin += piece.nbytes

    @contextmanager
    def _calls(self, rank: int) -> Iterator[None]:
        """A `with` block in which an error of MPI becomes an ExchangeError."""
        try:
            yield
        except self._mpi.Exception as error:
            self._give_up(None)
            raise ExchangeError(rank, self.name, f"failed: {error}") from error

    def _give_up(self, request: Any) -> None:
        """Keep `request` and the buffer alive for ever. Nobody waits for the request any more, but MPI may still write
        to the buffer.
        """
        _abandoned.append((request, self._buffer))
        self._buffer = None

    def _compare_sizes(self, part: Part) -> None:
        """Raise ExchangeError if `part.count` differs between the nodes. MPI need not detect a difference, and may
        leave a part of the larger buffer unwritten."""
        counts = np.full(self._rail.Get_size(), part.count, np.int64)
        with self._calls(part.member.rank):
            self._wait(part, self._rail.Iallgather(self._mpi.IN_PLACE, [counts, self._mpi.INT64_T]))
        if (counts != part.count).any():
            sizes = ", ".join(f"{count} float32 numbers on node {node}" for node, count in enumerate(counts))
            raise ExchangeError(part.member.rank, self.name, f"differs in size between nodes: {sizes}")

    def _numbers(self, part: Part, places: int) -> np.ndarray[Any, Any]:
        """Pinned memory for `part.count` numbers of each of `places` nodes."""
        return self._memory(part.member, _FLOAT * part.count * places).view(np.float32).reshape(places, part.count)

    def _memory(self, member: Member, nbytes: int) -> np.ndarray[Any, Any]:
        """`nbytes` bytes of pinned memory, which the next call of this method uses again."""
        if self._buffer is None or self._buffer.nbytes < nbytes:
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = PinnedBuffer(member.device.driver, max(1, nbytes))
        return self._buffer.view(np.uint8)[:nbytes]

    def _copy(self, part: Part, host: np.ndarray[Any, Any], address: int, to_host: bool) -> None:
        """Copy between host and device; the copy is complete on return."""
        driver, stream = part.member.device.driver, part.stream
        with part.member.device.use():
            if to_host:
                driver.cuMemcpyDtoHAsync(host.ctypes.data, address, host.nbytes, stream.handle)
            else:
                driver.cuMemcpyHtoDAsync(address, host.ctypes.data, host.nbytes, stream.handle)
        stream.synchronize()

    def _wait(self, part: Part | Pieces, request: Any) -> None:
        bound = config.get("spin_timeout")
        deadline = time.monotonic() + bound
        while not request.Test():
            if time.monotonic() > deadline:
                self._give_up(request)
                problem = f"did not end within {bound:g} s; a rank of another node is missing"
                raise ExchangeError(part.member.rank, self.name, problem)
            time.sleep(_POLL_SECONDS)

    def abort(self) -> None:
        """Do nothing, since no call outlasts its time-out."""

    def close(self) -> None:
        """Do nothing: freeing the communicator would be collective, and a rank may have ended."""
        self._rail = None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


def _messages(block: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Split the bytes into messages that are small enough for MPI libraries that count bytes in 32 bits."""
    return [block[begin : begin + _MESSAGE_BYTES] for begin in range(0, block.size, _MESSAGE_BYTES)]
