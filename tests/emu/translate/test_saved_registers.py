# SPDX-License-Identifier: Apache-2.0
"""Registers keep their values while a thread is suspended: random programs that suspend between definitions, on
branches and in loops are compared with the same programs in Python."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ptx_harness import Program, pointers

from drvfuse.emu import abi

WIDTHS = {"r": 32, "d": 64, "h": 16}
COUNT = 5  # the number of registers of each width, and of predicates
State = dict[str, int]
Step = Callable[[State], None]


class Random:
    """A random program: lines of PTX, and Python functions that change a dict of registers in the same way."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.lines: list[str] = []
        self.labels = 0

    def pick(self, kind: str) -> str:
        return f"%{kind}{self.rng.integers(COUNT)}"

    def arithmetic(self) -> Step:
        kind = str(self.rng.choice(list(WIDTHS)))
        n, verb = WIDTHS[kind], str(self.rng.choice(["add", "sub"]))
        target, a, b = (self.pick(kind) for _ in range(3))
        guard = self.pick("p") if self.rng.random() < 0.3 else None
        self.lines.append(f"{f'@{guard} ' if guard else ''}{verb}.u{n} {target}, {a}, {b};")
        sign = 1 if verb == "add" else -1

        def step(s: State) -> None:
            if guard is None or s[guard]:
                s[target] = (s[a] + sign * s[b]) % (1 << n)

        return step

    def compare(self) -> Step:
        target, a, b = self.pick("p"), self.pick("r"), self.pick("r")
        self.lines.append(f"setp.lt.u32 {target}, {a}, {b};")
        return lambda s: s.update({target: int(s[a] < s[b])})

    def suspend(self) -> Step:
        self.lines.append("bar.warp.sync 0xffffffff;")
        return lambda s: None

    def branch(self, depth: int) -> Step:
        self.labels += 1
        label, guard = f"L{self.labels}", self.pick("p")
        self.lines.append(f"@{guard} bra {label};")
        body = self.block(depth - 1)
        self.lines.append(f"{label}:")
        return lambda s: None if s[guard] else body(s)

    def loop(self, depth: int) -> Step:
        self.labels += 1
        label, counter = f"L{self.labels}", f"%n{depth}"
        self.lines += [f"mov.u32 {counter}, 3;", f"{label}:"]
        body = self.block(depth - 1)
        self.lines += [f"sub.u32 {counter}, {counter}, 1;", f"setp.ne.u32 %q, {counter}, 0;", f"@%q bra {label};"]

        def step(s: State) -> None:
            for _ in range(3):
                body(s)

        return step

    def block(self, depth: int) -> Step:
        steps = []
        for _ in range(self.rng.integers(3, 7)):
            kind = self.rng.random()
            if kind < 0.45 or not depth:
                steps.append(self.arithmetic() if kind < 0.35 else self.compare() if kind < 0.4 else self.suspend())
            else:
                steps.append(self.suspend() if kind < 0.7 else (self.branch if kind < 0.85 else self.loop)(depth))

        def step(s: State) -> None:
            for each in steps:
                each(s)

        return step


@pytest.mark.parametrize("seed", range(3))
def test_registers_keep_their_values_across_suspends(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kernels, steps = [], []
    places = {f"%{kind}{i}": 8 * (k * COUNT + i) for k, kind in enumerate(WIDTHS) for i in range(COUNT)}
    for number in range(25):
        made = Random(rng)
        steps.append(made.block(3))
        loads = [f"ld.global.u{WIDTHS[name[1]]} {name}, [%io+{at}];" for name, at in places.items()]
        loads += [f"setp.eq.u32 %p{i}, %r0, %r0;" for i in range(COUNT)]
        stores = [f"st.global.u{WIDTHS[name[1]]} [%io+{at}], {name};" for name, at in places.items()]
        kernels.append(
            f".visible .entry k{number}(.param .u64 io) {{ .reg .b32 %r<{COUNT}>, %n<4>; .reg .b64 %d<{COUNT}>, %io;"
            f".reg .b16 %h<{COUNT}>; .reg .pred %p<{COUNT}>, %q; ld.param.u64 %io, [io];\n"
            + "\n".join([*loads, *made.lines, *stores, "ret; }"])
        )
    program = Program(".version 8.0\n.target sm_90\n.address_size 64\n" + "\n".join(kernels))
    suspends = 0
    for number, step in enumerate(steps):
        io = rng.integers(0, 1 << 16, len(places), np.uint64)
        state = {name: int(io[at // 8]) for name, at in places.items()} | {f"%p{i}": 1 for i in range(COUNT)}
        thread = program.thread(f"k{number}", pointers(io))
        while thread.resume() != abi.Status.EXIT:
            suspends += 1
        step(state)
        assert [int(io[at // 8]) for at in places.values()] == [state[name] for name in places]
    assert suspends > 500


HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 io) { .reg .b32 %r<9>;"
HEAD += ".reg .b64 %io; .reg .pred %p; ld.param.u64 %io, [io]; ld.global.u32 %r0, [%io];"
SUSPEND = "bar.warp.sync 0xffffffff;"


@pytest.mark.parametrize("taken", [0, 1])
def test_registers_of_different_branches_are_both_kept_until_the_branch(taken: int) -> None:
    program = Program(
        f"""{HEAD} add.u32 %r1, %r0, 5; add.u32 %r2, %r0, 9; setp.ne.u32 %p, %r0, 0;
        @%p bra OTHER;
        {SUSPEND} st.global.u32 [%io+4], %r1; ret;
        OTHER: {SUSPEND} st.global.u32 [%io+4], %r2; ret; }}"""
    )
    io = np.array([taken, 0], np.uint32)
    thread = program.thread("k", pointers(io))
    while thread.resume() != abi.Status.EXIT:
        pass
    assert io[1] == (10 if taken else 5)


def test_registers_that_are_live_at_different_times_share_a_place_in_the_frame() -> None:
    steps = "".join(f"add.u32 %r{i}, %r{i - 1}, {i}; {SUSPEND}" for i in range(1, 9))
    one = Program(f"{HEAD} add.u32 %r1, %r0, 36; {SUSPEND} st.global.u32 [%io+4], %r1; ret; }}")
    many = Program(f"{HEAD} {steps} st.global.u32 [%io+4], %r8; ret; }}")
    io = np.array([100, 0], np.uint32)
    thread = many.thread("k", pointers(io))
    while thread.resume() != abi.Status.EXIT:
        pass
    assert io[1] == 136
    assert many.code.kernels["k"].frame_bytes <= one.code.kernels["k"].frame_bytes + 16


def test_registers_that_are_read_before_they_are_written_are_zero_in_every_thread() -> None:
    program = Program(
        f"""{HEAD} mov.u32 %r1, 2;
        LOOP: add.u32 %r2, %r2, 5; @!%p add.u32 %r3, %r3, %r0; {SUSPEND}
        sub.u32 %r1, %r1, 1; setp.ne.u32 %p, %r1, 0; @%p bra LOOP;
        st.global.u32 [%io+4], %r2; st.global.u32 [%io+8], %r3; ret; }}"""
    )
    io = np.array([7, 0, 0], np.uint32)
    thread = program.thread("k", pointers(io))
    for tid in range(2):  # the second thread finds the first thread's registers in its frame
        thread.restart(tid)
        while thread.resume() != abi.Status.EXIT:
            pass
        assert list(io) == [7, 10, 7]
        io[1:] = 0
