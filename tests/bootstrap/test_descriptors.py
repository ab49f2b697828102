# SPDX-License-Identifier: Apache-2.0
"""File descriptors that ranks send to one another: which rank receives which, and that a failure leaves none open."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bootstrap_support import each
from local_boards import LocalBoards

from drvfuse.bootstrap import descriptors, handshake
from drvfuse.bootstrap.descriptors import share
from drvfuse.errors import ArgumentError, GroupError, GroupMismatch, GroupTimeout, RankEnded


@pytest.fixture
def boards() -> Iterator[LocalBoards]:
    with LocalBoards(3, timeout=20) as three:
        yield three


@pytest.fixture
def files(boards) -> Iterator[list[list[int]]]:
    """`files[rank]`: four descriptors of memory that contains "rank/number". Fails if other descriptors are open at the
    end."""
    before = opened()
    made = [[os.memfd_create("test") for _ in range(4)] for _ in range(3)]
    for rank, its in enumerate(made):
        for number, descriptor in enumerate(its):
            os.write(descriptor, f"{rank}/{number}".encode())
    yield made
    for its in made:
        for descriptor in its:
            os.close(descriptor)
    assert opened() <= before  # fewer if the test has closed its board


def opened() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def contents(received: dict[int, list[int]]) -> dict[int, list[str]]:
    """The texts in the memory of the received descriptors, which are then closed."""
    texts = {rank: [os.pread(one, 100, 0).decode() for one in its] for rank, its in received.items()}
    for its in received.values():
        for descriptor in its:
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
    return texts


def test_every_rank_gets_the_descriptors_of_all_others_in_rank_order(boards, files):
    received = each(boards, lambda board: share(board, files[board.rank]))
    assert [contents(its) for its in received] == [
        {other: [f"{other}/{number}" for number in range(4)] for other in range(3) if other != rank}
        for rank in range(3)
    ]


def test_each_rank_may_be_sent_different_descriptors(boards, files):
    given = [{1: files[0][:1], 2: files[0][1:]}, {0: files[1]}, {}]
    received = each(boards, lambda board: share(board, given[board.rank]))
    assert [contents(its) for its in received] == [
        {1: ["1/0", "1/1", "1/2", "1/3"], 2: []},
        {0: ["0/0"], 2: []},
        {0: ["0/1", "0/2", "0/3"], 1: []},
    ]


def test_one_descriptor_may_be_sent_repeatedly_up_to_the_limit(boards, files):
    received = each(boards, lambda board: share(board, files[board.rank][:1] * 253))
    for rank, its in enumerate(received):
        assert contents(its) == {other: [f"{other}/0"] * 253 for other in range(3) if other != rank}


def test_a_single_rank_exchanges_nothing():
    with LocalBoards(1) as (board,):
        assert share(board, [0]) == {}


def test_a_wrong_argument_of_one_rank_raises_on_all_before_anything_is_sent(boards, files, refused):
    for wrong, text in (
        ([100_000], "100000, which is not an open descriptor"),
        ("0", "a str"),
        ({1: [0]}, "for rank 1"),
        ({0: 1}, "an int"),
    ):
        errors = each(boards, lambda board: share(board, wrong if board.rank == 1 else files[board.rank]))  # noqa: B023
        assert type(errors[1]) is ArgumentError and text in str(errors[1])
        for error in (errors[0], errors[2]):
            assert type(error) is GroupError and error.rank == 1 and text in error.failure
    errors = each(boards, lambda board: share(board, {(board.rank + 1) % 3: files[0][:1] * 254}))
    assert [type(error) for error in errors] == [ArgumentError] * 3 and "at most 253" in str(errors[0])


def test_ranks_on_different_hosts_are_refused_before_anything_is_sent(boards, files, monkeypatch):
    hosts = iter(["a boot, net:[1]", "a boot, net:[1]", "another boot, net:[1]"])
    lock = threading.Lock()

    def identity() -> str:
        with lock:
            return next(hosts)

    monkeypatch.setattr(descriptors, "host_identity", identity)
    monkeypatch.setattr(descriptors, "_send", None)
    for error in each(boards, lambda board: share(board, files[board.rank])):
        assert type(error) is GroupMismatch and set(error.values.values()) == {
            "a boot, net:[1]",
            "another boot, net:[1]",
        }


@pytest.mark.parametrize("step", ["_send", "_receive"])
def test_a_failure_of_one_rank_closes_the_descriptors_of_the_others(boards, files, monkeypatch, step):
    real = getattr(descriptors, step)

    def failing(*arguments):
        rank = arguments[2] if step == "_send" else arguments[2].rank
        if rank == 2:
            raise OSError(24, "Too many open files")
        return real(*arguments)

    monkeypatch.setattr(descriptors, step, failing)
    for error in each(boards, lambda board: share(board, files[board.rank])):
        assert type(error) is GroupError and error.rank == 2 and "Too many open files" in error.failure
    monkeypatch.undo()
    assert len(each(boards, lambda board: contents(share(board, files[board.rank])))) == 3


def test_all_ranks_name_the_rank_that_can_open_no_socket(boards, files, monkeypatch):
    def failing():
        if threading.current_thread() is failed:
            raise OSError(24, "Too many open files")
        return real()

    def one(board):
        nonlocal failed
        if board.rank == 1:
            failed = threading.current_thread()
        return share(board, files[board.rank], timeout=5)

    real, failed = descriptors._listener, None
    monkeypatch.setattr(descriptors, "_listener", failing)
    for error in each(boards, one):
        assert type(error) is GroupError and error.rank == 1 and "Too many open files" in error.failure


def test_a_missing_or_ended_rank_leaves_no_descriptor_open(boards, files):
    errors = each([boards[0], boards[2]], lambda board: share(board, files[board.rank], timeout=0.1))
    assert [(type(error), error.missing) for error in errors] == [(GroupTimeout, (1,))] * 2
    boards[1].close()
    errors = each([boards[0], boards[2]], lambda board: share(board, files[board.rank]))
    assert [(type(error), error.rank) for error in errors] == [(RankEnded, 1)] * 2


def test_connections_of_other_programs_are_ignored(boards, files, monkeypatch):
    """A process that knows the socket's name but not the token can connect; the descriptors that it sends are
    closed.
    """
    send = descriptors._send

    def with_a_stranger(address, token, rank, given):
        send(address, bytes(16), rank, files[0]).close()
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent.connect(address)
        silent.close()
        return send(address, token, rank, given)

    monkeypatch.setattr(descriptors, "_send", with_a_stranger)
    received = each(boards, lambda board: contents(share(board, files[board.rank])))
    assert received[0] == {rank: [f"{rank}/{number}" for number in range(4)] for rank in (1, 2)}


def test_a_socket_of_another_user_is_refused(boards, files, monkeypatch):
    monkeypatch.setattr(handshake, "same_user", lambda connected: False)
    for error in each(boards, lambda board: share(board, files[board.rank])):
        assert type(error) is GroupError and error.rank == 0 and "another user" in error.failure


RANK = textwrap.dedent("""
    import os
    from drvfuse.bootstrap.descriptors import share
    from drvfuse.bootstrap.place import find_place
    from drvfuse.bootstrap.rendezvous import connect
    with connect(find_place(), 20) as board:
        memory = os.memfd_create("mine")
        os.write(memory, b"of rank %d" % board.rank)
        received = share(board, [memory])
        os.close(memory)
        print({rank: [os.pread(one, 100, 0).decode() for one in its] for rank, its in sorted(received.items())})
""")


def test_memory_received_by_a_process_outlives_the_descriptor_of_its_owner():
    root = Path(__file__).resolve().parent.parent.parent
    common = {**os.environ, "PYTHONPATH": str(root), "WORLD_SIZE": "3", "MASTER_PORT": f"{os.getpid()}/descriptors"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], env={**common, "RANK": str(rank)}, stdout=-1, text=True)
        for rank in range(3)
    ]
    printed = [process.communicate(timeout=30)[0].strip() for process in ranks]
    assert printed == [str({o: [f"of rank {o}"] for o in range(3) if o != rank}) for rank in range(3)]
