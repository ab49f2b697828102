# SPDX-License-Identifier: Apache-2.0
"""Steps that the ranks of a board take together: values, votes, splits, and every way in which they fail."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from bootstrap_support import each
from local_boards import LocalBoards

from drvfuse.bootstrap.board import Board
from drvfuse.bootstrap.connection import Connection
from drvfuse.bootstrap.meetings import Meetings, Request
from drvfuse.errors import ClosedError, GroupError, GroupMismatch, GroupTimeout, RankEnded


@pytest.fixture
def boards() -> Iterator[LocalBoards]:
    with LocalBoards(4, timeout=20) as four:
        yield four


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_gather_gives_every_rank_the_values_of_all_in_rank_order(boards, rng):
    values = [rng.bytes(int(n)) for n in rng.integers(0, 300_000, 4)]
    for _ in range(3):
        assert each(boards, lambda board: board.gather("sizes", values[board.rank])) == [values] * 4


def test_a_board_of_one_rank_completes_its_steps_alone():
    with LocalBoards(1) as (board,):
        assert board.gather("alone", b"x") == [b"x"]
        board.vote("alone", None)
        assert board.split(0, 0).size == 1


def test_a_vote_raises_the_failure_of_the_lowest_rank_everywhere(boards):
    assert each(boards, lambda board: board.vote("bind memory", None)) == [None] * 4
    failures = {1: "out of memory", 3: "something else"}
    for error in each(boards, lambda board: board.vote("bind memory", failures.get(board.rank))):
        assert type(error) is GroupError
        assert (error.rank, error.what, error.failure) == (1, "bind memory", "out of memory")
        assert str(error) == "bind memory failed on rank 1: out of memory"
    for error in each(boards, lambda board: board.vote("bind memory", "" if board.rank == 2 else None)):
        assert error.rank == 2  # an exception without a message is a failure too


def test_ranks_in_different_steps_all_raise_and_the_next_step_succeeds(boards):
    steps = ["export", "export", "reset", "export"]
    for error in each(boards, lambda board: board.gather(steps[board.rank], b"")):
        assert type(error) is GroupMismatch
        assert error.values == {0: "export", 1: "export", 2: "reset", 3: "export"}
        assert "ranks 0, 1 and 3: export; rank 2: reset" in str(error)
    assert each(boards, lambda board: board.gather("reset", b"r")) == [[b"r"] * 4] * 4


def test_a_time_out_names_the_missing_rank_and_what_each_rank_waits_for(boards):
    each(boards, lambda board: board.gather("join", b""))
    start = time.monotonic()
    errors = each([boards[0], boards[3]], lambda board: board.gather("export the workspace", b"", timeout=0.2))
    assert 0.2 <= time.monotonic() - start < 2
    for error in errors:
        assert type(error) is GroupTimeout
        assert error.missing == (1, 2) and error.seconds == 0.2 and error.what == "export the workspace"
        assert error.waiting[0] == error.waiting[3] == "export the workspace"
        assert error.waiting[1] == "it is connected, and in no step since: join"
        assert str(error).startswith(
            "export the workspace failed: ranks 1 and 2 did not take part within 0.2 s (rank 1: it is"
        )


def test_after_a_time_out_on_some_ranks_the_next_step_succeeds_on_all(boards):
    errors = each([boards[0], boards[3]], lambda board: board.gather("export", b"", timeout=0.05))
    assert [type(error) for error in errors] == [GroupTimeout] * 2
    assert each(boards, lambda board: board.gather("reset", bytes([board.rank]))) == [[b"\0", b"\1", b"\2", b"\3"]] * 4


def test_the_first_deadline_ends_the_step_for_all_waiting_ranks(boards):
    errors = each([boards[0], boards[1]], lambda board: board.gather("x", b"", timeout=0.1 if board.rank else 20))
    assert [(type(error), error.seconds, error.missing) for error in errors] == [(GroupTimeout, 0.1, (2, 3))] * 2


@pytest.mark.parametrize("ended", [0, 2])
def test_the_exit_of_a_rank_ends_every_step_at_once(boards, ended):
    others = [board for board in boards if board.rank != ended]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(each, others, lambda board: board.gather("export", b""))
        time.sleep(0.05)
        boards.end(ended)
        errors = waiting.result(timeout=5)
    for error in errors + each(others, lambda board: board.vote("reset", None)):
        assert type(error) is RankEnded and error.rank == ended and "its process has ended" in error.how
    for board in others:
        until(lambda board=board: ended in board.ended)
        assert board.ended == {ended: "its process has ended"}


def test_other_ranks_notice_a_closed_board_without_a_step(boards):
    assert [board.ended for board in boards] == [{}] * 4
    boards[1].close()
    boards[1].close()
    for board in (boards[0], boards[2], boards[3]):
        until(lambda board=board: board.ended)
        assert board.ended == {1: "it has closed the group"}
    with pytest.raises(RankEnded, match="^export is impossible without rank 1: it has closed the group[.] The ranks"):
        boards[3].gather("export", b"")
    with pytest.raises(ClosedError):
        boards[1].gather("export", b"")
    assert "closed" in repr(boards[1])


def test_split_groups_ranks_by_colour_and_orders_them_by_key(boards):
    parts = each(boards, lambda board: board.split(board.rank % 2, -board.rank))
    assert [(part.rank, part.size, part.members) for part in parts] == [
        (1, 2, (2, 0)),
        (1, 2, (3, 1)),
        (0, 2, (2, 0)),
        (0, 2, (3, 1)),
    ]
    sums = each(parts, lambda part: part.gather("members", str(part.members[part.rank]).encode()))
    assert sums == [[b"2", b"0"], [b"3", b"1"], [b"2", b"0"], [b"3", b"1"]]
    assert each(boards, lambda board: board.gather("all", b"")) == [[b""] * 4] * 4


def test_a_rank_without_a_colour_gets_no_board(boards):
    parts = each(boards, lambda board: board.split(None if board.rank == 1 else 7))
    assert parts[1] is None and [part.members for part in parts if part] == [(0, 2, 3)] * 3


def test_nested_splits_work_and_outlive_their_parent_board(boards):
    halves = each(boards, lambda board: board.split(board.rank // 2))
    singles = each(halves, lambda half: half.split(half.rank))
    assert [single.members for single in singles] == [(0,), (1,), (2,), (3,)]
    for board in boards:
        board.close()
    assert (
        each(halves, lambda half: half.gather("x", bytes([half.members[half.rank]])))
        == [[b"\0", b"\1"]] * 2 + [[b"\2", b"\3"]] * 2
    )
    assert not any(half.ended for half in halves)


def test_a_time_out_says_which_ranks_wait_on_another_board(boards):
    halves = each(boards, lambda board: board.split(board.rank // 2))
    with ThreadPoolExecutor(1) as pool:
        inside = pool.submit(each, [halves[3]], lambda half: half.gather("inner", b"", timeout=2))
        time.sleep(0.1)
        (error,) = each([boards[0]], lambda board: board.gather("outer", b"", timeout=0.1))
        assert error.waiting[3] == "it waits in a step of another group, of 2 ranks: inner"
        (error,) = inside.result()
        assert error.missing == (0,) and error.waiting[1] == "inner"


def test_the_exit_of_a_process_is_reported_on_splits_by_their_own_ranks(boards):
    halves = each(boards, lambda board: board.split(board.rank // 2))
    boards.end(3)
    with pytest.raises(RankEnded) as caught:
        halves[2].gather("x", b"")
    assert caught.value.rank == 1 and halves[2].ended == {1: "its process has ended"}
    assert each(halves[:2], lambda half: half.gather("x", b"y")) == [[b"y", b"y"]] * 2
    assert not halves[0].ended and 3 in boards[0].ended


def test_an_interrupted_step_is_withdrawn(boards, monkeypatch):
    connection = boards[0]._connection
    wait = connection._news.wait

    def interrupted(seconds: float) -> bool:
        wait(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(connection._news, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        boards[0].gather("first", b"old")
    monkeypatch.undo()
    assert each(boards, lambda board: board.gather("second", b"new")) == [[b"new"] * 4] * 4


def test_steps_of_threads_that_share_a_board_run_one_after_another(boards):
    def both(board: Board) -> list[list[bytes]]:
        with ThreadPoolExecutor(2) as pool:
            steps = [pool.submit(board.gather, "same", b"v") for _ in range(2)]
            return [step.result() for step in steps]

    assert each(boards, both) == [[[b"v"] * 4] * 2] * 4


def test_bad_arguments_are_refused_before_anything_is_sent(boards, refused):
    refused(lambda: boards[0].gather("x", "text"), "value", "a str")
    refused(lambda: boards[0].gather("x", bytes((1 << 20) + 1)), "value", "1048577 bytes")
    refused(lambda: boards[0].gather(3, b""), "what", "an int")
    refused(lambda: boards[0].gather("x", b"", timeout=0), "timeout", "0")
    refused(lambda: boards[0].gather("x", b"", timeout="soon"), "timeout", "a str")
    refused(lambda: boards[0].split(-1), "color", "-1")
    refused(lambda: boards[0].split("red"), "color")
    refused(lambda: boards[0].split(0, key="a"), "key")
    assert each(boards, lambda board: board.gather("x", b"")) == [[b""] * 4] * 4


def test_closing_all_boards_ends_their_threads():
    before = set(threading.enumerate())
    with LocalBoards(3) as boards:
        each(boards, lambda board: board.split(0))
    until(lambda: not set(threading.enumerate()) - before)


@pytest.mark.parametrize("outcome", ["values", "mismatch", "timeout", "ended", "board"])
def test_rank_0_gets_its_answer_after_all_other_ranks(outcome):
    answered: list[tuple[int, str]] = []

    def send(rank: int, message: dict, data: bytes) -> None:
        if "answer" in message:
            answered.append((rank, message["outcome"]))

    meetings = Meetings(4, send)
    kind = "split" if outcome == "board" else "gather"
    for rank in range(3 if outcome in ("timeout", "ended") else 4):
        what = f"step {rank}" if outcome == "mismatch" else "step"
        meetings.ask(rank, 0, Request(1, kind, what, b"[0, 0]", 1.0, 1.0))
    if outcome == "timeout":
        meetings.expire(2.0)
    elif outcome == "ended":
        meetings.end(3, "its process has ended")
    assert answered == [(rank, outcome) for rank in sorted((rank for rank, _ in answered), reverse=True)]
    assert len(answered) >= 3


def test_a_forked_child_closes_its_board_even_if_another_thread_held_a_lock(boards):
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with boards[0]._connection._news:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Python versions warn about a fork in a process with threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        boards[0].close()
        os._exit(0)
    release.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert each(boards, lambda board: board.gather("x", b"y")) == [[b"y"] * 4] * 4


def test_time_outs_longer_than_a_system_call_takes_are_waited_for(boards):
    """`epoll_wait` takes at most 2^31 milliseconds."""
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(boards[0].gather, "x", b"", 3e6)
        longest = pool.submit(each, [boards[1], boards[2]], lambda board: board.gather("x", b"", 999_999_999.0))
        until(lambda: len(boards._server._meetings._boards[0].requests) == 3)
        assert not waiting.done()
        boards[3].gather("x", b"")
        assert waiting.result(5) == [b""] * 4 and longest.result(5) == [[b""] * 4] * 2


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0, 0, 1e300, 10**400, "soon", None, [1]])
def test_a_rank_that_sends_no_number_of_seconds_is_dropped_and_the_others_learn_it(boards, seconds):
    boards[2]._connection._send({"do": "gather", "board": 0, "number": 1, "what": "x", "seconds": seconds})
    for error in each([boards[0], boards[1]], lambda board: board.gather("x", b"")):
        assert type(error) is RankEnded and error.rank == 2
        assert "it sent bytes that are no message of a board" in str(error)


@pytest.mark.parametrize(
    "choice", [b"", b"[]", b"[0]", b'["red", 0]', b"[-1, 0]", b"[true, 0]", b"[0, 1.5]", b"[" * 9999]
)
def test_a_rank_that_sends_no_choice_of_a_split_is_dropped_and_the_others_learn_it(boards, choice):
    request = {"do": "split", "board": 0, "number": 1, "what": "split the group", "seconds": 5}
    boards[2]._connection._send(request, choice)
    for error in each([boards[0], boards[1]], lambda board: board.split(0)):
        assert type(error) is RankEnded and error.rank == 2


def test_a_failure_of_the_serving_thread_ends_all_waits_with_it(boards, monkeypatch):
    def fail(self, now):
        if len(self._boards[0].requests) == 3:
            raise RuntimeError("planted")

    monkeypatch.setattr(Meetings, "expire", fail)
    begin = time.monotonic()
    for error in each([boards[0], boards[1], boards[3]], lambda board: board.gather("x", b"")):
        assert type(error) is GroupError
        assert str(error) == "x failed: the thread that serves the board failed with RuntimeError: planted"
    assert time.monotonic() - begin < 5
    with pytest.raises(GroupError, match="planted"):
        boards[2].gather("x", b"")


def test_a_failure_of_a_reading_thread_ends_the_waits_of_its_rank_with_it(boards, monkeypatch):
    take = Connection._take

    def fail(self, message, data):
        if self.rank == 1:
            raise RuntimeError("planted")
        take(self, message, data)

    monkeypatch.setattr(Connection, "_take", fail)
    errors = each(boards, lambda board: board.gather("x", b""))
    assert type(errors[1]) is GroupError and "the thread that reads from the board failed" in str(errors[1])
    assert "RuntimeError: planted" in str(errors[1])
    for rank in (0, 2, 3):
        with pytest.raises(RankEnded):
            boards[rank].gather("y", b"", 5)
