# SPDX-License-Identifier: Apache-2.0
"""Multicast memory of a group exists on all ranks or on none, whichever driver call of whichever rank fails."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from multicast_forms import BIND

import drvfuse as df
from drvfuse.comm import multicast
from drvfuse.errors import ArgumentError, DriverError, MulticastError
from drvfuse.runtime import multicast as objects
from drvfuse.runtime.lifetime import flush

pytestmark = pytest.mark.emulated

UNIT = 2 << 20
DEVICES = [2, 0, 1]  # devices by rank, in another order than the ranks

RANKS = {
    "cuMulticastGetGranularity": [0, 0],
    "cuMemGetAllocationGranularity": [0, 1, 2] * 2,
    "cuMemCreate": [0, 1, 2],
    "cuMemAddressReserve": [0, 1, 2, 0],
    "cuDeviceCanAccessPeer": [0, 0, 1, 1, 2, 2],
    "cuMulticastCreate": [0],
    "cuMulticastAddDevice": [0, 1, 2],
    BIND: [0, 1, 2],
    "cuMemMap": [0, 1, 2, 0],
    "cuMemSetAccess": [0, 1, 2, 0, 1, 2],
}
"""Every driver call of a set-up, and the ranks that make it, in order."""


@pytest.fixture(scope="module")
def machine() -> Iterator[df.emu.Machine]:
    with df.emu.Machine(devices=4) as machine:
        yield machine


@pytest.fixture(scope="module")
def group(machine: df.emu.Machine) -> Iterator[df.Group]:
    with df.Group.local(DEVICES, driver=machine, workspace_bytes=1 << 20, max_blocks=4) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_stays(machine: df.emu.Machine, group: df.Group) -> Iterator[None]:
    """A group of three devices. After each test nothing is left allocated, and the group can still make multicast
    memory.
    """
    before = machine.held()
    yield
    machine.injected.clear()
    gc.collect()
    flush(group.driver)
    assert machine.held() == before
    with group.symmetric(UNIT, multicast=True):
        pass
    assert machine.held() == before


@pytest.fixture
def own_machine() -> Iterator[df.emu.Machine]:
    with df.emu.Machine(devices=3) as machine:
        yield machine


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts at the set-up, in seconds. They are recorded, and nothing sleeps."""
    found: list[float] = []
    monkeypatch.setattr("drvfuse.comm.multicast.time.sleep", found.append)
    return found


def failure(group: df.Group) -> MulticastError:
    with pytest.raises(MulticastError) as caught:
        group.symmetric(UNIT, multicast=True)
    return caught.value


def test_the_failing_calls_cover_every_driver_call_of_a_set_up(
    machine: df.emu.Machine, group: df.Group, counted_calls: Callable[..., list[str]]
) -> None:
    # this call makes the devices cache their attributes, which the counted calls would query otherwise
    group.symmetric(UNIT, multicast=True).close()
    buffers: list[df.SymmetricBuffer] = []
    made = counted_calls(group.driver, lambda: buffers.append(group.symmetric(UNIT, multicast=True)))
    buffers[0].close()
    before = ("cuStreamIsCapturing", "cuCtxPushCurrent", "cuCtxPopCurrent")
    assert Counter(name for name in made if name not in before) == {name: len(of) for name, of in RANKS.items()}


@pytest.mark.parametrize("function", RANKS)
def test_a_failing_call_leaves_nothing_on_any_rank(machine: df.emu.Machine, group: df.Group, function: str) -> None:
    """Each driver call fails on each rank with each error code for which the set-up is not tried again. One typed
    error names the call, the rank and the code.
    """
    before = machine.held()
    for (place, rank), code in itertools.product(enumerate(RANKS[function]), (1, 2, 401, 800, 801, 999)):
        machine.inject(function, code, after=place)
        error = failure(group)
        assert (error.call, error.rank, error.code) == (function, rank, code)
        assert str(error).startswith(f"rank {rank}, in a multicast set-up that all ranks have taken back: {function}(")
        assert f"failed with {error.name} ({code})" in str(error)
        assert not getattr(error, "__notes__", [])
        assert machine.held() == before and not any(rule.left for rule in machine.injected)


