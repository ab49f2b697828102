# SPDX-License-Identifier: Apache-2.0
"""The decisions of a board's server: when a step is complete, and the answer to each rank.

This module has no sockets, threads or clocks.

A rank that takes a step has one request on the board. A step is complete when every member of the board has a request
on it. All requests are answered together: with the values of all members, or, if the requests are for different steps,
with an error that says how they differ. Steps are not numbered: after a rank's request was withdrawn (time-out,
interruption), its next request is matched with those of the other ranks. So ranks that failed in different steps are in
step again as soon as all of them ask for the same step, such as a reset.

Rank 0 is answered last, since its process serves the board and may end after the answer.

The first deadline of a step ends it for all ranks that wait in it, so that they continue from the same place. A member
that has ended or left ends every step of its boards at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NOT_CONNECTED = "it has not connected"


def is_choice(value: bytes) -> bool:
    """Whether the value of a request for a split is [colour, key] as JSON: an int of at least 0 or None, and an int."""
    try:
        colour, key = json.loads(value)
    except (ValueError, TypeError, RecursionError):
        return False
    return type(key) is int and (colour is None or (type(colour) is int and colour >= 0))


@dataclass
class Request:
    """The request of a rank that waits in a step. The rank chooses `number`, and the answer repeats it."""

    number: int
    kind: str
    what: str
    value: bytes
    seconds: float
    deadline: float


@dataclass
class _Board:
    members: tuple[int, ...]
    requests: dict[int, Request] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    last: dict[int, str] = field(default_factory=dict)

    @property
    def waiting(self) -> list[int]:
        """The ranks that have a request on this board, in the order in which they are answered."""
        return sorted(self.requests, reverse=True)


class Meetings:
    """All boards of a server of `size` ranks: board 0 has all ranks, and splits make the others.

    `send(rank, message, data)` is called with every answer. When a rank has ended or left a board, it is also called
    for each other member, with {"ended": [board, place, how]}. `rank` is a rank of board 0; `place` is the number that
    the ended rank has on board `board`.
    """

    def __init__(self, size: int, send: Callable[[int, dict[str, Any], bytes], None]) -> None:
        self._send = send
        self._boards = {0: _Board(tuple(range(size)))}
        self._next_number = 1
        self._seen: dict[int, str] = {}
        self._suspects: dict[int, str] = {}
        self._refused: tuple[str, dict[int, str]] | None = None

    @property
    def complete(self) -> bool:
        """Whether every rank has connected."""
        return all(rank in self._seen for rank in self._boards[0].members)

    def connected(self, rank: int, who: str) -> str | None:
        """Record that a rank has connected; `who` describes its process. If another process has connected as this rank
        before, returns the description of that process, otherwise None.
        """
        before = self._seen.get(rank)
        self._seen.setdefault(rank, who)
        return before

    def suspect(self, rank: int, text: str) -> None:
        """Mention `text` in the error if `rank` does not connect."""
        if rank in self._boards[0].members:
            self._suspects[rank] = text

    def refuse(self, what: str, values: dict[int, str]) -> None:
        """Refuse every request, now and later: the ranks disagree on `what`, and rank r has `values[r]`."""
        self._refused = self._refused or (what, values)
        for board in self._boards.values():
            self._mismatch(board, *self._refused)

    def ask(self, rank: int, number: int, request: Request) -> None:
        """Record the request that `rank` makes for its next step on board `number`. Raises KeyError if the rank is no
        member of that board, or has a request on it already.
        """
        board = self._boards[number]
        if rank not in board.members or rank in board.requests:
            raise KeyError(rank)
        board.requests[rank] = request
        if self._refused:
            self._mismatch(board, *self._refused)
        elif board.gone:
            self._end_requests(board)
        elif len(board.requests) == len(board.members):
            self._meet(board)

    def withdraw(self, rank: int, number: int, request: int) -> None:
        """Record that `rank` no longer waits for the answer to its request number `request`."""
        board = self._boards.get(number)
        if board and rank in board.requests and board.requests[rank].number == request:
            del board.requests[rank]

    def leave(self, rank: int, number: int, how: str) -> None:
        """Record that `rank` takes no further step on board `number`."""
        board = self._boards.get(number)
        if board is None or rank not in board.members or rank in board.gone:
            return
        board.requests.pop(rank, None)
        board.gone[rank] = how
        for member in board.members:
            if member not in board.gone:
                self._send(member, {"ended": [number, board.members.index(rank), how]}, b"")
        self._end_requests(board)
        if number and len(board.gone) == len(board.members):
            del self._boards[number]

    def end(self, rank: int, how: str) -> None:
        """Record that `rank` has left all of its boards."""
        for number in list(self._boards):
            self.leave(rank, number, how)

    def next_deadline(self) -> float | None:
        """The time at which `expire` has to be called next; None if no step has a deadline."""
        return min((r.deadline for board in self._boards.values() for r in board.requests.values()), default=None)

    def expire(self, now: float) -> None:
        """End the steps whose deadline has passed."""
        for board in self._boards.values():
            late = [request for request in board.requests.values() if request.deadline <= now]
            if late:
                missing = [place for place, rank in enumerate(board.members) if rank not in board.requests]
                known = {place: self._state(board, rank) for place, rank in enumerate(board.members)}
                for rank in board.waiting:
                    outcome = {"missing": missing, "waiting": list(known.items()), "seconds": late[0].seconds}
                    self._answer(board, rank, {"outcome": "timeout", **outcome})

    def _state(self, board: _Board, rank: int) -> str:
        if rank in board.requests:
            return board.requests[rank].what
        for other in self._boards.values():
            if rank in other.requests:
                among = f"{len(other.members)} ranks" if len(other.members) < len(self._boards[0].members) else "all"
                return f"it waits in a step of another group, of {among}: {other.requests[rank].what}"
        if rank not in self._seen:
            return ", but ".join(filter(None, (NOT_CONNECTED, self._suspects.get(rank))))
        last = board.last.get(rank)
        return f"it is connected, and in no step since: {last}" if last else "it is connected, and in no step yet"

    def _answer(self, board: _Board, rank: int, answer: dict[str, Any], data: bytes = b"") -> None:
        request = board.requests.pop(rank)
        board.last[rank] = request.what
        self._send(rank, {"answer": request.number, **answer}, data)

    def _mismatch(self, board: _Board, what: str, values: dict[int, str]) -> None:
        for rank in board.waiting:
            self._answer(board, rank, {"outcome": "mismatch", "what": what, "values": list(values.items())})

    def _end_requests(self, board: _Board) -> None:
        for rank in board.waiting:
            first = next(iter(board.gone))
            how = {"rank": board.members.index(first), "how": board.gone[first]}
            self._answer(board, rank, {"outcome": "ended", **how})

    def _meet(self, board: _Board) -> None:
        requests = [board.requests[rank] for rank in board.members]
        if len({(request.kind, request.what) for request in requests}) > 1:
            values = {place: request.what for place, request in enumerate(requests)}
            self._mismatch(board, "the step to take", values)
        elif requests[0].kind == "split":
            self._split(board, [json.loads(request.value) for request in requests])
        else:
            data = b"".join(request.value for request in requests)
            lengths = [len(request.value) for request in requests]
            for rank in board.waiting:
                self._answer(board, rank, {"outcome": "values", "lengths": lengths}, data)

    def _split(self, board: _Board, choices: list[tuple[int | None, int]]) -> None:
        """Make one new board for each colour. Its members are ordered by key, then by their place on `board`."""
        numbers: dict[int, int] = {}
        for wanted in sorted({colour for colour, _ in choices if colour is not None}):
            places = sorted((key, place) for place, (colour, key) in enumerate(choices) if colour == wanted)
            numbers[wanted], self._next_number = self._next_number, self._next_number + 1
            self._boards[numbers[wanted]] = _Board(tuple(board.members[place] for _, place in places))
        colours = {rank: colour for rank, (colour, _) in zip(board.members, choices, strict=True)}
        for rank in board.waiting:
            answer: dict[str, Any] = {"outcome": "board", "board": None}
            colour = colours[rank]
            if colour is not None:
                answer = {**answer, "board": numbers[colour], "members": self._boards[numbers[colour]].members}
            self._answer(board, rank, answer)
