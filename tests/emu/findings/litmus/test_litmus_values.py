# SPDX-License-Identifier: Apache-2.0
"""Plain stores of one value by threads of one block, which hardware keeps and `strict` does not; and elements of lanes.

Lanes share entries of the detector where their elements lie side by side: who conflicts with one lane's element does not
conflict with those of the others.
"""

from __future__ import annotations

from typing import Any

import pytest
from litmus import Suite, fill, grid

suite = Suite()

# One value by all -----------------------------------------------------------------------------------------------------

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
    ("bytes-of-a-word", "if (t < 32) ST(weak, x, 0x07070707) else if (t == 32) ((volatile u8*)x)[1] = 7;", "", "", "w~w", "w~w"),
    ("stored-again-by-another", STORE, "BAR", "if (t == 40) ST(weak, x, 9)", "", "w~w"),
    ("stored-again-too-early", "if (t == 0) ST(weak, x, 7)", "", "if (t == 40) ST(weak, x, 7)", "", "w~r"),
    ("stored-again-with-another-value", "if (t == 0) ST(weak, x, 7)", "", "if (t == 40) ST(weak, x, 9)", "w~r", "w~r"),
):
    suite.add(
        name, fill(ALL, store=store, between=between, read=read), grid(1, 96), races=races, strict=strict, seeds=range(3)
    )
suite.add(
    "of-two-blocks", fill(ALL, store=STORE, between="", read=""), grid(2, 1), races="w~w", strict="w~w", seeds=range(3)
)

# Elements of lanes ----------------------------------------------------------------------------------------------------

LANES = """
u32 t = threadIdx.x, l = t % $columns;
$first  // @a
WARP(0xffffffff)
$second  // @b
"""
FIRST = {"reads": "LD(weak, x + l)", "writes": "if (t < $columns) ST(weak, x + l, t)"}
for columns in (32, 16, 8, 4):
    for kind, first in FIRST.items():
        for name, at, races in (
            ("by-its-lane", "l", ""),
            ("by-the-lane-before", "(l + 1) % $columns", ""),
            ("of-another-warp", "(l + 1) % $columns", "a~b"),
        ):
            who = f"if (t < {columns})" if races == "" else "if (t >= 64)"
            limit = "" if races == "" else "if (t < 32) "
            body = fill(LANES, first=limit + first.replace("$columns", str(columns)), second=f"{who} ST(weak, x + {at}, 9)".replace("$columns", str(columns)), columns=columns)
            suite.add(f"{columns}-elements-{kind}-then-written-{name}", body, grid(1, 96 if races else 32), races=races if kind == "reads" else (races and "a~b b~b") or "", seeds=range(2))


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_values(case: Any, profile: str) -> None:
    suite.check(case, profile)
