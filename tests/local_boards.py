# SPDX-License-Identifier: Apache-2.0
"""Boards for ranks that are threads of one process: the server and connections of real boards, over socket pairs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from drvfuse.bootstrap.board import Board
from drvfuse.bootstrap.connection import Connection, greet
from drvfuse.bootstrap.server import Server


class LocalBoards:
    """The boards of all ranks: `boards[rank]` is for the thread of that rank. The end of a `with` block closes all.

    A rank is missing if its thread does not call its board. `end(rank)` has the effect of the death of the rank's
    process.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self._server = Server("local", size)
        self._connections: list[Connection] = []
        self._boards: list[Board] = []
        for rank in range(size):
            own, served = socket.socketpair()
            self._server.adopt(served)
            frames = greet(own, "local", rank, size, b"", timeout)
            self._connections.append(Connection(own, frames, rank))
            self._boards.append(Board(self._connections[rank], 0, tuple(range(size)), timeout))

    def __getitem__(self, rank: int) -> Board:
        return self._boards[rank]

    def __len__(self) -> int:
        return len(self._boards)

    def __iter__(self) -> Iterator[Board]:
        return iter(self._boards)

    def end(self, rank: int) -> None:
        """Close the connection of a rank without a message, as the kernel does for a killed process."""
        self._connections[rank].sever()

    def close(self) -> None:
        """Close all boards, and the boards that were split from them."""
        for connection in self._connections:
            connection.leave_all("it has closed the group")
        self._server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
