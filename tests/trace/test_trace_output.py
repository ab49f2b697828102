# SPDX-License-Identifier: Apache-2.0
"""What drvfuse computes from trace records: a common time axis, figures, a Chrome trace, tables and an image."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from trace_support import inputs, made

import drvfuse as df
from drvfuse.errors import DrvfuseError, Unsupported
from drvfuse.trace import chrome, clocks, decode, layout, statistics
from drvfuse.trace.clocks import VIRTUAL, Clock
from drvfuse.trace.plot import plot
from drvfuse.trace.summary import summary

LOAD, STORE, BARRIER = (layout.ROLES.index(role) for role in ("load", "store", "barrier"))
EXACT = Clock(resolution_ns=1.0, cycles_per_ns=2.0, offset_ns=0.0, error_ns=0.0)


def lap(role: int, clock: int) -> int:
    return (clock + (role + 1 << 48)) % 2**64


def block(entry_ns, entry, exit_ns, *laps, exit, waits=(), room=6, sm=3):
    """The words that a block writes to a trace with space for `room` phases."""
    words = [entry_ns, entry, exit_ns + (sm << 48), exit, *waits, *laps]
    return [*(word % 2**64 for word in words), *[0] * (layout.block_words(room, len(waits)) - len(words))]


def section(blocks, room=6, rounds=0, peers=0, rank=0, offset=16):
    words = layout.block_words(room, rounds * peers)
    return SimpleNamespace(
        rank=rank,
        launch=0,
        kernel="k",
        blocks=blocks,
        phases=room,
        rounds=rounds,
        peers=peers,
        offset=offset,
        words=words,
    )


def records(*blocks, clock=EXACT, **rest):
    words = np.array([7, 7, *(w for b in blocks for w in b)], np.uint64)
    return decode.records([section(len(blocks), **rest)], {0: words}, {0: clock})


@pytest.mark.parametrize("start", [2**48 - 100, 2**64 - 100])  # the sums of clock values wrap around inside the block
def test_phases_follow_each_other_and_waits_lie_in_their_barrier(start):
    laps = (lap(LOAD, start + 40), lap(BARRIER, start + 310), lap(STORE, start + 320), lap(BARRIER, start + 390))
    waits = (start + 90, start + 300, start + 385, 0)
    found = records(block(10**18, start, 10**18 + 200, *laps, exit=start + 400, waits=waits), rounds=2, peers=2)
    assert found["role"].tolist() == ["block", "load", "barrier", "wait", "wait", "store", "barrier", "wait", "finish"]
    assert found["peer"].tolist() == [-1, -1, -1, 1, 0, -1, -1, 0, -1]
    assert found["start"].tolist() == [0, 0, 40, 40, 40, 310, 320, 320, 390]
    assert found["end"].tolist() == [400, 40, 310, 300, 90, 320, 390, 385, 400]
    assert found["start_ns"].tolist() == [0, 0, 20, 20, 20, 155, 160, 160, 195]
    assert found["end_ns"].tolist() == [200, 20, 155, 150, 45, 160, 195, 192.5, 200]
    assert set(found["sm"]) == {3}


def test_a_block_that_has_not_run_has_no_records():
    ran = block(1000, 900, 1100, exit=1000, waits=(0, 0))
    found = records([0] * len(ran), ran, rounds=1, peers=2)
    assert found[["block", "role"]].tolist() == [(1, "block"), (1, "finish")]
    assert found["end"].tolist() == [100, 100]


def test_more_phases_than_were_expected_are_an_error():
    laps = [lap(LOAD, 1 + n) for n in range(6)]
    assert len(records(block(0, 0, 10, *laps[:5], exit=10))) == 7
    with pytest.raises(DrvfuseError, match="recorded 7 phases or more in a block where 6"):
        records(block(0, 0, 10, *laps, exit=10))


def test_entry_and_exit_together_bound_the_start_within_a_clock_tick():
    coarse = Clock(resolution_ns=1000.0, cycles_per_ns=1.0, offset_ns=0.0, error_ns=0.0)
    # The global timer has ticks of 1000 ns, and both blocks last 700 ns. One ends in the tick after the one in which it
    # began, so it began in the last 700 ns of a tick. The other ends in the same tick, so it began in the first 300 ns.
    late = block(5000, 0, 6000, exit=700)
    early = block(5000, 0, 5000, exit=700)
    found = records(late, early, clock=coarse)
    assert found["start_ns"].tolist() == [500, 500, 0, 0]
    # For a long block, the clock rate is computed from the block's own entry and exit.
    found = records(block(5000, 0, 5000 + 4_000_000, lap(LOAD, 1_000_000), exit=2_000_000), clock=coarse)
    assert found["end_ns"].tolist() == [4_000_000, 2_000_000, 4_000_000]


def test_times_of_all_ranks_are_on_the_clock_of_the_first():
    sections = [section(1, rank=rank, offset=0) for rank in (0, 1)]
    words = {r: np.array(block(10**18 + ns, 5, 10**18 + ns + 50, exit=105), np.uint64) for r, ns in ((0, 0), (1, 900))}
    ahead = Clock(resolution_ns=1.0, cycles_per_ns=2.0, offset_ns=870.25, error_ns=3.0)
    found = decode.records(sections, words, {0: EXACT, 1: ahead})
    assert found["start_ns"].tolist() == [0, 0, 29.75, 29.75]
    assert found["end_ns"].tolist() == [50, 50, 79.75, 79.75]


def test_an_offset_lies_between_the_narrowest_bounds():
    random = np.random.default_rng(1)
    offset, sent = 12_345, np.cumsum(random.integers(1000, 3000, 200))
    there, back = random.integers(200, 900, (2, 200))
    middle, error = clocks.bounds(sent, sent + there + back, sent + there + offset)
    assert abs(middle - offset) <= error < 400


@pytest.mark.gpus(2)
def test_the_kernels_that_measure_clocks_compile(group):
    """The emulated driver has a single clock, so no other test runs these kernels on it."""
    module = clocks.kernels(group[0].device)
    assert module["trace_ticks"].info.name == "trace_ticks" and module["trace_meet"].info.name == "trace_meet"


@pytest.mark.gpus(2)
def test_clocks_of_the_driver_under_test_can_be_aligned(group, driver):
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


def test_sums_of_phases_exclude_waits():
    found = {(phase.rank, phase.role): phase for phase in statistics.phases(SAMPLE)}
    assert list(found) == [(0, "load"), (0, "barrier"), (1, "barrier")]
    load = found[0, "load"]
    assert (load.mean, load.longest, load.block, load.share) == pytest.approx((1.08 / 2, 0.58, 0, 1.08 / 1.5))
    assert found[1, "barrier"].mean == pytest.approx(0.4)


def test_statistics_have_the_skew_and_the_slowest_block():
    zero, one = statistics.skews(SAMPLE)
    assert (zero.first, zero.last, zero.end, zero.slowest, zero.block, zero.sm) == pytest.approx((0, 0.1, 1, 1, 0, 7))
    assert (one.first, one.last, one.end, one.block) == pytest.approx((0.4, 0.4, 0.9, 0))


def test_statistics_name_the_ranks_that_were_waited_for():
    zero, one = statistics.waits(SAMPLE)
    assert (zero.rank, zero.peer, zero.mean, zero.last) == pytest.approx((0, 1, 0.4, 1.0))
    assert (one.rank, one.peer, one.longest, one.last) == pytest.approx((1, 0, 0.02, 1.0))
    assert statistics.waits(SAMPLE[:2]) == []


def check_chrome(found):
    """Check that `found` satisfies the requirements of the trace event format for complete events and metadata."""
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"} and found["displayTimeUnit"] in ("ms", "ns")
    slices, names = [], set()
    for event in found["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        assert event["pid"] > 0 and (
            event["tid"] > 0 or event["name"] == "process_name"
        )  # Perfetto reserves the number 0
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
            names.add((event["name"], event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["args"], dict)
            slices.append(event)
    open_slices: dict[tuple[int, int], list[int]] = {}
    for event in slices:
        thread = (event["pid"], event["tid"])
        assert ("thread_name", *thread) in names and ("process_name", event["pid"], 0) in names
        start, length = (round(event[key] * 1000) for key in ("ts", "dur"))  # nanoseconds, to which Perfetto rounds
        stack = open_slices.setdefault(thread, [])
        while stack and stack[-1] <= start:
            stack.pop()
        assert not stack or start + length <= stack[-1], "slices of a thread nest"
        stack.append(start + length)
    return slices


def test_a_chrome_trace_has_a_process_per_rank_and_a_thread_per_block():
    clocks_of = {0: EXACT, 1: Clock(32.0, 1.98, 5.0, math.inf)}
    found = json.loads(json.dumps(chrome.trace_object(SAMPLE, clocks_of), allow_nan=False))
    slices = check_chrome(found)
    assert {(s["pid"], s["tid"]) for s in slices} == {(1, 1), (1, 2), (2, 1)}
    assert len(slices) == len(SAMPLE)
    (wait,) = [s for s in slices if s["name"] == "wait for rank 1"]
    assert (wait["ts"], wait["dur"], wait["args"]) == (0.3, 0.4, {"cycles": 400, "peer": 1})
    assert [s["pid"] for s in slices if s["name"] == "wait for itself"] == [1]
    assert found["otherData"]["clocks"]["1"]["error_ns"] is None
    assert found["otherData"]["clocks"]["0"] == {
        "resolution_ns": 1.0, "cycles_per_ns": 2.0, "offset_ns": 0.0, "error_ns": 0.0,
    }  # fmt: skip


def test_overlapping_launches_get_separate_threads():
    overlapping = made(
        (0, 0, 0, "block", -1, 0, 100),
        (0, 0, 0, "load", -1, 0, 100),
        (0, 1, 0, "block", -1, 90, 200),
        (0, 1, 0, "load", -1, 90, 200),
        (0, 2, 0, "block", -1, 150, 300),
    )
    slices = check_chrome(chrome.trace_object(overlapping, {0: VIRTUAL}))
    threads = {s["args"]["launch"]: s["tid"] for s in slices if "launch" in s["args"]}
    assert threads[0] == threads[2] == 1 != threads[1] and set(threads) == {0, 1, 2}


def test_slices_with_fractional_nanoseconds_do_not_overlap(rng):
    ends = np.cumsum(rng.uniform(0.1, 3, 200))
    laps = [(0, 0, 0, "load", -1, start, end) for start, end in zip([0, *ends], ends, strict=False)]
    fractions = made((0, 0, 0, "block", -1, 0, ends[-1]), *laps)
    assert len(check_chrome(chrome.trace_object(fractions, {0: VIRTUAL}))) == 201


@pytest.mark.gpus(2)
def test_a_real_trace_is_written_to_files(group, rng, tmp_path):
    trace = df.Trace(group)
    xs, gammas = inputs(group, rng, (9, 256)), inputs(group, rng, 256)
    for algo in ("one_stage", "two_stage", "naive"):
        df.allreduce(group, xs, algo=algo, trace=trace)
        df.allreduce_rmsnorm_fp8(group, xs, gammas, epsilon=1e-6, algo=algo, trace=trace)
    trace.chrome(tmp_path / "t.json")
    slices = check_chrome(json.loads((tmp_path / "t.json").read_text()))
    assert {s["pid"] for s in slices} == set(range(1, group.size + 1)) and len(slices) == len(trace.records())
    pytest.importorskip("matplotlib")
    trace.plot(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_tables_name_phases_ranks_and_who_was_waited_for():
    text = summary(SAMPLE, {0: EXACT, 1: Clock(32.0, 1.98, 5.0, 310.0)})
    assert "kernel: 1 launch, 2 blocks per rank" in text
    (load,) = [line.split() for line in text.splitlines() if line.strip().startswith("load")]
    assert load == ["load", "36%", "0.54", "0.58", "r0", "b0"]
    assert "0 (SM 7)" in text and "who waited for whom" in text
    assert "steps of 32 ns, SM clock 1980 MHz, aligned to +- 310 ns (offset 5 ns)" in text
    assert "us after the first of all\n" in text
    again = SAMPLE.copy()
    again["launch"] = 1
    assert "us after the first of all, medians of 2 launches\n" in summary(np.concatenate([SAMPLE, again]), {0: EXACT})
    assert summary(SAMPLE[:0], {}) == "nothing was recorded\n"


def test_tables_of_an_emulated_call_explain_its_times_and_end_with_the_finish_phase():
    late = made(
        (0, 0, 0, "block", -1, 0, 50),
        (0, 0, 0, "finish", -1, 10, 50),
        (0, 0, 1, "block", -1, 0, 100),
        (0, 0, 1, "apply_load", -1, 30, 90),
        (0, 0, 1, "finish", -1, 90, 100),
    )
    first, *lines = summary(late, {0: VIRTUAL}).splitlines()
    assert first.startswith("times are by a virtual clock")
    assert [line.split()[0] for line in lines if "%" in line] == ["apply_load", "finish"]


def test_the_error_names_a_missing_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"drvfuse\[plot\]"):
        plot(tmp_path / "t.png", SAMPLE, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("clocks_of", "said"),
    [
        ({0: EXACT}, "first block began -->"),
        ({0: EXACT, 1: Clock(32.0, 1.98, 5.0, 310.0)}, "began; ranks aligned to +- 310 ns -->"),
        ({0: EXACT, 1: Clock(32.0, 1.98, 0.0, math.inf)}, "clocks were not compared -->"),
        ({0: VIRTUAL, 1: VIRTUAL}, "by a virtual clock"),
    ],
)
def test_an_image_states_the_alignment_error_and_the_blocks_shown(clocks_of, said, tmp_path):
    pytest.importorskip("matplotlib")
    blocks = [(0, 0, block, role, -1, block, block + 90) for block in range(40) for role in ("block", "load")]
    plot(tmp_path / "t.svg", made(*blocks), clocks_of)  # matplotlib puts each text into a comment of the SVG
    text = (tmp_path / "t.svg").read_text()
    assert said in text and "<!-- kernel (16 of 40 blocks) -->" in text
    assert "<!-- rank 0 block 0 -->" in text and "<!-- rank 0 block 39 -->" in text


def test_an_empty_image_and_an_unknown_format_are_refused(tmp_path, refused):
    pytest.importorskip("matplotlib")
    refused(lambda: plot(tmp_path / "t.png", SAMPLE[:0], {}), "records", "empty")
    for name in ("t.foo", "t"):
        refused(lambda name=name: plot(tmp_path / name, SAMPLE, {0: EXACT}), "path", "ends in .png")
    assert not list(tmp_path.iterdir())
