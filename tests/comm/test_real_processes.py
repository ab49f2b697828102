# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks in real processes: `Group.connect`, all collectives, and processes that come late, end or are killed.

On the CUDA driver each process has a GPU of its own; on the emulated one they share a machine, served by this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

import drvfuse as df
from drvfuse import config, reference
from drvfuse.bootstrap.rendezvous import meet
from drvfuse.errors import (
    ArgumentError,
    BarrierTimeout,
    CallMismatch,
    DrvfuseError,
    GroupError,
    GroupMismatch,
    GroupTimeout,
    RankEnded,
)

ALGOS = ("one_stage", "two_stage", "push_one_shot", "push_two_shot")
FEW = (2, 3) if os.environ.get("DRVFUSE_TEST_DRIVER") == "cuda" else (3,)
"""Numbers of ranks in tests of failures, which are slow: one number on the emulated driver."""
SMALL: dict[str, Any] = {"workspace_bytes": 1 << 18, "max_blocks": 4, "timeout": 20.0}


@pytest.fixture
def run(pool: Any, driver: str) -> Any:
    """`run(n, function, *args)`: what the function returns in each of n processes."""

    def call(size: int, function: Any, *args: Any, **options: Any) -> list[Any]:
        environment = {"DRVFUSE_DRIVER": driver, **options.pop("environment", {})}
        return pool.run(size, function, *args, environment=environment, **options)

    return call


def sizes(*numbers: int) -> Any:
    return pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in numbers])


