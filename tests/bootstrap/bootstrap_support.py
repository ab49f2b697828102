# SPDX-License-Identifier: Apache-2.0
"""Threads that take the part of processes: each is a rank and uses the board of that rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from drvfuse.bootstrap.board import Board


def each(boards: Sequence[Board], call: Callable[[Board], Any]) -> list[Any]:
    """Run `call(board)` on a thread for each board. Return for each board, in order, the result of the call or the
    exception that it raised."""

    def caught(board: Board) -> Any:
        try:
            return call(board)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(boards)) as pool:
        return list(pool.map(caught, boards))
