# SPDX-License-Identifier: Apache-2.0
"""Stores and communicators of other libraries: each kind carries the notice of rank 0 to the other ranks, and a broken
store or communicator raises an error."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from drvfuse.bootstrap import rendezvous
from drvfuse.bootstrap.host import is_local, own_addresses
from drvfuse.bootstrap.rendezvous import meet
from drvfuse.errors import GroupError, GroupTimeout, Unsupported

ROOT = Path(__file__).resolve().parent.parent.parent


class OurStore:
    """A store for threads that implements the documented protocol."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout):
                raise KeyError(key)
            return self.values[key]


class TorchStore:
    """A store as torch documents it: `wait` raises if keys are missing after its time-out, `get` waits up to
    `timeout`."""

    def __init__(self) -> None:
        self.inner, self.timeout = OurStore(), timedelta(seconds=300)

    def set(self, key: str, value: str | bytes) -> None:
        self.inner.set(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key, self.timeout.total_seconds())

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        for key in keys:
            try:
                self.inner.get(key, timeout.total_seconds())
            except KeyError:
                raise RuntimeError(f"wait timeout after {timeout}, keys: {key}") from None

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise NotImplementedError


class TorchGroup:
    def __init__(self, store: TorchStore, rank: int, size: int) -> None:
        self.rank, self.size, self.get_group_store = lambda: rank, lambda: size, lambda: store

    def allreduce(self) -> None: ...

    def broadcast(self) -> None: ...


def meet_all(size: int, stores, timeout: float = 10, ranks=None, known: bool = True):
    """For each rank its board, or the exception that it raised while it connected."""

    def one(rank: int):
        try:
            return meet(*((rank, size) if known else (None, None)), stores[rank], timeout)[1]
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size) if ranks is None else ranks))


def speak(boards) -> None:
    """Every rank gathers the values of all ranks; then all boards are closed."""
    with ThreadPoolExecutor(len(boards)) as pool:
        values = list(pool.map(lambda board: board.gather("speak", bytes([board.rank])), boards))
    assert values == [[bytes([rank]) for rank in range(len(boards))]] * len(boards)
    for board in boards:
        board.close()


@pytest.mark.parametrize("kind", [OurStore, TorchStore])
def test_several_groups_can_connect_by_one_store_in_turn(kind):
    store = kind()
    for _ in range(3):
        speak(meet_all(3, [store] * 3))
    (value,) = (store if kind is OurStore else store.inner).values.values()
    assert value == b""  # neither an address nor a secret is left


def test_a_process_group_supplies_rank_and_size(refused):
    store = TorchStore()
    groups = [TorchGroup(store, rank, 2) for rank in range(2)]
    speak(meet_all(2, groups, known=False))
    refused(lambda: meet(1, 2, groups[0]), "rank", "0 or None")
    refused(lambda: meet(0, 3, groups[0]), "size", "2 or None")
    del groups[0].get_group_store
    with pytest.raises(Unsupported, match="pass a torch.distributed store"):
        meet(store=groups[0])