@pytest.mark.parametrize("function", RANKS)
def test_a_set_up_that_is_not_ready_is_retried_by_all_ranks_a_bounded_number_of_times(
    machine: df.emu.Machine, group: df.Group, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multicast, "ATTEMPTS", 3)
    before = machine.held()
    for place, rank in enumerate(RANKS[function]):
        left: list[float] = []

        def again(seconds: float, place: int = place, left: list[float] = left) -> None:
            left.append(seconds)
            assert machine.held() == before  # every rank has undone its part before any rank tries again
            machine.inject(function, 802, after=place)

        monkeypatch.setattr("drvfuse.comm.multicast.time.sleep", again)
        machine.inject(function, 802, after=place)
        error = failure(group)
        assert (error.call, error.rank, error.code, len(left)) == (function, rank, 802, 2)
        assert machine.held() == before and not any(rule.left for rule in machine.injected)


def test_a_set_up_waits_for_a_late_rank(
    group: df.Group, machine: df.emu.Machine, pauses: list[float], counted_calls: Callable[..., list[str]]
) -> None:
    """While a rank is late, the set-up is tried again: in every attempt all ranks begin with a new multicast object."""
    machine.inject(BIND, 802, device=0, times=4)  # device 0 is that of rank 1
    buffers: list[df.SymmetricBuffer] = []
    counts = Counter(counted_calls(group.driver, lambda: buffers.append(group.symmetric(UNIT, multicast=True))))
    assert buffers[0].multicast_ptr is not None and machine.held()["multicast"] == 1
    buffers[0].close()
    assert pauses == [multicast.PAUSE_SECONDS] * 4
    assert (counts["cuMulticastCreate"], counts["cuMulticastAddDevice"]) == (5, 5 * 3)
    assert (counts[BIND], counts["cuMulticastUnbind"]) == (4 * 2 + 3, 4)


