# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own that are late, missing, or end: bounded waits, errors on every rank, reset, split."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from connected import Ranks, connected, outcomes, together

import drvfuse as df
from drvfuse import config, reference
from drvfuse.errors import (
    ArgumentError,
    BarrierTimeout,
    CallMismatch,
    CaptureError,
    DriverError,
    GroupError,
    GroupTimeout,
    LaunchError,
    RankEnded,
)

pytestmark = pytest.mark.emulated

ALGOS = ("one_stage", "push_one_shot")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Three ranks that have made their first call with the default time-out, as it may compile; later calls have a
    short one.
    """
    with connected(3) as ranks:
        for algo in ALGOS:
            ranks.each(lambda group, algo=algo: allreduce(group, algo))
        ranks.each(lambda group: group.reset())
        with config.override(spin_timeout=0.2):
            yield ranks


def allreduce(group: df.Group, algo: str = "auto") -> np.ndarray:
    return df.allreduce(group, group[0].array(np.full(64, 1 << group[0].index, np.float32)), algo=algo).numpy()


def work(ranks: Ranks) -> None:
    for result in ranks.each(allreduce):
        assert (result == 7).all()


def call_and_wait(group: df.Group, algo: str = "auto") -> None:
    """Make a call and wait for it. A rank that calls late raises, at this call, the error that
    another rank has reported.
    """
    allreduce(group, algo)
    group.synchronize()


def timed_out(group: df.Group, call: Callable[[], Any]) -> BarrierTimeout:
    with pytest.raises(BarrierTimeout) as caught:
        call()
    with pytest.raises(BarrierTimeout):  # every call raises until the group is reset
        group.check()
    return caught.value


@pytest.mark.parametrize("algo", ALGOS)
def test_every_rank_raises_including_the_one_that_did_not_call(ranks: Ranks, algo: str) -> None:
    """Rank 1 makes no call while the others time out; its next call raises too, and a reset of all ranks makes the
    group work again.
    """
    work(ranks)

    def missing(group: df.Group) -> None:
        if group[0].index == 1:
            return
        error = timed_out(group, lambda: call_and_wait(group, algo))
        assert error.peer == 1 and error.rank in (0, 2) and not error.ended
        assert "call" in error.call and f"allreduce {algo} of" in error.call and "(64,) float32" in error.call

    ranks.each(missing)
    idle = ranks.groups[1]
    error = timed_out(idle, lambda: allreduce(idle))
    assert f"allreduce {algo} of" in error.call or "which rank 1 was not launched with" in error.call
    ranks.each(lambda group: group.reset())
    for group in ranks.groups:
        group.check()
    work(ranks)


@pytest.mark.parametrize("first", [False, True])
def test_calls_that_differ_between_ranks_are_named_on_all_ranks(first: bool) -> None:
    """Rank 2 sums a different number of elements; with `check_calls` a preceding kernel detects it."""
    with config.override(check_calls=first), connected(3) as ranks:
        work(ranks)

        def call(group: df.Group) -> str:
            rank = group[0]
            with pytest.raises(CallMismatch) as caught:
                df.allreduce(group, rank.zeros(64 if rank.index < 2 else 65, "float32"))
                rank.drain()
                until = time.monotonic() + 10
                while not group.workspace.reported() and time.monotonic() < until:
                    time.sleep(0.005)
                group.synchronize()
            return str(caught.value)

        for text in ranks.each(call):
            assert "(64,) float32" in text and "(65,) float32" in text and "rank 2" in text
        ranks.each(lambda group: group.reset())
        work(ranks)


@pytest.mark.parametrize("spin_timeout", [1e8, 999_999_999.0])
def test_a_reset_works_with_a_time_out_of_years(ranks: Ranks, spin_timeout: float) -> None:
    """A reset waits for the other ranks for the board's time-out and the kernels' time-out together."""
    with config.override(spin_timeout=spin_timeout):
        ranks.each(lambda group: group.reset())
        work(ranks)


def test_nothing_is_launched_before_a_reset(ranks: Ranks) -> None:
    def missing(group: df.Group) -> None:
        if group[0].index:
            timed_out(group, lambda: call_and_wait(group))

    ranks.each(missing)
    for group in ranks.groups:
        x = group[0].zeros(64, "float32")
        with group.capture() as graphs, pytest.raises(BarrierTimeout):
            df.allreduce(group, x, x)
        graphs.close()
    ranks.each(lambda group: group.reset())
    work(ranks)


def test_a_graph_launch_raises_an_error_that_another_rank_reported(ranks: Ranks) -> None:
    def captured(group: df.Group) -> tuple[Any, df.Array]:
        x, y = group[0].array(np.full(64, 1 << group[0].index, np.float32)), group[0].empty(64, "float32")
        prepared = df.allreduce.prepare(group, x, y)
        with group.capture() as graphs:
            prepared.launch()
        graphs.launch()
        assert (y.numpy() == 7).all()
        return graphs, y

    graphs = ranks.each(captured)

    def replay(group: df.Group) -> None:
        if group[0].index:
            found = graphs[group[0].index][0]
            error = timed_out(group, lambda: (found.launch(), group.synchronize()))
            assert error.peer == 0 and "call" in error.call

    ranks.each(replay)
    with pytest.raises(BarrierTimeout):
        graphs[0][0].launch()
    ranks.each(lambda group: group.reset())

    def again(group: df.Group) -> None:
        found, y = graphs[group[0].index]
        y.copy_from(np.zeros(64, np.float32))
        found.launch()
        assert (y.numpy() == 7).all()
        found.close()

    ranks.each(again)


def test_a_rank_that_exits_during_a_call_is_named_in_the_error(ranks: Ranks) -> None:
    launched = threading.Barrier(3)

    def call(group: df.Group) -> BarrierTimeout | None:
        if group[0].index == 2:
            launched.wait(20)
            ranks.boards.end(2)
            ranks.processes[2].close()
            return None
        df.allreduce(group, group[0].zeros(64, "float32"))
        launched.wait(20)
        until = time.monotonic() + 5
        while not group.transport.ended and time.monotonic() < until:
            time.sleep(0.005)
        return timed_out(group, group.synchronize)

    started = time.monotonic()
    for error in ranks.each(call)[:2]:
        assert error is not None and error.peer == 2 and set(error.ended) == {2}
        assert "Rank 2 has ended: " in str(error) and "group.reset()" not in str(error)
    assert time.monotonic() - started < 10
    for found in outcomes([ranks.groups[0].reset, ranks.groups[1].reset]):
        assert isinstance(found, RankEnded) and found.rank == 2


def test_a_rank_that_exits_between_calls_is_named_at_once(ranks: Ranks) -> None:
    work(ranks)
    ranks.processes[0].close()
    ranks.boards.end(0)
    for group in ranks.groups[1:]:
        until = time.monotonic() + 5
        while 0 not in group.transport.ended and time.monotonic() < until:
            time.sleep(0.005)
        group.synchronize()  # all earlier calls are complete
        with pytest.raises(RankEnded, match="rank 0"):
            allreduce(group)


def test_a_reset_waits_for_a_rank_that_is_still_in_a_call(ranks: Ranks) -> None:
    """Rank 0 is late and has seen no error; meanwhile the call of rank 2 times out."""

    def call(group: df.Group) -> None:
        if group[0].index == 0:
            time.sleep(0.4)
        if group[0].index == 2:
            allreduce_unread(group)
        group.reset()

    for _ in range(2):
        ranks.each(call)
        work(ranks)


def allreduce_unread(group: df.Group) -> df.Array:
    return df.allreduce(group, group[0].zeros(64, "float32"))


def test_a_reset_names_a_missing_rank_and_may_be_repeated() -> None:
    with config.override(spin_timeout=0.1), df.emu.Machine(devices=3) as machine:
        ranks = Ranks(machine, 3, timeout=0.2)
        ranks.connect()
        for found in outcomes([ranks.groups[0].reset, ranks.groups[2].reset]):
            assert isinstance(found, GroupTimeout) and found.missing == (1,)
            assert set(found.waiting.values()) >= {"reset the group: wait for what is queued"}
        ranks.each(lambda group: group.reset())
        work(ranks)
        ranks.close()


def test_a_reset_in_a_capture_is_refused_on_all_ranks(ranks: Ranks) -> None:
    def call(group: df.Group) -> BaseException:
        if group[0].index:
            with pytest.raises(GroupError, match="CaptureError") as caught:
                group.reset()
        else:
            with group.capture() as graphs, pytest.raises(CaptureError) as caught:
                group.reset()
            graphs.close()
        return caught.value

    ranks.each(call)
    work(ranks)


def test_a_launch_that_fails_on_one_rank_requires_a_reset_of_all_ranks(ranks: Ranks) -> None:
    def call(group: df.Group) -> None:
        if group[0].index == 1:
            allreduce(group)  # loads the kernel

    work(ranks)
    ranks.processes[1].inject("cuLaunchKernelEx", 2)

    def failing(group: df.Group) -> None:
        if group[0].index == 1:
            with pytest.raises(DriverError):
                allreduce(group)
        else:
            timed_out(group, lambda: call_and_wait(group))

    ranks.each(failing)
    with pytest.raises(BarrierTimeout):
        allreduce(ranks.groups[1])
    ranks.each(lambda group: group.reset())
    work(ranks)
    ranks.processes[1].inject("cuLaunchKernelEx", 2)
    with pytest.raises(DriverError):
        allreduce(ranks.groups[1])
    with pytest.raises(LaunchError, match=r"group.reset\(\) on all ranks"):
        allreduce(ranks.groups[1])
    ranks.each(lambda group: group.reset())
    work(ranks)


# Several groups of a process ------------------------------------------------------------------------------------------


def test_split_groups_ranks_by_colour_and_orders_them_by_key() -> None:
    with connected(4) as ranks:
        subs = ranks.each(lambda group: group.split(group[0].index % 2, -group[0].index))
        assert [(sub.size, sub[0].index) for sub in subs] == [(2, 1), (2, 1), (2, 0), (2, 0)]

        def both(position: int) -> list[np.ndarray]:
            results = []
            for _ in range(3):
                results += [allreduce(subs[position]), allreduce(ranks.groups[position])]
            return results

        for results in together([lambda p=p: both(p) for p in range(4)]):
            for small, large in zip(results[::2], results[1::2], strict=True):
                assert (small == 3).all() and (large == 15).all()
        for sub in subs:
            sub.close()
        for result in ranks.each(allreduce):
            assert (result == 15).all()


def test_a_rank_may_be_left_out_of_a_split_and_the_parent_may_be_closed_first() -> None:
    with connected(3) as ranks:
        subs = ranks.each(lambda group: group.split(None if group[0].index == 1 else 5))
        assert subs[1] is None and subs[0].size == 2
        for group in ranks.groups:
            group.close()
        for result in together([lambda sub=sub: allreduce(sub) for sub in (subs[0], subs[2])]):
            assert (result == 3).all()
        subs[0].close()
        subs[2].close()


def test_groups_and_their_subgroups_call_in_turns() -> None:
    """Each rank calls in a group of one, in two groups of two and in the group of all four ranks, again and again."""
    with connected(4, max_blocks=2) as ranks:
        halves = ranks.each(lambda group: group.split(group[0].index // 2))
        alone = together([lambda half=half: half.split(half[0].index) for half in halves])
        across = ranks.each(lambda group: group.split(group[0].index % 2))

        def calls(position: int) -> list[float]:
            found = []
            for _ in range(4):
                for group in (alone[position], halves[position], across[position], ranks.groups[position]):
                    found.append(float(allreduce(group)[0]))
            return found

        for found in together([lambda p=p: calls(p) for p in range(4)]):
            assert found == [1, 3, 3, 15] * 4
        for group in (*alone, *halves, *across):
            group.close()


def test_wrong_arguments_of_a_split_raise_on_all_ranks(ranks: Ranks) -> None:
    found = outcomes([lambda g=g: g.split(-1 if g[0].index == 2 else 0) for g in ranks.groups])
    assert isinstance(found[2], ArgumentError) and found[2].argument == "color"
    for error in found[:2]:
        assert isinstance(error, GroupError) and error.rank == 2 and "color is -1" in str(error)
    budgets = outcomes([lambda g=g: g.split(0, max_blocks=10_000) for g in ranks.groups])
    assert all(isinstance(error, ArgumentError) and error.argument == "max_blocks" for error in budgets)
    gc.collect()
    work(ranks)


def test_a_failure_in_one_subgroup_leaves_the_other_working(ranks: Ranks) -> None:
    subs = ranks.each(lambda group: group.split(0))

    def call(position: int) -> None:
        if position:
            timed_out(subs[position], lambda: call_and_wait(subs[position]))

    together([lambda p=p: call(p) for p in range(3)])
    work(ranks)
    together([sub.reset for sub in subs])
    for result in together([lambda sub=sub: allreduce(sub) for sub in subs]):
        assert (result == 7).all()
    for sub in subs:
        sub.close()


def test_a_group_fills_its_devices_until_another_one_is_opened_on_any_of_them(rng: np.random.Generator) -> None:
    """The grids of all ranks become smaller when another group is opened, and stay small after that group is closed."""
    hosts = [rng.standard_normal(1000).astype(np.float32) for _ in range(3)]

    def call(group: df.Group) -> tuple[int, np.ndarray]:
        large = df.allreduce.prepare(group, group[0].empty(1 << 20, "float32"), algo="push_one_shot")
        x = group[0].array(hosts[group[0].index])
        return large.launches[0][0].grid[0], df.allreduce(group, x, algo="push_one_shot").numpy()

    with connected(3, max_blocks=None, workspace_bytes=1 << 24, machine={"sm_count": 80}) as ranks:
        wide = ranks.each(call)
        with pytest.raises(ArgumentError, match="shared with an open group of 3 ranks in several processes"):
            df.Group.local([0], driver=ranks.processes[0], max_blocks=1)
        subs = ranks.each(lambda group: group.split(None if group[0].index == 2 else 0, max_blocks=1))
        narrow = ranks.each(call)
        for sub in subs[:2]:
            sub.close()
        after = ranks.each(call)
        df.Group.local([0], driver=ranks.processes[0], max_blocks=1).close()
    expected = reference.allreduce(hosts)
    for found in (wide, narrow, after):
        assert len({grid for grid, _ in found}) == 1
        assert all((result == expected).all() for _, result in found)
    assert wide[0][0] > narrow[0][0] == after[0][0]


def test_a_local_group_splits_by_lists() -> None:
    with df.emu.Machine(devices=4) as machine, df.Group.local(4, driver=machine, max_blocks=4) as group:
        even, odd, again, none = group.split([0, 1, 0, None], [1, 0, 0, 0])
        assert even is again and none is None and odd.size == 1
        assert [rank.device.index for rank in even] == [2, 0]
        xs = [rank.array(np.full(64, 1 << rank.index, np.float32)) for rank in even]
        assert (df.allreduce(even, xs)[0].numpy() == 3).all()
        with pytest.raises(ArgumentError, match="a list of 4"):
            group.split(0)
        even.close()
        odd.close()
