# SPDX-License-Identifier: Apache-2.0
"""What is made of records: one time axis, figures, a Chrome trace, tables, an image."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from trace_support import inputs, made

import drvfuse as df
from drvfuse.errors import ArgumentError, Unsupported
from drvfuse.trace import chrome, clocks, decode, layout, statistics
from drvfuse.trace.clocks import VIRTUAL, Clock
from drvfuse.trace.plot import plot
from drvfuse.trace.summary import summary

LOAD, WAIT, STORE = (layout.ROLES.index(role) for role in ("load", "wait", "store"))
EXACT = Clock(resolution_ns=1.0, cycles_per_ns=2.0, offset_ns=0.0, error_ns=0.0)


def word(role: int, clock: int, peer: int = -1) -> int:
    return (role + 1) << 56 | (peer + 1) << 48 | clock % 2**48


def block(entry_ns, entry, exit_ns, leave, *events, room=4, count=None, sm=3):
    """The words of a block; not ended if `leave` is None."""
    head = [entry_ns, (sm + 1) << 48 | entry % 2**48, exit_ns]
    head.append(0 if leave is None else (len(events) if count is None else count) << 48 | leave % 2**48)
    return [*head, 99, *events, *[0] * (room - len(events))]


def records(*blocks, clock=EXACT, rank=0, room=4):
    section = SimpleNamespace(rank=rank, launch=0, kernel="k", blocks=len(blocks), events=room, offset=8)
    words = np.array([7, *(w for b in blocks for w in b)], np.uint64)
    return decode.records([section], {rank: words}, {rank: clock})


def test_phases_follow_each_other_and_waits_begin_at_the_phase_before():
    start = 2**48 - 100  # the clock's 48 bits wrap inside the block
    events = (
        word(LOAD, start + 40),
        word(WAIT, start + 90, peer=0),
        word(WAIT, start + 300, peer=5),
        word(STORE, start + 320),
    )
    found = records(block(10**18, start, 10**18 + 200, start + 400, *events))
    assert found["role"].tolist() == ["block", "load", "wait", "wait", "store"]
    assert found["peer"].tolist() == [-1, -1, 0, 5, -1]
    assert found["start"].tolist() == [0, 0, 40, 40, 40]
    assert found["end"].tolist() == [400, 40, 90, 300, 320]
    assert found["start_ns"].tolist() == [0, 0, 20, 20, 20]
    assert found["end_ns"].tolist() == [200, 20, 45, 150, 160]
    assert set(found["sm"]) == {3}


def test_what_an_earlier_launch_left_is_no_record():
    stale = word(STORE, 500)
    ended = block(1000, 900, 1100, 1100, word(LOAD, 1000), stale, count=1)
    running = block(1000, 900, 0, None, word(LOAD, 1000), stale)
    fresh = [0] * 9
    found = records(ended, running, fresh)
    assert found[["block", "role"]].tolist() == [(0, "block"), (0, "load"), (1, "block"), (1, "load")]
    assert found["end"].tolist() == [200, 100, -1, 100]
    assert np.isnan(found["end_ns"]).tolist() == [False, False, True, False]


def test_events_that_found_no_room_are_not_read():
    found = records(block(0, 0, 10, 20, *(word(LOAD, n) for n in (5, 6)), room=2, count=9), room=2)
    assert found["end"].tolist() == [20, 5, 6]


def test_the_exit_narrows_down_where_in_its_tick_the_entry_was():
    coarse = Clock(resolution_ns=1000.0, cycles_per_ns=1.0, offset_ns=0.0, error_ns=0.0)
    # It lasted 700 ns and ended a tick later: the entry was in the last 700 ns of its tick; else in the first 300.
    late = block(5000, 0, 6000, 700)
    early = block(5000, 0, 5000, 700)
    found = records(late, early, clock=coarse)
    assert found["start_ns"].tolist() == [650 - 150, 0]
    # A long block measures its own rate.
    found = records(block(5000, 0, 5000 + 4_000_000, 2_000_000, word(LOAD, 1_000_000)), clock=coarse)
    assert found["end_ns"].tolist() == [4_000_000, 2_000_000]


def test_ranks_lie_on_the_clock_of_the_first():
    sections = [SimpleNamespace(rank=r, launch=0, kernel="k", blocks=1, events=0, offset=0) for r in (0, 1)]
    words = {
        r: np.array(block(10**18 + ns, 5, 10**18 + ns + 50, 105, room=0), np.uint64) for r, ns in ((0, 0), (1, 900))
    }
    ahead = Clock(resolution_ns=1.0, cycles_per_ns=2.0, offset_ns=870.25, error_ns=3.0)
    found = decode.records(sections, words, {0: EXACT, 1: ahead})
    assert found["start_ns"].tolist() == [0, 29.75] and found["end_ns"].tolist() == [50, 79.75]


def test_an_offset_lies_between_the_narrowest_bounds():
    random = np.random.default_rng(1)
    offset, sent = 12_345, np.cumsum(random.integers(1000, 3000, 200))
    there, back = random.integers(200, 900, (2, 200))
    middle, error = clocks.bounds(sent, sent + there + back, sent + there + offset)
    assert abs(middle - offset) <= error < 400


@pytest.mark.gpus(2)
def test_clocks_of_the_driver_under_test(group, driver):
    trace = df.Trace(group)
    assert len(trace.clocks) == group.size and trace.clocks[0].offset_ns == trace.clocks[0].error_ns == 0
    if driver == "emu":
        assert set(trace.clocks) == {VIRTUAL}
    else:
        for clock in trace.clocks:
            assert 1 <= clock.resolution_ns <= 2000 and 0.2 < clock.cycles_per_ns < 4
            assert clock.error_ns < 5000
    single = df.Trace(group[1].device)
    assert single.clocks[0].error_ns == 0


SAMPLE = made(
    (0, 0, 0, "block", -1, 0, 1000),
    (0, 0, 0, "load", -1, 0, 300),
    (0, 0, 0, "wait", 0, 300, 310),
    (0, 0, 0, "wait", 1, 300, 700),
    (0, 0, 0, "barrier", -1, 300, 720),
    (0, 0, 0, "load", -1, 720, 1000),
    (0, 0, 1, "block", -1, 100, 600),
    (0, 0, 1, "load", -1, 100, 600),
    (1, 0, 0, "block", -1, 400, 900),
    (1, 0, 0, "wait", 0, 500, 520),
    (1, 0, 0, "barrier", -1, 500, 900),
)


def test_phases_add_up_without_waits():
    found = {(phase.rank, phase.role): phase for phase in statistics.phases(SAMPLE)}
    assert list(found) == [(0, "load"), (0, "barrier"), (1, "barrier")]
    load = found[0, "load"]
    assert (load.mean, load.longest, load.share) == pytest.approx((1.08 / 2, 0.58, 1.08 / 1.5))
    assert found[1, "barrier"].mean == pytest.approx(0.4)


def test_skew_and_the_slowest_block():
    zero, one = statistics.skews(SAMPLE)
    assert (zero.first, zero.last, zero.end, zero.slowest, zero.block, zero.sm) == pytest.approx((0, 0.1, 1, 1, 0, 7))
    assert (one.first, one.last, one.end, one.block) == pytest.approx((0.4, 0.4, 0.9, 0))


def test_who_waited_for_whom():
    zero, one = statistics.waits(SAMPLE)
    assert (zero.rank, zero.peer, zero.mean, zero.last) == pytest.approx((0, 1, 0.4, 1.0))
    assert (one.rank, one.peer, one.longest, one.last) == pytest.approx((1, 0, 0.02, 1.0))
    assert statistics.waits(SAMPLE[:2]) == []


def check_chrome(found):
    """What the trace event format asks of a JSON object of complete events and metadata."""
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"} and found["displayTimeUnit"] in ("ms", "ns")
    slices, names = [], set()
    for event in found["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
            names.add((event["name"], event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["args"], dict)
            slices.append(event)
    open_slices: dict[tuple[int, int], list[float]] = {}
    for event in slices:
        thread = (event["pid"], event["tid"])
        assert ("thread_name", *thread) in names and ("process_name", event["pid"], 0) in names
        stack = open_slices.setdefault(thread, [])
        while stack and stack[-1] <= event["ts"] + 1e-6:
            stack.pop()
        assert not stack or event["ts"] + event["dur"] <= stack[-1] + 1e-6, "slices of a thread nest"
        stack.append(event["ts"] + event["dur"])
    return slices


def test_a_chrome_trace_has_a_process_a_rank_and_a_thread_a_block():
    clocks_of = {0: EXACT, 1: Clock(32.0, 1.98, 5.0, math.inf)}
    found = json.loads(json.dumps(chrome.trace_object(SAMPLE, clocks_of), allow_nan=False))
    slices = check_chrome(found)
    assert {(s["pid"], s["tid"]) for s in slices} == {(0, 0), (0, 1), (1, 0)}
    assert len(slices) == len(SAMPLE)
    (wait,) = [s for s in slices if s["name"] == "wait for rank 1"]
    assert (wait["ts"], wait["dur"], wait["args"]) == (0.3, 0.4, {"cycles": 400, "peer": 1})
    assert found["otherData"]["clocks"]["1"]["error_ns"] is None
    assert found["otherData"]["clocks"]["0"] == {
        "resolution_ns": 1.0, "cycles_per_ns": 2.0, "offset_ns": 0.0, "error_ns": 0.0,
    }  # fmt: skip


def test_launches_that_overlap_get_threads_of_their_own():
    overlapping = made(
        (0, 0, 0, "block", -1, 0, 100),
        (0, 0, 0, "load", -1, 0, 100),
        (0, 1, 0, "block", -1, 90, 200),
        (0, 1, 0, "load", -1, 90, 200),
        (0, 2, 0, "block", -1, 150, 300),
        (0, 3, 0, "block", -1, 400, -1),
        (0, 3, 0, "load", -1, 400, 450),
    )
    slices = check_chrome(chrome.trace_object(overlapping, {0: VIRTUAL}))
    threads = {s["args"]["launch"]: s["tid"] for s in slices if "launch" in s["args"]}
    assert threads[0] == threads[2] == 0 != threads[1] and set(threads) == {0, 1, 2}


@pytest.mark.gpus(2)
def test_files_of_a_real_trace(group, rng, tmp_path):
    trace = df.Trace(group)
    xs, gammas = inputs(group, rng, (9, 256)), inputs(group, rng, 256)
    for algo in ("one_stage", "two_stage", "naive"):
        df.allreduce(group, xs, algo=algo, trace=trace)
        df.allreduce_rmsnorm_fp8(group, xs, gammas, epsilon=1e-6, algo=algo, trace=trace)
    trace.chrome(tmp_path / "t.json")
    slices = check_chrome(json.loads((tmp_path / "t.json").read_text()))
    assert {s["pid"] for s in slices} == set(range(group.size)) and len(slices) == len(trace.records())
    pytest.importorskip("matplotlib")
    trace.plot(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_tables_name_phases_ranks_and_who_was_waited_for():
    pytest.importorskip("rich")
    text = summary(SAMPLE, {0: EXACT, 1: Clock(32.0, 1.98, 5.0, 310.0)})
    assert "kernel: 1 launch, 2 blocks a rank" in text
    (load,) = [line.split() for line in text.splitlines() if line.strip().startswith("load")]
    assert load == ["load", "0.54", "0.58", "72%"]
    assert "0 (SM 7)" in text and "who waited for whom" in text
    assert "steps of 32 ns, SM clock 1980 MHz, aligned to +- 310 ns (offset 5 ns)" in text
    assert summary(SAMPLE[:0], {}) == "nothing was recorded\n"


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"drvfuse\[cli\]"):
        summary(SAMPLE, {})
    with pytest.raises(Unsupported, match=r"drvfuse\[plot\]"):
        plot(tmp_path / "t.png", SAMPLE)
    assert not list(tmp_path.iterdir())


def test_an_image_of_nothing_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ArgumentError):
        plot(tmp_path / "t.png", SAMPLE[:0])