def test_attempts_are_bounded_and_end_at_an_interrupt(
    machine: df.emu.Machine, group: df.Group, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.inject(BIND, 802, device=1, times=1000)
    error = failure(group)
    assert error.code == 802 and len(pauses) == multicast.ATTEMPTS - 1

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("drvfuse.comm.multicast.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.symmetric(UNIT, multicast=True)


def test_an_interrupt_during_a_set_up_undoes_all_of_it(
    machine: df.emu.Machine, group: df.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("create", "add", "bind", "map_object", "set_access"):
        with monkeypatch.context() as patch:
            patch.setattr(multicast, step, interrupt)
            with pytest.raises(KeyboardInterrupt):
                group.symmetric(UNIT, multicast=True)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_failing_undo_is_reported_with_the_first_failure(machine: df.emu.Machine, group: df.Group) -> None:
    machine.inject("cuMemMap", 401, after=3)
    machine.inject("cuMulticastUnbind", 999, device=0)
    error = failure(group)
    assert (error.call, error.code) == ("cuMemMap", 401)
    (note,) = error.__notes__
    assert "Undoing the earlier steps failed too: cuMulticastUnbind(" in note


def test_there_is_no_retry_after_an_undo_that_failed(
    machine: df.emu.Machine, group: df.Group, pauses: list[float]
) -> None:
    machine.inject(BIND, 802, device=1)
    machine.inject("cuMulticastUnbind", 999, device=2)
    error = failure(group)
    assert (error.call, error.code, pauses) == (BIND, 802, [])
    assert "Undoing the earlier steps failed too: cuMulticastUnbind(" in error.__notes__[0]


def test_a_group_works_after_a_failed_set_up(own_machine: df.emu.Machine, rng: np.random.Generator) -> None:
    with df.Group.local(DEVICES, driver=own_machine, workspace_bytes=1 << 20, max_blocks=4) as group:
        hosts = [rng.integers(-9, 9, 200).astype(np.float32) for _ in group]
        xs = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
        own_machine.inject(BIND, 401, after=1)
        failure(group)
        for result in df.allreduce(group, xs):
            np.testing.assert_array_equal(result.numpy(), sum(hosts))
        group.synchronize()


def outcome(rank: int, code: int) -> MulticastError:
    return MulticastError(BIND, "", code, "CUDA_ERROR", "", (), rank)


def test_the_agreed_failure_does_not_depend_on_the_order_of_ranks() -> None:
    late, broken, other = outcome(0, 802), outcome(1, 401), outcome(2, 1)
    for given in itertools.permutations([None, late, broken, other]):
        assert multicast.agreed(given) is broken
    for given in itertools.permutations([None, late, outcome(3, 802)]):
        assert multicast.agreed(given) is late
    assert multicast.agreed([None, None]) is None


# Mutants: faults planted into the set-up. The first two bind memory before all devices are added. `Multicast` refuses
# such a bind. Without the refusal the bind would wait for ever, and the emulated driver would report a deadlock.


def add_and_bind(group: df.Group, patch: pytest.MonkeyPatch) -> None:
    """Each rank binds right after it has added its own device, before the others have added theirs."""

    def both(team: multicast.Team, item: df.Multicast) -> None:
        for rank, device in team.places.items():
            with multicast.step_of(rank):
                item.add(device)
                item.bind_memory(device, objects.PhysicalMemory(device, item.nbytes))

    patch.setattr(multicast, "add", both)
    patch.setattr(multicast, "bind", lambda *_: None)


def skip_the_vote(group: df.Group, patch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails to add its device and continues as if the call had succeeded."""
    original = multicast.step_of

    @contextlib.contextmanager
    def silent(rank: int) -> Iterator[None]:
        try:
            with original(rank):
                yield
        except MulticastError as error:
            if (rank, error.call) != (1, "cuMulticastAddDevice"):
                raise

    group.driver.machine.inject("cuMulticastAddDevice", 401, device=DEVICES[1])  # type: ignore[union-attr]
    patch.setattr(multicast, "step_of", silent)


@pytest.mark.parametrize("mutant", [add_and_bind, skip_the_vote])
@pytest.mark.parametrize("guard", [True, False], ids=["guard", "driver"])
def test_a_bind_before_all_devices_are_added_is_caught(
    group: df.Group, machine: df.emu.Machine, monkeypatch: pytest.MonkeyPatch, mutant: Any, guard: bool
) -> None:
    with monkeypatch.context() as patch:
        mutant(group, patch)
        if not guard:
            patch.setattr(df.Multicast, "_require_team", lambda self, what: None)
        with pytest.raises(ArgumentError if guard else MulticastError) as caught:
            group.symmetric(UNIT, multicast=True)
    if guard:
        assert caught.value.argument == "the set of added devices"  # type: ignore[union-attr]
    else:
        assert caught.value.call == BIND  # type: ignore[union-attr]
        assert machine.reports.pop().kind == "deadlock"


@pytest.mark.parametrize("change", [(UNIT, 0), (0, UNIT)], ids=["offset", "size"])
def test_an_unbind_of_another_range_is_caught(
    own_machine: df.emu.Machine, monkeypatch: pytest.MonkeyPatch, change: tuple[int, int]
) -> None:
    """The emulated driver refuses the unbind, and its report states the range that was bound."""
    original = objects._unbind
    shift, cut = change

    def wrong(driver: Any, handle: Any, bound: Any) -> None:
        original(driver, handle, bound._replace(offset=bound.offset + shift, nbytes=bound.nbytes - cut - shift))

    with df.Group.local(3, driver=own_machine, workspace_bytes=1 << 20, max_blocks=4) as group:
        buffer = group.symmetric(2 * UNIT, multicast=True)
        with monkeypatch.context() as patch, pytest.raises(DriverError, match="cuMulticastUnbind"):
            patch.setattr(objects, "_unbind", wrong)
            buffer.close()
        assert [report.kind for report in own_machine.reports] == ["multicast"] * 3
        assert "it needs a range as it was bound ([0x0, 0x400000))" in own_machine.reports[-1].message
