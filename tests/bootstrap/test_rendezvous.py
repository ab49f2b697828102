# SPDX-License-Identifier: Apache-2.0
"""How ranks connect to the board: on one host by the name of the job, between hosts by TCP and a secret; and the
errors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from drvfuse.bootstrap import handshake, rendezvous
from drvfuse.bootstrap.address import Address
from drvfuse.bootstrap.frames import pack
from drvfuse.bootstrap.place import find_place
from drvfuse.bootstrap.rendezvous import connect, join, meet
from drvfuse.errors import ArgumentError, GroupError, GroupMismatch, GroupTimeout

ADVICE = "The ranks that are left can connect as a new group"


@pytest.fixture
def job(request, monkeypatch):
    """`job(rank, size)`: the `Place` of a rank in a job that belongs to this test."""
    monkeypatch.delenv("DRVFUSE_SECRET", raising=False)
    port = f"{os.getpid()}/{request.node.nodeid}"
    return lambda rank, size=3, **more: find_place(rank, size, environment={"MASTER_PORT": port, **more})


def at_once(*calls):
    """Run each call on a thread of its own. Return for each call its result, or the exception that it raised."""

    def caught(call):
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(caught, calls))


def close(boards):
    for board in boards:
        board.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_ranks_of_a_job_find_each_other_in_any_order(job):
    def late(rank):
        time.sleep(0.1 * (rank == 0))
        return connect(job(rank), timeout=10)

    boards = at_once(*(lambda rank=rank: late(rank) for rank in range(3)))
    assert [(board.rank, board.size) for board in boards] == [(0, 3), (1, 3), (2, 3)]
    assert (
        at_once(*(lambda board=board: board.gather("x", bytes([board.rank])) for board in boards))
        == [[b"\0", b"\1", b"\2"]] * 3
    )
    close(boards)


def test_groups_connected_one_after_another_stay_apart(job):
    first = at_once(*(lambda rank=rank: connect(job(rank), 10) for rank in range(3)))
    second = at_once(*(lambda rank=rank: connect(job(rank), 10) for rank in range(3)))
    for number, boards in enumerate((first, second)):
        values = at_once(*(lambda board=board: board.gather("which", bytes([number])) for board in boards))  # noqa: B023
        assert values == [[bytes([number])] * 3] * 3
    close(first)
    assert at_once(*(lambda board=board: board.gather("still", b"") for board in second)) == [[b""] * 3] * 3
    close(second)


def test_simultaneous_jobs_stay_apart(job):
    places = [job(rank, RESTART="0") for rank in range(3)]
    others = [replace(place, job=(("MASTER_PORT", place.job[0][1] + "!"),)) for place in places]
    boards = at_once(*(lambda place=place: connect(place, 10) for place in places + others))
    assert at_once(*(lambda board=board: board.gather("x", b"a") for board in boards[:3])) == [[b"a"] * 3] * 3
    close(boards)


def test_all_other_ranks_name_a_rank_that_never_connects(job):
    start = time.monotonic()
    errors = at_once(*(lambda rank=rank: connect(job(rank), timeout=0.3) for rank in (0, 2)))
    assert time.monotonic() - start < 3
    for error in errors:
        assert type(error) is GroupTimeout and error.missing == (1,)
        assert error.waiting == {0: "join the group", 1: "it has not connected", 2: "join the group"}


def test_each_rank_names_a_missing_rank_0(job):
    for error in at_once(*(lambda rank=rank: connect(job(rank), timeout=0.2) for rank in (1, 2))):
        assert type(error) is GroupTimeout and error.missing == (0,)
        assert "nobody listens on this host" in str(error) and "DRVFUSE_SECRET" in str(error)


def test_ranks_may_connect_again_after_a_time_out(job):
    errors = at_once(*(lambda rank=rank: connect(job(rank), timeout=0.2) for rank in (0, 2)))
    assert [type(error) for error in errors] == [GroupTimeout] * 2
    boards = at_once(*(lambda rank=rank: connect(job(rank), timeout=10) for rank in range(3)))
    assert [board.rank for board in boards] == [0, 1, 2]
    close(boards)


@pytest.mark.parametrize("complete", [False, True])
def test_two_processes_with_the_same_rank_are_refused(job, complete):
    ranks = (0, 1, 2) if complete else (0, 1)
    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(connect, job(rank), 3) for rank in ranks]
        if complete:
            boards = [future.result() for future in first]
            rendezvous._joined[(job(1).job, 3), 1] = 0  # as if the second process were still at its first group
        else:
            time.sleep(0.2)
        with pytest.raises(GroupMismatch, match=f"process {os.getpid()} and process {os.getpid()} both connected as"):
            connect(job(1), timeout=5)
        if complete:
            values = at_once(*(lambda board=board: board.gather("unharmed", b"") for board in boards))
            assert values == [[b""] * 3] * 3
            close(boards)
        else:
            assert [type(future.exception(5)) for future in first] == [GroupMismatch] * 2


def test_two_processes_with_rank_0_are_refused(job):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(connect, job(0), 1)
        time.sleep(0.1)
        with pytest.raises(GroupMismatch, match="both act as rank 0 of one job"):
            connect(job(0), timeout=5)
        assert type(first.exception(5)) is GroupTimeout


def test_different_world_sizes_are_refused_on_all_ranks(job):
    secret = Address("size-test", b"", f"drvfuse-test-{os.getpid()}")
    places = [job(0), job(1), job(2, 4)]
    errors = at_once(*(lambda p=p: join(p, secret, time.monotonic() + 5, 5) for p in places))
    for error in errors[::2]:
        assert type(error) is GroupMismatch and error.what == "the number of ranks" and error.values == {0: "3", 2: "4"}
    assert isinstance(errors[1], GroupError)  # names the difference, or says that rank 0 has exited


def test_ranks_with_the_secret_connect_by_tcp(job):
    port = free_port()
    addresses = [
        Address("tcp", b"0123456789abcdef", f"drvfuse-{os.getpid()}-{r}", (("127.0.0.1", port),)) for r in range(3)
    ]
    calls = [lambda r=r: join(job(r), addresses[r], time.monotonic() + 10, 10) for r in range(3)]
    boards = at_once(*calls)
    assert (
        at_once(*(lambda board=board: board.gather("x", bytes(100_000)) for board in boards))
        == [[bytes(100_000)] * 3] * 3
    )
    with pytest.raises(ConnectionRefusedError):  # the port is free again
        socket.create_connection(("127.0.0.1", port), 1)
    boards[1].close()
    while not boards[2].ended:
        time.sleep(0.001)
    assert boards[2].ended == {1: "it has closed the group"}
    close(boards)


def test_a_wrong_secret_is_an_error_on_both_sides(job):
    address = Address("secret", b"0123456789abcdef", f"drvfuse-{os.getpid()}-s", (("127.0.0.1", free_port()),))
    wrong = replace(address, secret=b"fedcba9876543210", unix="elsewhere")
    first, second = at_once(
        lambda: join(job(0, 2), address, time.monotonic() + 0.5, 0.5),
        lambda: join(job(1, 2), wrong, time.monotonic() + 5, 5),
    )
    assert type(second) is GroupMismatch and second.what == "DRVFUSE_SECRET"
    assert type(first) is GroupTimeout and first.missing == (1,)
    assert first.waiting[1] == "it has not connected, but someone at 127.0.0.1 tried to with a wrong secret"
    for error in (first, second):
        assert "0123456789abcdef" not in str(error) and "fedcba9876543210" not in str(error)


def test_a_server_that_does_not_know_the_secret_is_refused(job):
    """A program without the secret listens at the port of rank 0 and accepts every rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = Address("g", b"0123456789abcdef", "nowhere", (("127.0.0.1", listener.getsockname()[1]),))
        future = pool.submit(join, job(1, 2), address, time.monotonic() + 5, 5)
        connected, _ = listener.accept()
        with connected:
            connected.sendall(pack({"nonce": handshake.nonce()}))
            sent = connected.recv(4096)
            assert b"0123456789abcdef" not in sent
            connected.sendall(pack({"proof": "0" * 64}))
            error = future.exception(5)
    assert type(error) is GroupMismatch and error.what == "DRVFUSE_SECRET"