def test_ranks_on_other_hosts_connect_by_tcp(monkeypatch):
    """Ranks that cannot see rank 0's Unix socket reach it at an address of its host, and must know the secret too."""
    hosts = {"test-0": "a host", "test-1": "another host"}
    monkeypatch.setattr(rendezvous.address, "host_identity", lambda: hosts[threading.current_thread().name])
    monkeypatch.setattr(rendezvous, "host_identity", lambda: "a host")
    monkeypatch.setattr(rendezvous.address, "own_addresses", lambda: ["127.0.0.1"])
    store, boards = OurStore(), [None, None]

    def one(rank: int) -> None:
        boards[rank] = meet(rank, 2, store, 10)[1]

    threads = [threading.Thread(target=one, args=(rank,), name=f"test-{rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert boards[1]._connection._socket.family.name == "AF_INET"
    speak(boards)


def test_addresses_of_this_host_are_recognised_as_local():
    assert all(is_local(one) for one in [*own_addresses(), "127.0.0.1", "localhost"]) and not is_local("192.0.2.1")


@pytest.mark.parametrize("kind", [OurStore, TorchStore])
def test_a_missing_rank_is_named_in_the_error(kind):
    store = kind()
    for error in meet_all(3, [store] * 3, timeout=0.3, ranks=(0, 2)):
        assert type(error) is GroupTimeout and error.missing == (1,)
    speak(meet_all(3, [store] * 3))  # the notice of the first attempt is still in the store


@pytest.mark.parametrize("kind", [OurStore, TorchStore])
def test_a_store_that_loses_the_key_ends_in_a_time_out_that_says_so(kind):
    stores = [kind(), kind()]  # two independent stores
    errors = meet_all(2, stores, timeout=0.3)
    assert type(errors[0]) is GroupTimeout and errors[0].missing == (1,)
    assert type(errors[1]) is GroupTimeout and errors[1].missing == (0,)
    assert "the store has no key 'drvfuse/board': get raised" in str(errors[1])


@pytest.mark.parametrize(
    "value,text",
    [
        (b"", "it holds nothing"),
        (None, "get returned None, not bytes"),
        ("text", "get returned a str, not bytes"),
        (b"garbage", "no address that drvfuse has written"),
        (b"[]", "no address that drvfuse has written"),
        (b'{"group": 1}', "no address that drvfuse has written"),
    ],
)
def test_a_store_with_a_foreign_value_ends_in_a_time_out_that_says_so(value, text):
    class Wrong(OurStore):
        def get(self, key: str, timeout: float) -> bytes:
            return value

    with pytest.raises(GroupTimeout, match=text):
        meet(1, 2, Wrong(), timeout=0.1)


def test_an_exception_of_a_store_is_raised_on_rank_0_with_its_name():
    class Broken(OurStore):
        def set(self, key: str, value: bytes) -> None:
            raise OSError("the disk is full")

    with pytest.raises(GroupError, match="use the store failed on rank 0: set raised OSError: the disk is full"):
        meet(0, 2, Broken(), timeout=5)


def test_two_groups_connecting_by_one_store_at_once_is_an_error():
    class Crossed(OurStore):
        """A store in which rank 0 of another group overwrites the notice of this group's rank 0, after it was read."""

        def get(self, key: str, timeout: float) -> bytes:
            value = super().get(key, timeout)
            self.values[key] = b"another notice"
            return value

    for error in meet_all(2, [Crossed()] * 2):
        assert type(error) is GroupError and "another group has been connected by the same store" in str(error)


def test_an_object_that_is_not_a_store_is_refused(refused):
    for wrong in (5, "redis://", {}, OurStore, object()):
        refused(lambda wrong=wrong: meet(0, 2, wrong), "store", "mpi4py communicator")


MPI_RANK = textwrap.dedent("""
    import sys, time
    from mpi4py import MPI
    from drvfuse.bootstrap.rendezvous import meet
    from drvfuse.errors import GroupTimeout
    world = MPI.COMM_WORLD
    for _ in range(2):
        place, board = meet(store=world, timeout=20)
        assert (place.rank, place.size) == (world.Get_rank(), world.Get_size()) and place.one_host
        assert board.gather("speak", bytes([board.rank])) == [b"\\0", b"\\1", b"\\2"]
        board.close()
    pair = world.Split(world.rank // 2)  # {0, 1} and {2}
    with meet(store=pair, timeout=20)[1] as board:
        assert board.size == pair.size
    if world.rank != 1:  # rank 1 does not come, and 0 and 2 try again without it
        try:
            meet(store=world, timeout=0.3)
            raise SystemExit("rank 1 was not missed")
        except GroupTimeout as error:
            assert error.missing == (1,), error
    world.Barrier()
    with meet(store=world, timeout=20)[1] as board:
        assert len(board.gather("again", b"")) == 3
    with meet(timeout=20)[1] as board:  # without the communicator, by what mpiexec has set
        assert len(board.gather("again", b"")) == 3
    print(f"rank {world.rank} is done\\n", end="", flush=True)
""")


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not (Path(sys.executable).parent / "mpiexec").exists(),
    reason="needs mpi4py and an mpiexec beside it (pip install mpi4py mpich)",
)
def test_ranks_connect_by_an_mpi_communicator():
    mpiexec = Path(sys.executable).parent / "mpiexec"
    result = subprocess.run(
        [mpiexec, "-n", "3", sys.executable, "-c", MPI_RANK],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(3)], result.stderr


TORCH_RANK = textwrap.dedent("""
    import datetime, os
    import torch.distributed as dist
    from drvfuse.bootstrap.rendezvous import meet
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
    half = [dist.new_group([0, 1]), dist.new_group([2])][rank // 2]
    for given in (store, dist.group.WORLD, half, None):
        place, board = meet(store=given, timeout=20)
        assert board.size == (half.size() if given is half else size)
        assert board.gather("speak", bytes([board.rank])) == [bytes([other]) for other in range(board.size)]
        board.close()
    print(f"rank {rank} is done\\n", end="", flush=True)
    dist.destroy_process_group()
""")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_ranks_of_torchrun_connect_by_stores_and_process_groups_of_torch(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(TORCH_RANK)
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    done = sorted(line for line in result.stdout.splitlines() if line.endswith("done"))
    assert done == [f"rank {rank} is done" for rank in range(3)], result.stderr
