# SPDX-License-Identifier: Apache-2.0
"""Virtual time that follows wall time."""

from __future__ import annotations

import pytest

from drvfuse.emu.machine.process.lock import MachineLock
from drvfuse.emu.machine.run import wall_time
from drvfuse.emu.machine.run.wall_time import WallTime


class Wall:
    """A fake wall clock, in seconds, and the arguments of all calls of `pass_time`, by which `WallTime` advances
    virtual time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: float) -> None:
        self.now, self._cost = 100.0, cost
        self.passed: list[tuple[int, int]] = []
        monkeypatch.setattr(wall_time.time, "monotonic", lambda: self.now)

    def pass_time(self, ns: int, resumes: int) -> bool:
        self.passed.append((ns, resumes))
        self.now += self._cost
        return False

    def go(self, time: WallTime, seconds: float) -> None:
        self.now += seconds
        time.go()


def test_elapsed_wall_time_is_added_to_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall(monkeypatch, cost=0.0)
    time = WallTime(MachineLock(), wall.pass_time)
    for _ in range(3):
        wall.go(time, 0.25)
    assert [ns for ns, _ in wall.passed] == [250_000_000] * 2
    time.stop()
    wall.go(time, 0.25)
    wall.go(time, 0.125)
    assert [ns for ns, _ in wall.passed][2:] == [125_000_000]


def test_time_spent_on_advancing_the_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall(monkeypatch, cost=0.0625)
    time = WallTime(MachineLock(), wall.pass_time)
    for _ in range(3):
        wall.go(time, 0.125)
    assert [ns for ns, _ in wall.passed] == [125_000_000, 187_500_000]


def test_wall_time_of_a_long_call_of_another_thread_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall(monkeypatch, cost=0.0)
    time = WallTime(MachineLock(), wall.pass_time)
    wall.go(time, 0.0)
    wall.go(time, 20.0)
    wall.go(time, 0.25)
    assert [ns for ns, _ in wall.passed] == [500_000_000, 250_000_000]


def test_a_thread_that_waits_for_the_lock_gets_most_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, wall = MachineLock(), Wall(monkeypatch, cost=0.0625)
    time = WallTime(lock, wall.pass_time)
    wall.go(time, 0.0)
    wall.go(time, 0.125)
    resumes = wall.passed[0][1]
    lock.pressed = wall.now
    for _ in range(5):  # as another thread wants the lock, only two of the five calls advance virtual time
        wall.go(time, 0.0625)
    assert [ns for ns, _ in wall.passed] == [125_000_000, 125_000_000, 250_000_000]
    assert all(asked < resumes for _, asked in wall.passed[1:])