def test_unknown_connections_and_garbage_do_not_disturb_a_rendezvous(job):
    address = Address("garbage", b"", f"drvfuse-garbage-{os.getpid()}", (("127.0.0.1", free_port()),))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, job(0, 2), address, time.monotonic() + 10, 10)
        while True:
            try:
                strangers = [socket.create_connection(address.tcp[0], 1) for _ in range(6)]
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].sendall(b"\xff" * 100)
        strangers[2].sendall(pack({"rank": []}))
        strangers[3].sendall(
            pack({"rank": 0, "size": 2, "nonce": "x", "version": 1, "group": "garbage", "pid": 1, "proof": "x"})
        )
        strangers[4].sendall(pack({"rank": float("inf"), "size": 2, "nonce": "x"}))
        second = pool.submit(join, job(1, 2), address, time.monotonic() + 10, 10)
        boards = [first.result(), second.result()]
        for stranger in strangers[:5]:
            stranger.settimeout(5)
            with pytest.raises((BrokenPipeError, ConnectionResetError, StopIteration)):
                while stranger.recv(4096):
                    pass
                raise StopIteration
        for stranger in strangers:
            stranger.close()
    assert at_once(*(lambda board=board: board.gather("x", b"") for board in boards)) == [[b"", b""]] * 2
    close(boards)


