# SPDX-License-Identifier: Apache-2.0
"""Events as text: order, columns, names of addresses, and the timelines of a race and a deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from drvfuse.emu.abi import EVENTS, EventKind, structs
from drvfuse.emu.findings import deadlock, events, timeline
from drvfuse.emu.findings.blocked import Blocked
from drvfuse.emu.findings.places import Identity
from drvfuse.emu.findings.reports import Place, Report
from drvfuse.emu.findings.timeline import Participant
from drvfuse.emu.space.window import Window
from drvfuse.emu.translate.code import Site

FILE = "/somewhere/barrier.cuh"
SITES = (
    Site("st.release.sys.global.u64", 10, FILE, 26, ()),
    Site("ld.acquire.sys.global.u64", 11, FILE, 31, ()),
    Site("bar.sync", 12, FILE, 57, ()),
    Site("atom.acq_rel.gpu.global.add.u32", 13, "", 0, ()),
)
STORE, LOAD, BARRIER, ATOMIC, NONE = range(5)
GRID, BLOCK = (4, 2, 1), (8, 4, 1)
IDENTITIES = {n: Identity("exchange", device, GRID, BLOCK, SITES) for n, device in ((1, 0), (2, 1), (3, 2), (4, 3))}


def record(kind: str, op: int, block: int, thread: int = 0, site: int = NONE, **fields: int) -> tuple[int, ...]:
    values = {"op": op, "block": block, "thread": thread, "site": site, "kind": EventKind[kind.upper()], **fields}
    return tuple(values.get(name, 0) for name in events.DTYPE.names)


def records(*items: tuple[int, ...]) -> np.ndarray:
    return np.array(list(items), events.DTYPE)


@pytest.fixture
def window() -> Iterator[Window]:
    made = Window(1)
    yield made
    made.close()


@pytest.fixture
def flags(window: Window) -> int:
    return window.alloc(4096, 1, 0xFF, 0xFF)


def body(text: str) -> list[list[str]]:
    """The cells of each row below the line of dashes, without the legend."""
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line) == set("-+"))
    return [[cell.strip() for cell in line.split("|")] for line in lines[rule + 1 :] if "|" in line]


def test_a_ring_buffer_is_read_in_the_order_of_its_events() -> None:
    ring = (structs.Event * EVENTS)()
    for count in (0, 3, EVENTS, EVENTS + 5):
        for n in range(max(0, count - EVENTS), count):
            ring[n % EVENTS].clock = n
        assert events.recent(ring, count)["clock"].tolist() == list(range(max(0, count - EVENTS), count))


def test_an_event_shows_thread_operation_and_address() -> None:
    unknown = record("load", 9, 0, site=LOAD)
    (event,) = events.decode(records(unknown, record("load", 2, 6, 21, LOAD, clock=7, address=64, value=3)), IDENTITIES)
    assert (event.kind, event.kernel, event.device, event.clock) == ("load", "exchange", 1, 7)
    assert (event.block, event.thread) == ((2, 1, 0), (5, 2, 0))
    assert (event.file, event.line, event.opcode) == (FILE, 31, "ld.acquire.sys.global.u64")
    assert (event.address, event.value) == (64, 3)


def test_each_block_has_a_column_and_each_event_a_row(window: Window, flags: int) -> None:
    ring = records(
        record("start", 1, 0),
        record("start", 2, 0),
        record("start", 2, 1),
        record("store", 1, 0, 1, STORE, address=flags + 0x40),
        *(record("store", 2, 0, t, STORE, address=flags + 8 * t) for t in (0, 1, 2)),
        record("load", 1, 0, 1, LOAD, address=flags + 8, value=5, clock=1000),
        record("barrier", 1, 0, 9, BARRIER, clock=1000),
        record("atomic", 2, 0, 0, ATOMIC, address=64, value=1 << 40, clock=2000),
    )
    sides = [Participant(0, (0, 0, 0)), Participant(1, (0, 0, 0))]
    text = timeline.render(events.decode(ring, IDENTITIES), sides, window=window)
    assert max(map(len, text.splitlines())) <= 120
    assert text.splitlines()[0].split(" | ")[1].strip() == "device 0 block 0"
    assert body(text) == [
        ["0", "starts exchange", ""],
        ["", "", "starts exchange"],
        ["", "st.release.sys [A+0x40] t1 (barrier.cuh:26)", ""],
        ["", "", "st.release.sys [A+0x0 ..] t0-t2 (barrier.cuh:26)"],
        ["1000", "ld.acquire.sys [A+0x8] saw 5 t1 (barrier.cuh:31)", ""],
        ["", "barrier 0, t(1, 1, 0) came last (barrier.cuh:57)", ""],
        ["2000", "", "atom.acq_rel.gpu.add [0x40] found 0x100.. (PTX line 13)"],
    ]
    assert text.splitlines()[-1] == f"A: 4096 bytes at 0x{flags:x} (device of device 1)"


def test_only_the_last_rows_are_shown_and_freed_memory_is_marked(window: Window, flags: int) -> None:
    ring = records(*(record("load", 1, 0, 0, LOAD, address=flags, value=n, clock=n) for n in range(50)))
    window.free(flags)
    text = timeline.render(events.decode(ring, IDENTITIES), [Participant(0, (0, 0, 0))], window=window, rows=3)
    assert "(47 earlier events)" in text
    assert [row[0] for row in body(text)] == ["47", "48", "49"]
    assert text.endswith("which was freed")


def test_equal_polls_of_one_source_line_are_one_row_with_a_count(window: Window, flags: int) -> None:
    def poll(block: int, thread: int, word: int, value: int) -> tuple[int, ...]:
        fields = {"address": flags + 8 * word, "value": value, "clock": next(clock)}
        return record("load", 1, block, thread, LOAD, **fields)

    clock = iter(range(10_000))
    ring = records(
        record("store", 1, 0, 3, STORE, address=flags, clock=next(clock)),
        *(poll(t % 2, t // 4 % 8, t // 2 % 2, 1) for t in range(4000)),
        poll(0, 7, 1, 2),
        poll(0, 8, 1, 2),
        record("fence", 1, 0, 3, clock=next(clock)),
        poll(0, 7, 1, 2),
    )
    sides = [Participant(0, (0, 0, 0)), Participant(0, (1, 0, 0))]
    rows = body(timeline.render(events.decode(ring, IDENTITIES), sides, window=window, rows=8, width=130))
    polls = "ld.acquire.sys [A+0x0] saw 1 t0-t7 x1000 (barrier.cuh:31)"
    assert rows[1] == ["1", polls, ""]
    assert rows[2] == ["2", "", polls]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "4001", "4003", "4004"]
    spins = [Blocked((0, 0, 0), (0, 0, 0), "polling", FILE, 31, flags, 1)]
    story = deadlock.of_deadlock([("exchange", 0, spins)], ring, IDENTITIES)
    assert sum("st.release.sys" in line for line in story.splitlines()) == 2, "the writer of the word, and its row"


def test_threads_that_pass_the_wait_of_a_dependent_launch_one_after_another_are_one_row() -> None:
    passed = [record("gdc_wait", 1, 0, t, clock=5 + 2 * t) for t in range(8)]
    ring = records(record("start", 1, 0), *passed, record("gdc_wait", 1, 1, clock=200), record("end", 1, 0, clock=300))
    sides = [Participant(0, (0, 0, 0)), Participant(0, (1, 0, 0))]
    rows = body(timeline.render(events.decode(ring, IDENTITIES), sides))
    assert [row[0] for row in rows] == ["0", "5", "200", "300"]
    assert rows[1][1:] == ["passes griddepcontrol.wait t0-t7 x8", ""]
    assert rows[2][1:] == ["", "passes griddepcontrol.wait t0"]


@pytest.mark.parametrize(
    "kinds, times", [(["barrier"], 50), (["atomic", "fence", "barrier"], 20), (["start", "end"], 3)]
)
def test_repeated_rows_are_folded(kinds: list[str], times: int) -> None:
    clock = iter(range(10_000))
    last = iter(range(10_000))  # a different thread is last at each barrier

    def event(kind: str) -> tuple[int, ...]:
        who = next(last) % 128 if kind == "barrier" else 0
        return record(kind, 1, 0, who, BARRIER if kind == "barrier" else NONE, clock=next(clock))

    ring = records(event("trigger"), *(event(kind) for _ in range(times) for kind in kinds), event("fence"))
    for rows in (32, 2):
        text = timeline.render(events.decode(ring, IDENTITIES), [Participant(0, (0, 0, 0))], rows=rows)
        which = f"the {len(kinds)} rows above" if len(kinds) > 1 else "the row above"
        assert f"({which} {times - 1} times more, until {times * len(kinds)} ns)" in text.splitlines()
        shown = [row[0] for row in body(text)]
        repeated = [str(1 + n) for n in range(len(kinds))]
        assert shown == (["0"] if rows == 32 else []) + repeated + [str(1 + times * len(kinds))]
        assert ("(1 earlier events)" in text) == (rows == 2)


def test_rows_with_different_values_are_not_folded() -> None:
    ring = records(*(record("atomic", 1, 0, 0, STORE, address=64, value=n, clock=n) for n in range(9)))
    text = timeline.render(events.decode(ring, IDENTITIES), [Participant(0, (0, 0, 0))])
    assert len(body(text)) == 9


def test_many_blocks_share_a_column_that_names_them() -> None:
    ring = records(*(record("store", op, 1, 0, STORE, address=64) for op in (1, 2, 3, 4)))
    sides = [Participant(device, (1, 0, 0)) for device in range(4)]
    text = timeline.render(events.decode(ring, IDENTITIES), sides)
    assert [row[1] for row in body(text)] == [f"device {d} block 1" for d in range(4)]
    assert max(map(len, text.splitlines())) <= 120


def race(other: Place, **fields: Any) -> Report:
    own = {
        "kernel": "exchange",
        "file": "/k/pack16.cuh",
        "line": 30,
        "device": 1,
        "block": (1, 0, 0),
        "thread": (3, 0, 0),
    }
    return Report("race", "", **{**own, **fields}, other=other)


def test_a_race_shows_its_two_blocks_only(window: Window, flags: int) -> None:
    ring = records(
        record("store", 1, 0, 0, STORE, address=flags),
        record("store", 1, 1, 0, STORE, address=flags + 8),
        record("load", 2, 1, 0, LOAD, address=flags + 8, value=1),
    )
    other = Place("exchange", "/k/pack16.cuh", 47, 0, (1, 0, 0), (7, 2, 0))
    text = timeline.of_race(race(other, address=flags + 0x100), ring, IDENTITIES, window)
    first, head, *_ = text.splitlines()
    assert first == "the earlier access: exchange on device 0 block 1 t(7, 2, 0) (pack16.cuh:47)"
    assert [cell.strip() for cell in head.split("|")] == ["ns", "device 0 block 1", "device 1 block 1"]
    assert body(text) == [
        ["0", "st.release.sys [A+0x8] t0 (barrier.cuh:26)", ""],
        ["", "", "ld.acquire.sys [A+0x8] saw 1 t0 (barrier.cuh:31)"],
        ["race", "", "races [A+0x100] t3 (pack16.cuh:30)"],
    ]


def test_a_race_within_a_block_shows_its_two_threads() -> None:
    ring = records(
        record("store", 2, 1, 3, STORE, address=64),
        record("store", 2, 1, 4, STORE, address=72),
        record("barrier", 2, 1, 9, BARRIER),
        record("load", 2, 1, 5, LOAD, address=64, value=1),
    )
    text = timeline.of_race(race(Place("exchange", None, None, 1, (1, 0, 0), (5, 0, 0))), ring, IDENTITIES)
    assert [cell.strip() for cell in text.splitlines()[1].split("|")][1:] == [
        "device 1 block 1 thread 5",
        "device 1 block 1 thread 3",
    ]
    whole = "barrier 0, t(1, 1, 0) came last (barrier.cuh:57)"
    assert [row[1:] for row in body(text)] == [
        ["", "st.release.sys [0x40] t3 (barrier.cuh:26)"],
        [whole, whole],
        ["ld.acquire.sys [0x40] saw 1 t5 (barrier.cuh:31)", ""],
        ["", "races t3 (pack16.cuh:30)"],
    ]


def test_a_race_with_a_copy_shows_one_block() -> None:
    text = timeline.of_race(race(Place("copy", None, None, 0, None, None)), records(), IDENTITIES)
    assert text.splitlines()[0] == "the earlier access: copy on device 0"
    assert text.splitlines()[1].split("|")[1].strip() == "device 1 block 1"


def test_a_deadlock_shows_which_blocks_wrote_the_word(window: Window, flags: int) -> None:
    spin = {"status": "polling", "file": FILE, "line": 31}
    waits = [
        ("exchange", 0, [Blocked((b, 0, 0), (1, 0, 0), **spin, address=flags + 64 * b, seen=0) for b in (0, 1)]),
        ("exchange", 1, [Blocked((0, 0, 0), (t, 0, 0), "at barrier 0", FILE, 57) for t in range(32)]),
    ]
    ring = records(
        record("store", 1, 0, 0, STORE, address=flags + 8),
        record("store", 2, 0, 2, STORE, address=flags + 64),
        record("load", 2, 0, 2, LOAD, address=flags + 8, value=1),
    )
    text = deadlock.of_deadlock(waits, ring, IDENTITIES, window)
    assert text.splitlines()[:6] == [
        "A+0x0, holds 0: polled by device 0 block 0 thread 1 (barrier.cuh:31)",
        "  nobody wrote it in the events that are kept",
        "  words within 256 bytes of it were written by device 0, 1 only",
        "A+0x40, holds 0: polled by device 0 block 1 thread 1 (barrier.cuh:31)",
        "  last written by device 1 block 0 thread 2: st.release.sys [A+0x40] t2 (barrier.cuh:26)",
        "",
    ]
    heads = next(line for line in text.splitlines() if line.startswith("ns"))
    blocks = ["device 0 block 0", "device 0 block 1", "device 1 block 0"]
    assert [cell.strip() for cell in heads.split("|")][1:] == blocks
    assert len(body(text)) == 3 and max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("blocks, shown", [(8, 8), (9, 1)])
def test_a_few_blocks_that_wait_for_different_words_have_columns_of_their_own(
    blocks: int, shown: int, window: Window, flags: int
) -> None:
    spin = {"status": "polling", "file": FILE, "line": 31, "seen": 0}
    waiting = [Blocked((b % 4, b // 4, 0), (0, 0, 0), **spin, address=flags + 64 * b) for b in range(blocks)]
    grid = {1: Identity("exchange", 0, (4, 4, 1), BLOCK, SITES)}
    ring = records(*(record("load", 1, b, 0, LOAD, address=flags + 64 * b) for b in range(blocks)))
    text = deadlock.of_deadlock([("exchange", 0, waiting)], ring, grid, window)
    assert sum("ld.acquire.sys" in line for line in text.splitlines()) == shown
    assert ("wait alike, only the first" in text) == (blocks == shown)
    assert ("wait at the same places, only the first" in text) == (blocks != shown)
