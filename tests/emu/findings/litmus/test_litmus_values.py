# SPDX-License-Identifier: Apache-2.0
"""Litmus tests with threads of one block. If several threads store the same value to one word, that is a race in the
strict profile only. In the second part the lanes of a warp store different elements.

Adjacent elements of several lanes share an entry of the detector. An access to the element of one lane must not be
taken for a conflict with accesses to the elements of other lanes.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from litmus import Suite, fill, grid

suite = Suite()

# One value stored by all threads --------------------------------------------------------------------------------------

ALL = """
u32 t = threadIdx.x, v = blockIdx.x + 1;
$store  // @w
$between
$read  // @r
"""
STORE = "ST(weak, x, 7)"
READ = "if (t == 40) LD(weak, x)"
for name, store, between, read, races, strict in (
    ("all-threads", STORE, "", "", "", "w~w"),
    ("all-threads-read-behind-a-barrier", STORE, "BAR", READ, "", "w~w"),
    ("all-threads-read-without-a-barrier", STORE, "", READ, "w~r", "w~w w~r"),
    ("one-warp-read-by-another", "if (t < 32) ST(weak, x, 7)", "WARP(0xffffffff)", READ, "w~r", "w~w w~r"),
    ("one-of-a-warp-differs", "ST(weak, x, t == 9 ? 8 : 7)", "", "", "w~w", "w~w"),
    ("the-last-one-differs", "ST(weak, x, t == 95 ? 8 : 7)", "", "", "w~w", "w~w"),
    ("a-value-for-each-warp", "ST(weak, x, t / 32)", "", "", "w~w", "w~w"),
    ("all-elements-of-a-line", "ST(weak, x + t % 4, t % 4)", "BAR", "if (t < 4) LD(weak, x + t)", "", "w~w"),
    ("elements-that-are-exchanged", "ST(weak, x + t % 4, t % 5)", "", "", "w~w", "w~w"),
    ("stored-again-by-another", STORE, "BAR", "if (t == 40) ST(weak, x, 9)", "", "w~w"),
    ("stored-again-too-early", "if (t == 0) ST(weak, x, 7)", "", "if (t == 40) ST(weak, x, 7)", "", "w~r"),
    ("stored-again-with-another-value", "if (t == 0) ST(weak, x, 7)", "", "if (t == 40) ST(weak, x, 9)", "w~r", "w~r"),
):
    suite.add(
        name,
        fill(ALL, store=store, between=between, read=read),
        grid(1, 96),
        races=races,
        strict=strict,
        seeds=range(3),
    )
suite.add(
    "of-two-blocks", fill(ALL, store=STORE, between="", read=""), grid(2, 1), races="w~w", strict="w~w", seeds=range(3)
)

# A store `w` that does not conflict with the later store `v` of the same value must not hide the conflicts of `v`.
HIDDEN = """
u32 t = threadIdx.x;
if (t == 0) LD(weak, x)  // @r
$between
if (t == $first) ST(weak, x, 7)  // @w
if (t == 64 && nap(true)) ST(weak, x, 7)  // @v
"""
for name, between, first, races, strict in (
    ("hides-the-read-of-its-thread", "", 0, "w~v", "w~v"),
    ("hides-the-read-before-a-release", "if (t == 0) FENCE(acq_rel.gpu)", 0, "r~v", "w~v"),
    ("hides-a-read-of-its-warp", "WARP(0xffffffff)", 1, "r~v", "w~v"),
    ("behind-a-barrier-behind-a-read", "BAR", 1, "", "w~v"),
):
    suite.add(
        f"a-value-that-{name}",
        fill(HIDDEN, between=between, first=str(first)),
        grid(1, 96),
        races=races,
        strict=strict,
        seeds=range(2),
    )

# Each row of stmatrix is a store of 16 bytes by the lane that holds the row's address.
ROWS = """
__shared__ alignas(16) u32 s[32];
u32 t = threadIdx.x;
if (t < 32) {
  $first
}
$between
if (t >= 64) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};"
               :: "r"((u32)__cvta_generic_to_shared(s + 4 * (t % $rows))), "r"((u32)($value)) : "memory");  // @m
}
"""
STORED = "STS(s + t, 0x20001)  // @w"
for name, first, between, rows, value, races in (
    ("store-another-value", STORED, "", 8, "5", "w~m"),
    ("store-the-same-value", STORED, "", 8, "0x20001", ""),
    ("store-behind-a-barrier", STORED, "BAR", 8, "5", ""),
    ("are-one-of-equal-values", "", "", 1, "7", ""),
    ("are-one-of-different-values", "", "", 1, "t", "m~m"),
):
    suite.add(
        f"matrix-rows-{name}",
        fill(ROWS, first=first, between=between, rows=str(rows), value=value),
        grid(1, 96),
        races=races,
        profiles=("hardware",),
        seeds=range(2),
    )

# Lanes of a warp that store different elements ------------------------------------------------------------------------

ELEMENTS = """
u32 t = threadIdx.x;
u64 mine = (u64)x + t % $columns * $size, next = (u64)x + (t + 1) % $columns * $size;
if (t < 32) $first  // @a
$between
$second  // @b
"""
FIRSTS = {
    "read": '{ $c v_; asm volatile("ld.weak.global.u$bits %0, [%1];" : "=$r"(v_) : "l"(mine) : "memory"); }',
    "written": 'asm volatile("st.weak.global.u$bits [%0], %1;" :: "l"(mine), "$r"(($c)(t % $columns)) : "memory");',
}
SECOND = 'asm volatile("st.weak.global.u$bits [%0], %1;" :: "l"($where), "$r"(($c)99) : "memory");'
for (size, columns), (kind, first) in itertools.product(
    ((4, 32), (4, 16), (4, 8), (4, 4), (1, 32), (1, 16), (2, 8), (8, 4), (8, 2)), FIRSTS.items()
):
    sizes = {"size": str(size), "bits": str(8 * size), "columns": str(columns)}
    sizes |= {"c": {1: "u16", 2: "u16", 4: "u32", 8: "u64"}[size], "r": {1: "h", 2: "h", 4: "r", 8: "l"}[size]}
    for name, between, who, where, races in (
        ("then-by-its-lane", "", f"t < {columns}", "mine", "" if columns == 32 else "a~b"),
        ("then-by-the-lane-before", "", f"t < {columns}", "next", "a~b"),
        ("then-behind-syncwarp", "WARP(0xffffffff)", f"t < {columns}", "next", ""),
        ("then-by-another-warp", "WARP(0xffffffff)", f"t >= 64 && t < {64 + columns}", "mine", "a~b"),
        ("then-behind-a-barrier", "BAR", f"t >= 64 && t < {64 + columns}", "mine", ""),
    ):
        second = f"if ({who}) {fill(SECOND, where=where, **sizes)}"
        body = fill(ELEMENTS, first=fill(first, **sizes), between=between, second=second, **sizes)
        # Several lanes store one value to the same element, which is a race in the strict profile only. If nothing
        # comes between the store `a` and the store `b`, the race may be reported or not, in both profiles, for two
        # reasons. The detector's record of a lane's store `b` may replace that of the lane's store `a`. Or the store
        # `b` of one lane changes the value before another lane makes its store `a`.
        doubles = "a~a" if kind == "written" and columns < 32 else ""
        hidden = doubles and between == ""
        suite.add(
            f"{columns}-elements-of-{size}-{kind}-{name}",
            body,
            grid(1, 96),
            races=races,
            strict=races if hidden else f"{races} {doubles}",
            maybe=doubles if hidden else "",
            seeds=range(1),
        )


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