def test_silent_connections_do_not_keep_a_rank_away(job):
    """There are more of them than the server keeps, and they come before the rank."""
    address = Address("silent", b"", f"drvfuse-silent-{os.getpid()}", (("127.0.0.1", free_port()),))
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as silent:
        first = pool.submit(join, job(0, 2), address, time.monotonic() + 10, 10)
        while not first.done():
            with contextlib.suppress(ConnectionRefusedError):
                silent.enter_context(socket.create_connection(address.tcp[0], 1))
                break
            time.sleep(0.01)
        for _ in range(80):
            silent.enter_context(socket.create_connection(address.tcp[0], 1))
        begin = time.monotonic()
        second = join(job(1, 2), replace(address, unix="nowhere"), time.monotonic() + 8, 8)
        assert time.monotonic() - begin < 5
        close([first.result(), second])


def test_a_process_of_another_user_is_refused_by_both_ends(job, monkeypatch):
    monkeypatch.setattr(handshake, "same_user", lambda connected: False)
    errors = at_once(lambda: connect(job(0, 2), timeout=0.6), lambda: connect(job(1, 2), timeout=0.3))
    assert errors[0].waiting[1] == "it has not connected"
    assert "a process of another user listens on this host" in str(errors[1])


def test_missing_information_about_a_job_is_an_error_before_anything_is_opened(job, refused, monkeypatch):
    nameless = find_place(0, 2, environment={})
    refused(lambda: connect(nameless, 1), "environment variable MASTER_PORT", "store")
    several = replace(job(0, 4), local_size=2)
    refused(lambda: connect(several, 1), "environment variable DRVFUSE_SECRET", "not set")
    monkeypatch.setenv("DRVFUSE_SECRET", "short")
    refused(lambda: connect(several, 1), "environment variable DRVFUSE_SECRET", "of 5 characters")
    monkeypatch.setenv("DRVFUSE_SECRET", "0123456789abcdef")
    refused(lambda: connect(several, 1), "environment variable MASTER_ADDR", "not set")
    refused(lambda: meet(0, 3, timeout=-1), "timeout", "-1")


