# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench host`, and the driver calls that a bare, a prepared and a plain launch make."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import drvfuse as df
from drvfuse.__main__ import main
from drvfuse.bench import host
from drvfuse.runtime.driver import get_driver


@pytest.mark.emulated
def test_the_command_times_every_call_four_ways_and_the_skew_of_collectives(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(host, "BURST", 1)
    monkeypatch.setattr(host, "BURSTS", 1)
    monkeypatch.setattr(host, "SKEWS", 1)
    out = tmp_path / "host.json"
    assert main(["bench", "host", "--driver", "emu", "--gpus", "2", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "mean nothing" in shown and "prepared x" in shown
    results = json.loads(out.read_text())
    assert [result["launches"] for result in results] == [2, 2, 1, 1]
    assert all(result[way] > 0 for result in results for way in ("bare", "prepared", "plain", "graph"))
    assert all(0 <= result["skew"][way] < 1000 for result in results[:2] for way in ("prepared", "graph"))
    assert all("skew" not in result for result in results[2:])


def test_more_gpus_than_there_are_is_refused(capsys):
    assert main(["bench", "host", "--driver", "emu", "--gpus", "9"]) == 2
    assert "--gpus is 9; it must be from 1 to 8" in capsys.readouterr().err


@pytest.mark.emulated
def test_a_launch_makes_its_context_current_and_queries_each_stream_once(counted_calls):
    """Besides the launch itself, the only driver calls make a context current, and ask each stream once whether it is
    captured."""
    with df.emu.Machine(devices=4) as machine, host.cases(get_driver(machine), 4) as cases:
        for case in cases:
            driver, streams = get_driver(machine), len(case.streams)
            for _ in range(2):  # the first call compiles and makes the plan
                case.plain()
                case.prepared.launch()
            case.wait()
            launching = ["cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"] * streams
            assert counted_calls(driver, case.bare) == launching
            assert counted_calls(driver, case.prepared.launch) == ["cuStreamIsCapturing"] * streams + launching
            assert counted_calls(driver, case.plain) == ["cuStreamIsCapturing"] * streams + launching
            case.wait()


def python_calls(call):
    """The number of calls of drvfuse's Python functions that `call()` makes, without those of the emulated driver."""
    emulator, own, files = Path(df.emu.__file__).parent, Path(df.__file__).parent, []

    def record(frame, event, argument):
        # Python 3.12 has no frame for comprehensions
        if event == "call" and not frame.f_code.co_name.startswith("<"):
            files.append(Path(frame.f_code.co_filename))

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sum(own in file.parents and emulator not in file.parents for file in files)


@pytest.mark.emulated
def test_prepared_launches_and_their_preparation_make_few_python_calls():
    """A prepared launch makes at most `launching` Python calls more than a bare launch, and `prepare` makes at most
    `preparing` Python calls if the call's plan exists.
    """
    with df.emu.Machine(devices=2) as machine, host.cases(get_driver(machine), 2) as cases:
        for case, launching, preparing in zip(cases, (15, 15, 8, 8), (112, 245, 100, 115), strict=True):
            case.plain()
            for _ in range(2):
                case.prepared.launch()
            assert python_calls(case.prepared.launch) - python_calls(case.bare) <= launching, case.name
            case.prepare()  # reuses the launch objects of the plain call
            assert python_calls(case.prepare) <= preparing, case.name
            case.wait()