def hosts_of(n: int, shape: Any, dtype: Any = np.float32, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng([seed, n])
    return [rng.standard_normal(shape).astype(dtype) for _ in range(n)]


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype and (reference.bits(found) == reference.bits(expected)).all()


def sums(group: df.Group, count: int = 100, algo: str = "auto", seed: int = 0) -> None:
    hosts = hosts_of(group.size, count, seed=seed)
    same(df.allreduce(group, group[0].array(hosts[group[0].index]), algo=algo).numpy(), reference.allreduce(hosts))


def warm_up(group: df.Group) -> None:
    """Make the first call with the usual time-out, as it may compile.

    When this returns, all ranks have completed the call, so an error in a later call of one rank does not affect it.
    """
    with config.override(spin_timeout=30.0):
        sums(group)
        group.synchronize()
    group.transport.board.vote("warm up", None)


# Functions of the ranks -----------------------------------------------------------------------------------------------


def every_op(rank: int, size: int) -> tuple[int, int]:
    with df.Group.connect(**SMALL) as group:
        assert (group.size, len(group), group[0].index, group[0].device.index) == (size, 1, rank, rank)
        for seed, algo in enumerate(ALGOS):
            sums(group, 1001, algo, seed)
            sums(group, 40_000, algo, seed)
            half = hosts_of(size, (7, 264), np.float16, seed)
            gamma, added = np.ones(264, np.float16), hosts_of(1, (7, 264), np.float16, 9)[0]
            own = group[0].array
            result = df.allreduce_rmsnorm_fp8(
                group, own(half[rank]), own(gamma), epsilon=1e-6, residuals=own(added), algo=algo
            )
            expected = reference.allreduce_rmsnorm_fp8(half, gamma, 1e-6, residual=added)
            same(result.output.numpy(), expected.output)
            same(result.scales.numpy(), expected.scales)
            same(result.residual.numpy(), expected.residual)
        group.synchronize()
    return rank, size


def every_algorithm(rank: int, size: int) -> None:
    with df.Group.connect(**{**SMALL, "workspace_bytes": 1 << 16}) as group:
        for seed, algo in enumerate(ALGOS):
            sums(group, 500, algo, seed)
        group.synchronize()


def many_calls(rank: int, size: int, calls: int) -> None:
    """Calls of several kinds and sizes, plain, prepared and in graphs, without synchronisation in between."""
    with df.Group.connect(**SMALL) as group:
        own = group[0]
        rounds = [hosts_of(size, 64 + 32 * number, seed=number) for number in range(4)]
        xs = [own.array(hosts[rank]) for hosts in rounds]
        ys = [own.empty(x.shape, x.dtype) for x in xs]
        prepared = [
            df.allreduce.prepare(group, x, y, algo=algo, pdl_level=df.PDLLevel.ON)
            for x, y, algo in zip(xs, ys, ALGOS, strict=True)
        ]
        with group.capture() as graphs:
            for call in prepared:
                call.launch()
        rng = np.random.default_rng(7)
        for kind in rng.integers(0, 3, calls):
            if kind == 0:
                number = int(rng.integers(0, 4))
                df.allreduce(group, xs[number], ys[number])
            elif kind == 1:
                prepared[int(rng.integers(0, 4))].launch()
            else:
                graphs.launch()
        group.synchronize()
        for y, hosts in zip(ys, rounds, strict=True):
            same(y.numpy(), reference.allreduce(hosts))
        graphs.close()


def subgroups(rank: int, size: int) -> None:
    with df.Group.connect(**{**SMALL, "max_blocks": 2}) as world:
        pair = world.split(rank // 2, rank)
        across = world.split(rank % 2, rank)
        for _ in range(5):
            for group in (pair, world, across):
                sums(group)
        across.close()
        sums(pair)
        pair.close()
        sums(world)


def two_connections(rank: int, size: int) -> None:
    with (
        df.Group.connect(**{**SMALL, "max_blocks": 2}) as first,
        df.Group.connect(**{**SMALL, "max_blocks": 2}) as second,
    ):
        for _ in range(3):
            sums(first)
            sums(second)


def symmetric_memory(rank: int, size: int) -> None:
    with df.Group.connect(**SMALL) as group, group.symmetric(1 << 16) as buffer:
        (x,) = buffer.arrays(1000, "float32", 4096)
        hosts = hosts_of(size, 1000)
        x.copy_from(hosts[rank])
        same(df.allreduce(group, x).numpy(), reference.allreduce(hosts))
        group.reset()


def switch_sums(rank: int, size: int) -> None:
    with df.Group.connect(**SMALL) as group:
        hosts = [np.round(host * 64) / 64 for host in hosts_of(size, 1000)]
        result = df.allreduce(group, group[0].array(hosts[rank].astype(np.float32)), use_multimem=True)
        same(result.numpy(), reference.allreduce([h.astype(np.float32) for h in hosts], multimem=True))


def left_out(rank: int, size: int, missing: int) -> Any:
    if rank == missing:
        return None
    started = time.monotonic()
    with pytest.raises(GroupTimeout) as caught:
        df.Group.connect(**{**SMALL, "timeout": 1.0})
    assert time.monotonic() - started < 6
    return str(caught.value)


def killed_in_the_set_up(rank: int, size: int, victim: int) -> Any:
    if rank == victim:
        meet(timeout=20.0)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RankEnded) as caught:
        df.Group.connect(**SMALL)
    assert time.monotonic() - started < 15, "the end is known without the time-out"
    return caught.value.rank


def idle_in_a_call(rank: int, size: int) -> str:
    """Rank 1 makes no call; all ranks raise, and work again after a reset."""
    with df.Group.connect(**SMALL) as group, config.override(spin_timeout=0.3):
        warm_up(group)
        x = group[0].zeros(64, "float32")
        if rank != 1:
            with pytest.raises(BarrierTimeout) as caught:
                df.allreduce(group, x)
                group.synchronize()
        else:
            until = time.monotonic() + 20
            while not group.workspace.reported() and time.monotonic() < until:
                time.sleep(0.01)
            with pytest.raises(BarrierTimeout) as caught:
                df.allreduce(group, x)
        assert caught.value.peer == 1
        group.reset()
        sums(group)
    return str(caught.value)


def killed_in_a_call(rank: int, size: int, victim: int) -> Any:
    """The victim is killed between its launches, while the others wait for it."""
    group = df.Group.connect(**SMALL)
    warm_up(group)
    with config.override(spin_timeout=0.5):
        if rank != victim:
            df.allreduce(group, group[0].zeros(64, "float32"))
        group.transport.board.vote("launch", None)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(BarrierTimeout) as caught:
            group.synchronize()
        took = time.monotonic() - started
        assert took < (0.5 + 1 if group.driver.name == "cuda" else 20), f"{took} s"
        assert caught.value.peer == victim, str(caught.value)
        until = time.monotonic() + 10
        while victim not in group.transport.ended and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(BarrierTimeout) as caught:
            group.check()
        # `ended` may also have survivors, as they may have closed their groups by now
        assert victim in caught.value.ended, str(caught.value)
        with pytest.raises(RankEnded, match=f"rank {victim}"):
            group.reset()
        group.close()
        return str(caught.value)


def calls_something_else(rank: int, size: int) -> str:
    with df.Group.connect(**SMALL) as group, config.override(spin_timeout=2.0):
        warm_up(group)
        x = group[0].zeros(64 if rank != 1 else 128, "float32")
        with pytest.raises(CallMismatch) as caught:
            df.allreduce(group, x)
            group[0].drain()
            until = time.monotonic() + 20  # this rank's call may be complete before another rank reports
            while not group.workspace.reported() and time.monotonic() < until:
                time.sleep(0.01)
            group.check()
        group.reset()
        sums(group)
    return str(caught.value)


def ends_between_calls(rank: int, size: int) -> str:
    group = df.Group.connect(**SMALL)
    sums(group)
    if rank == 1:
        group.close()
        return ""
    until = time.monotonic() + 10
    while not group.transport.ended and time.monotonic() < until:
        time.sleep(0.01)
    group.synchronize()
    with pytest.raises(RankEnded) as caught:
        sums(group)
    group.close()
    return str(caught.value)


def differing(rank: int, size: int, name: str, values: list[Any]) -> str:
    with pytest.raises(DrvfuseError) as caught:
        df.Group.connect(**{**SMALL, name: values[rank]})
    return f"{type(caught.value).__name__}: {caught.value}"


def open_files() -> Counter[str]:
    """What the open descriptors of this process refer to."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # listdir has closed the descriptor that it used
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found


def closes_in_any_order(rank: int, size: int) -> list[str]:
    before: Counter[str] = Counter()
    for number in range(4):
        if number == 1:  # from now on the driver opens no further descriptors
            time.sleep(0.2)
            before = open_files()
        group = df.Group.connect(**SMALL)
        sums(group)
        time.sleep(0.05 * ((rank + number) % size))
        group.close()
        del group
    # Rank 0's process serves the board until the last rank has closed its group.
    limit = time.monotonic() + 5
    while (further := open_files() - before).total() > 2 and time.monotonic() < limit:
        time.sleep(0.05)
    return sorted(further.elements())


# Tests ----------------------------------------------------------------------------------------------------------------


@sizes(2, 3, 4)
def test_every_op_has_the_bits_of_the_reference(run, n):
    assert run(n, every_op) == [(rank, n) for rank in range(n)]


@sizes(8)
def test_eight_processes_have_the_bits_of_the_reference(run, n):
    run(n, every_algorithm)


@sizes(2, 4)
def test_many_mixed_calls_without_synchronisation_have_the_bits_of_the_reference(run, n, driver):
    run(n, many_calls, 10_000 if driver == "cuda" else 150, timeout=110)


@sizes(2, 4)
def test_subgroups_of_processes_call_in_turns(run, n):
    run(n, subgroups)


@sizes(2)
def test_a_process_may_connect_several_groups(run, n):
    run(n, two_connections)


@sizes(*FEW)
def test_kernels_write_into_symmetric_memory_of_other_processes(run, n):
    run(n, symmetric_memory)


@pytest.mark.emulated
def test_multicast_sums_of_processes_have_the_bits_of_the_reference(pool):
    pool.run(3, switch_sums)


@sizes(*FEW)
def test_a_rank_that_never_connects_is_named(run, n):
    for rank, text in enumerate(run(n, left_out, 1)):
        assert rank == 1 or ("rank 1 did not take part within " in text and "has not connected" in text)
    assert "rank 0 did not take part" in run(n, left_out, 0)[1]


@pytest.mark.parametrize("victim", [0, -1])
@sizes(*FEW)
def test_a_rank_that_is_killed_in_the_set_up_is_named_at_once(pool, driver, n, victim):
    victim %= n
    with pool.job(n, killed_in_the_set_up, victim, environment={"DRVFUSE_DRIVER": driver}) as job:
        found = job.outcomes()
    for rank, outcome in enumerate(found):
        assert rank == victim or outcome == victim, outcome


@sizes(*FEW)
def test_an_idle_rank_is_named_on_all_ranks_and_the_group_works_after_a_reset(run, n):
    assert all("waiting for rank 1" in text for text in run(n, idle_in_a_call))


@pytest.mark.parametrize("victim", [0, -1])
@sizes(*FEW)
def test_a_killed_rank_is_reported_with_its_signal(pool, driver, n, victim):
    """Rank 0's process also serves the board."""
    victim %= n
    with pool.job(n, killed_in_a_call, victim, environment={"DRVFUSE_DRIVER": driver}) as job:
        found = job.outcomes()
    for rank, outcome in enumerate(found):
        if rank == victim:
            assert getattr(outcome, "status", None) == -signal.SIGKILL
        else:
            assert isinstance(outcome, str), outcome
            assert f"Rank {victim} has ended: " in outcome


@sizes(*FEW)
def test_a_rank_that_makes_a_different_call_is_named_with_both_calls(run, n):
    for text in run(n, calls_something_else):
        assert "(64,) float32" in text and "(128,) float32" in text


@sizes(*FEW)
def test_a_rank_that_closes_the_group_is_named_at_the_next_call(run, n):
    for rank, text in enumerate(run(n, ends_between_calls)):
        assert rank == 1 or "rank 1: it has closed the group" in text


@sizes(*FEW)
def test_ranks_that_differ_are_named_on_all_ranks(run, n):
    found = run(n, differing, "workspace_bytes", [4096, 8192, 4096])
    assert all(text.startswith(GroupMismatch.__name__) and "workspace_bytes" in text for text in found)
    assert all("4096" in text and "rank 1: 8192" in text for text in found)
    found = run(n, differing, "device", [0, 1, 1] if n == 3 else [0, 0])
    assert all(text.startswith(ArgumentError.__name__) and f"on ranks {n - 2} and {n - 1}" in text for text in found)
    found = run(n, differing, "device", [0, 99, 2])
    assert found[1].startswith(ArgumentError.__name__)
    for rank in {*range(n)} - {1}:
        assert found[rank].startswith(GroupError.__name__) and "rank 1" in found[rank]


@sizes(*FEW)
def test_groups_are_closed_in_any_order_and_leave_no_descriptor(run, n):
    further = run(n, closes_in_any_order)
    assert all(len(files) <= 2 for files in further), further