def test_an_occupied_port_is_named_in_the_error(job):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("g", b"", f"drvfuse-port-{os.getpid()}", (("127.0.0.1", taken.getsockname()[1]),))
        with pytest.raises(ArgumentError, match="DRVFUSE_STORE_PORT"):
            join(job(0, 2), address, time.monotonic() + 0.2, 0.2)


def test_one_rank_alone_needs_no_launcher():
    with connect(find_place(0, 1, environment={}), 5) as board:
        assert board.gather("x", b"y") == [b"y"]


def in_use():
    """The threads of boards, and the sockets and selectors of this process, by number and name.

    Other files may be open for a while: a thread of an earlier test may still compile the emulator's runtime.
    """
    found = {thread for thread in threading.enumerate() if thread.name.startswith("drvfuse board")}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the directory listing is closed by now
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith(("socket:", "anon_inode:")):
                found.add((number, name))
    return found


def test_nothing_stays_open_after_all_ranks_have_closed(job):
    before = in_use()
    close(at_once(*(lambda rank=rank: connect(job(rank), 10) for rank in range(3))))
    deadline = time.monotonic() + 5
    while in_use() - before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert in_use() - before == set()
    assert rendezvous.address_of(job(0), 0).unix not in Path("/proc/net/unix").read_text()


RANK = textwrap.dedent("""
    import os, sys, time
    from drvfuse.bootstrap.place import find_place
    from drvfuse.bootstrap.rendezvous import connect
    from drvfuse.errors import DrvfuseError
    board = connect(find_place(), 20)
    print("joined", flush=True)
    if board.rank == int(sys.argv[1]):
        exec(sys.argv[2])
    try:
        board.gather("step", b"")
    except DrvfuseError as error:
        print(type(error).__name__, error, flush=True)
""")


def start(ranks, size, port, *arguments):
    root = Path(__file__).resolve().parent.parent.parent
    common = {**os.environ, "PYTHONPATH": str(root), "WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, *map(str, arguments)],
            env={**common, "RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]


@pytest.mark.parametrize(
    "act,how",
    [
        ("os.kill(os.getpid(), 9)", "its process has ended"),
        ("sys.exit(0)", "its interpreter has ended"),
        ("1 / 0", "its interpreter has ended"),
        ("if not os.fork(): time.sleep(2); os._exit(0)\nos.kill(os.getpid(), 9)", "its process has ended"),
    ],
    ids=["killed", "exits", "raises", "killed with a child that lives on"],
)
def test_the_others_name_a_process_that_ends_at_once(act, how):
    processes = start(range(3), 3, f"{os.getpid()}-{abs(hash(act))}", 1, act)
    begin = time.monotonic()
    outputs = [process.communicate(timeout=30)[0].splitlines() for process in processes if process is not processes[1]]
    processes[1].communicate(timeout=30)
    assert time.monotonic() - begin < 15
    for output in outputs:
        assert output == ["joined", f"RankEnded step is impossible without rank 1: {how}. {ADVICE}"]


@pytest.mark.parametrize("child", [False, True])
def test_the_others_name_a_killed_rank_0_at_once(child):
    """Rank 0 serves the board; after its death a child process may still hold copies of its sockets."""
    act = "if not os.fork(): time.sleep(2); os._exit(0)\n" if child else ""
    processes = start(range(2), 2, f"{os.getpid()}-zero-{child}", 0, act + "os.kill(os.getpid(), 9)")
    output, begin = processes[1].stdout.readline(), time.monotonic()
    output += processes[1].stdout.readline()
    assert time.monotonic() - begin < 1.5
    for process in processes:
        process.communicate(timeout=30)
    assert processes[0].returncode == -signal.SIGKILL
    assert output == f"joined\nRankEnded step is impossible without rank 0: its process has ended. {ADVICE}\n"
