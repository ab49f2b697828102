# SPDX-License-Identifier: Apache-2.0
"""The board of a group: through it ranks agree, and learn whether all ranks are still running.

Every step is collective: all ranks of the board call the same method with the same `what`, which describes the step
("export the workspace") and appears in errors. A step either succeeds on all ranks or raises on all that take part:

    GroupTimeout   a rank did not take part in time; the error names it, and says what every rank waits for
    RankEnded      a rank's process has ended, or has closed its board; raised at once, without a time-out
    GroupMismatch  the ranks are in different steps
    GroupError     a rank voted that it failed

After an error the ranks may take further steps, again together. Steps are slow: each rank sends one message to the
server in rank 0's process, and gets one answer.
"""

from __future__ import annotations

import json
import os
import threading
from types import TracebackType
from typing import Any, Self

from ..errors import (
    ArgumentError,
    ClosedError,
    DrvfuseError,
    GroupError,
    GroupMismatch,
    GroupTimeout,
    RankEnded,
    kind_of,
    require_integer,
    require_kind,
)
from .connection import Connection
from .frames import LARGEST_VALUE
from .waits import MOST_SECONDS

CLOSED = "it has closed the group"


class Board:
    """The board of the ranks 0 to `size` - 1 of a group, seen from one of them, `rank`.

    `members` are their ranks on the first board, from which this board was split. `ended` has an entry for each rank
    that has ended, with how it ended; another thread fills it, so reading it is cheap. `timeout` is the time-out, in
    seconds, of steps that are given none. Threads may share a board; it takes their steps one after another.
    """

    def __init__(self, connection: Connection, number: int, members: tuple[int, ...], timeout: float) -> None:
        self.members, self.timeout = members, timeout
        self.rank, self.size = members.index(connection.rank), len(members)
        self.ended: dict[int, str] = connection.open(number, members)
        self._connection, self._number = connection, number
        self._turn = threading.Lock()
        self._closed = False

    def gather(self, what: str, value: bytes, timeout: float | None = None) -> list[bytes]:
        """The values of all ranks, in rank order, on every rank. A value has at most 1 MiB."""
        require_kind("value", value, bytes, "bytes")
        if len(value) > LARGEST_VALUE:
            raise ArgumentError("value", f"{len(value)} bytes", f"at most {LARGEST_VALUE} bytes")
        answer, data = self._step("gather", what, value, timeout)
        values, begin = [], 0
        for length in answer["lengths"]:
            values.append(data[begin : begin + length])
            begin += length
        return values

    def vote(self, what: str, failure: str | None, timeout: float | None = None) -> None:
        """Succeed on all ranks if `failure` is None on all, else raise GroupError with the failure of the lowest
        rank that has one."""
        text = "" if failure is None else f"!{failure}"[:4096]
        for rank, vote in enumerate(self.gather(what, text.encode(errors="replace"), timeout)):
            if vote:
                raise GroupError(what, rank, vote[1:].decode(errors="replace"))

    def split(self, color: int | None, key: int = 0, timeout: float | None = None) -> Board | None:
        """A board of the ranks that give the same colour, ordered by key, then by rank; None for the colour None.

        The new board uses the connection of this board, and works whether or not this board is closed.
        """
        if color is not None:
            color = require_integer("color", color, "an int of at least 0, or None", 0)
        key = require_integer("key", key, "an int")
        answer, _ = self._step("split", "split the group", json.dumps([color, key]).encode(), timeout)
        if answer["board"] is None:
            return None
        return Board(self._connection, answer["board"], tuple(answer["members"]), self.timeout)

    def _step(self, kind: str, what: str, value: bytes, timeout: float | None) -> tuple[dict[str, Any], bytes]:
        require_kind("what", what, str, "a str, the step in words")
        seconds = self.timeout if timeout is None else seconds_of("timeout", timeout)
        with self._turn:
            if self._closed or self._connection.pid != os.getpid():
                raise ClosedError("the board was closed" if self._closed else "the board belongs to the parent process")
            answer, data = self._connection.ask(self._number, kind, what[:4096], value, seconds)
        if answer["outcome"] not in ("values", "board"):
            raise _error(what, answer)
        return answer, data

    def close(self) -> None:
        """Take no further step. The other ranks see this rank in `ended`. Ranks may close in any order. Idempotent."""
        if not self._closed:
            self._closed = True
            self._connection.leave(self._number, CLOSED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Board(rank {self.rank} of {self.size}{', closed' if self._closed else ''})"


def seconds_of(argument: str, value: Any) -> float:
    """`value` as a number of seconds above 0; else ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST_SECONDS:
        got = repr(value) if isinstance(value, int | float) else kind_of(value)
        raise ArgumentError(argument, got, "a number of seconds, above 0 and below 1e9")
    return float(value)


def _error(what: str, answer: dict[str, Any]) -> DrvfuseError:
    match answer["outcome"]:
        case "timeout":
            return GroupTimeout(what, answer["missing"], dict(answer["waiting"]), answer["seconds"])
        case "ended":
            return RankEnded(what, answer["rank"], answer["how"])
        case "mismatch":
            return GroupMismatch(answer["what"], dict(answer["values"]))
        case other:
            raise AssertionError(other)
