# SPDX-License-Identifier: Apache-2.0
"""Classic shapes over two to four threads: SB, LB, 2+2W, IRIW, ISA2, WRC, and accesses of one location."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from litmus import NEEDS, At, Suite, covers, fill, grid, place, together

suite = Suite()
PLACES = ("warp", "block", "gpu", "stream", "peer")

# Relaxed accesses whose scopes include both threads never race; weak ones race unless happens-before orders them ------

SHAPES = {
    "sb": ("P(0) {\nS0(x)  // @wx\nF\nL0(y)  // @ry\n}\nP(1) {\nS1(y)  // @wy\nF\nL1(x)  // @rx\n}", 2, "wx~rx wy~ry"),
    "lb": ("P(0) {\nL0(x)  // @rx\nF\nS0(y)  // @wy\n}\nP(1) {\nL1(y)  // @ry\nF\nS1(x)  // @wx\n}", 2, "wx~rx wy~ry"),
    "2+2w": (
        "P(0) {\nS0(x)  // @x0\nF\nS0(y)  // @y0\n}\nP(1) {\nS1(y)  // @y1\nF\nS1(x)  // @x1\n}",
        2,
        "x0~x1 y0~y1",
    ),
    "s": ("P(0) {\nS0(x)  // @x0\nF\nS0(y)  // @wy\n}\nP(1) {\nL1(y)  // @ry\nF\nS1(x)  // @x1\n}", 2, "x0~x1 wy~ry"),
    "r": ("P(0) {\nS0(x)  // @wx\nF\nS0(y)  // @y0\n}\nP(1) {\nS1(y)  // @y1\nF\nL1(x)  // @rx\n}", 2, "wx~rx y0~y1"),
    "iriw": (
        "P(0) {\nS0(x)  // @wx\n}\nP(1) {\nS0(y)  // @wy\n}\n"
        "P(2) {\nL1(x)  // @x2\nF\nL1(y)  // @y2\n}\nP(3) {\nL1(y)  // @y3\nF\nL1(x)  // @x3\n}",
        4,
        "wx~x2 wx~x3 wy~y2 wy~y3",
    ),
}


def _shape(text: str, first: str, second: str, fence: str) -> str:
    for number, sem in (("0", first), ("1", second)):
        text = text.replace(f"L{number}(", f"LD({sem}, ").replace(f"S{number}(x)", f"ST({sem}, x, {number} + 1)")
        text = text.replace(f"S{number}(y)", f"ST({sem}, y, {number} + 1)")
    return text.replace("\nF\n", f"\n{fence}\n" if fence else "\n")


for name, (text, roles, races) in SHAPES.items():
    for where in ("block", "gpu", "peer"):
        s = NEEDS[where]
        where_to = (
            place(where, roles)
            if where != "peer"
            else together(*(At(device=i % 2, block=i // 2) for i in range(roles)))
        )
        common: dict[str, Any] = {"seeds": range(4)}
        suite.add(f"{name}-relaxed-{where}", _shape(text, f"relaxed.{s}", f"relaxed.{s}", ""), where_to, **common)
        suite.add(f"{name}-weak-{where}", _shape(text, "weak", "weak", ""), where_to, races=races, **common)
        suite.add(
            f"{name}-weak-strong-{where}", _shape(text, "weak", f"relaxed.{s}", ""), where_to, races=races, **common
        )
        # Fences without strong accesses order weak accesses of two threads only if they are fence.sc, and then in
        # one direction only.
        suite.add(
            f"{name}-weak-fences-{where}",
            _shape(text, "weak", "weak", f"FENCE(acq_rel.{s})"),
            where_to,
            races=races,
            **common,
        )
for where in ("gpu", "peer"):
    s = NEEDS[where]
    text = _shape(SHAPES["sb"][0], "weak", "weak", f"FENCE(sc.{s})")
    suite.add(f"sb-weak-fence-sc-{where}", text, place(where, 2), some="wx~rx wy~ry")
    text = _shape(SHAPES["sb"][0], f"relaxed.{s}", f"relaxed.{s}", f"FENCE(sc.{s})")
    suite.add(f"sb-relaxed-fence-sc-{where}", text, place(where, 2))

# Dekker's algorithm: the order of the fences lets at most one of two threads enter.
DEKKER = """
P($me) {
  ST(relaxed.gpu, $mine, 1)
  $fence
  u32 other; GET(other, relaxed.gpu, $theirs)
  if (other == 0) ST(weak, x, $me)  // @w$me
}
"""
suite.add(
    "dekker-fence-sc",
    fill(DEKKER, me="0", mine="f", theirs="g", fence="FENCE(sc.gpu)")
    + fill(DEKKER, me="1", mine="g", theirs="f", fence="FENCE(sc.gpu)"),
    place("gpu", 2),
)

# One location -------------------------------------------------------------------------------------------------------
# Two accesses of one location, one of them a write, that nothing orders: no race if both are strong and each scope
# includes the other thread.

ACCESSES = ["weak", "relaxed.cta", "relaxed.gpu", "relaxed.sys", "volatile"]
ATOMICS = ["relaxed.cta", "relaxed.gpu", "relaxed.sys"]
SWITCH = """
P(0) {
  switch (at.a) {
%s
  }
}
P(1) {
  switch (at.b) {
%s
  }
}
"""


def _arms(operations: list[str], mark: str) -> str:
    return "\n".join(f"  case {i}: {text} break;  // @{mark}" for i, text in enumerate(operations))


WRITES = (
    [f"ST({s}, x, 7)" for s in ACCESSES]
    + [f"ATOM({s}, add.u32, x, 1)" for s in ATOMICS]
    + ["RED(relaxed.gpu, add.u32, x, 1)"]
)
READS = [f"LD({s}, x)" for s in ACCESSES] + [f"ATOM({s}, add.u32, x, 1)" for s in ATOMICS]
SCOPE_OF = {"volatile": "sys", "weak": None}
ONE_LOCATION = SWITCH % (_arms(WRITES, "w"), _arms(READS, "r"))
BOTH_WRITE = SWITCH % (_arms(WRITES, "w"), _arms(WRITES, "v"))


def _scope(operation: str) -> str | None:
    sem = operation[operation.index("(") + 1 :].split(",")[0]
    return SCOPE_OF[sem] if sem in SCOPE_OF else sem.split(".")[1]


def _include(one: str, two: str, where: str) -> bool:
    scopes = (_scope(one), _scope(two))
    return all(s is not None and covers(s, where) for s in scopes)


for where in ("block", "gpu", "peer"):
    for (i, one), (j, two) in itertools.product(enumerate(WRITES), enumerate(READS)):
        suite.add(
            f"one-location-{one}-{two}-{where}".replace(" ", ""),
            ONE_LOCATION,
            place(where, 2),
            races="" if _include(one, two, where) else "w~r",
            values=(i, j),
            seeds=range(1, 3),
            profiles=("hardware",),
        )
    for i, j in itertools.combinations_with_replacement(range(len(WRITES)), 2):
        suite.add(
            f"two-writes-{WRITES[i]}-{WRITES[j]}-{where}".replace(" ", ""),
            BOTH_WRITE,
            place(where, 2),
            races="" if _include(WRITES[i], WRITES[j], where) else "w~v",
            values=(i, j),
            seeds=range(1, 3),
            profiles=("strict",),
        )
for where in PLACES:
    suite.add(f"two-weak-reads-{where}", "P(0) {\nLD(weak, x)\n}\nP(1) {\nLD(weak, x)\n}", place(where, 2))
    suite.add(
        f"the-same-value-twice-{where}",
        "P(0) {\nST(weak, x, 7)  // @w\n}\nP(1) {\nST(weak, x, 7)  // @v\n}",
        place(where, 2),
        races="" if where in ("warp", "block") else "w~v",
        strict="w~v",
    )
    suite.add(
        f"neighbours-{where}",
        "P(0) {\nST(weak, x, 7)\nLD(weak, x)\n}\nP(1) {\nST(weak, x + 1, 7)\nLD(weak, x + 1)\n}",
        place(where, 2),
    )
suite.add(
    "reads-of-one-location-in-order",
    "P(0) {\nST(relaxed.gpu, x, 1)\nST(relaxed.gpu, x, 2)\n}\nP(1) {\nLD(relaxed.gpu, x)\nLD(relaxed.gpu, x)\n}",
    place("gpu", 2),
)
suite.add(
    "a-thread-never-races-with-itself",
    "P(0) {\nST(weak, x, 1)\nLD(weak, x)\nATOM(relaxed.gpu, add.u32, x, 1)\nST(relaxed.cta, x, 2)\n"
    "LD(volatile, x)\nST(weak, x, 3)\n}",
    place("gpu", 1),
)

# A strong write that a strong read has observed precedes what the reader does to the same location later (PTX ISA,
# "Causality Order", its second rule), but this orders no other data.
OBSERVED = "P(0) {\nST($store, x, 1)  // @w\n}\nP(1) {\nSPIN($load, x, 1)\n$then  // @then\n}"
for where in ("block", "gpu", "peer"):
    s = NEEDS[where]
    for then in ("LD(weak, x)", "ST(weak, x, 0)"):
        suite.add(
            f"observed-{then[:2].lower()}-{where}",
            fill(OBSERVED, store=f"relaxed.{s}", load=f"relaxed.{s}", then=then),
            place(where, 2),
        )
        suite.add(
            f"acquired-{then[:2].lower()}-{where}",
            fill(OBSERVED, store=f"release.{s}", load=f"acquire.{s}", then=then),
            place(where, 2),
        )
OBSERVED_THEN_WRITTEN = """
P(0) {
  ST(relaxed.gpu, x, 1)
  SPIN(relaxed.gpu, f, 1)
  ST(relaxed.gpu, x, 2)  // @w
}
P(1) {
  SPIN(relaxed.gpu, x, 1)
  LD(weak, x)  // @r
  ST(relaxed.gpu, f, 1)
}
"""
suite.add("observed-then-written-again", OBSERVED_THEN_WRITTEN, place("gpu", 2), races="w~r")
# A thread that observes an atomic is ordered after the whole chain of atomics that led to the value, and after
# nothing else.
COUNTED = """
if (T(0) && blockIdx.x < 4) {
  LATE(0)
  if (blockIdx.x == at.a) SPIN(relaxed.gpu, g, 3)
  if (blockIdx.x == at.a) ST(relaxed.gpu, f, 9)
  if (blockIdx.x != at.a) $add  // @add
  RED(relaxed.gpu, add.u32, g, 1)
}
if (T(0) && blockIdx.x == 4) {
  LATE(1)
  SPIN(relaxed.gpu, g, 4)
  LD($load, f)  // @load
  ST(weak, f, 0)  // @reset
}
"""
for add in ("RED(relaxed.gpu, add.u32, f, 1)", "ATOM(relaxed.gpu, add.u32, f, 1)"):
    counted = fill(COUNTED, add=add, load="relaxed.gpu")
    suite.add(f"observed-{add[:3].lower()}s-of-a-count", counted, grid(5, 32), values=(999, 0))
    suite.add(f"observed-store-behind-{add[:3].lower()}s", counted, grid(5, 32), races="add~reset", values=(2, 0))
for load in ("weak", "relaxed.cta"):
    counted = fill(COUNTED, add="RED(relaxed.gpu, add.u32, f, 1)", load=load)
    suite.add(f"count-read-{load}", counted, grid(5, 32), races="add~load add~reset", values=(999, 0))
# A later read by a thread does not undo what the thread has observed before, or has released to others.
OBSERVED_TWICE = """
P(0) {
  ST(relaxed.gpu, x, 1)  // @w
}
P(1) {
  SPIN(relaxed.gpu, x, 1)
  $tell
  LD(relaxed.gpu, x)
  $tell_late
}
P(2) {
  SPIN($hear, f, 1)
  LD(weak, x)  // @r
}
"""
for name, parts, races in (
    ("between", {"tell": "ST(release.gpu, f, 1)", "tell_late": ""}, ""),
    ("after", {"tell": "", "tell_late": "ST(release.gpu, f, 1)"}, ""),
    ("before-a-fence", {"tell": "ST(relaxed.gpu, f, 1)", "tell_late": "FENCE(acq_rel.gpu)"}, "w~r"),
):
    text = fill(OBSERVED_TWICE, **parts, hear="acquire.gpu")
    suite.add(f"observed-twice-and-told-{name}", text, place("gpu", 3), races=races)
WRC = """
P(0) {
  ST(relaxed.gpu, x, 1)  // @w
}
P(1) {
  SPIN(relaxed.gpu, x, 1)
  ST($signal, f, 1)
}
P(2) {
  SPIN($wait, f, 1)
  LD(weak, x)  // @r
}
"""
for signal, wait in itertools.product(("release", "relaxed"), ("acquire", "relaxed")):
    good = (signal, wait) == ("release", "acquire")
    suite.add(
        f"wrc-{signal}-{wait}",
        fill(WRC, signal=f"{signal}.gpu", wait=f"{wait}.gpu"),
        place("gpu", 3),
        races="" if good else "w~r",
    )

# ISA2: order passes through a third thread ----------------------------------------------------------------------------

ISA2 = """
P(0) {
  ST(weak, x, 1)  // @w
  ST($s0, f, 1)  // @s0
}
P(1) {
  SPIN($a1, f, 1)  // @a1
  ST($s1, g, 1)  // @s1
}
P(2) {
  SPIN($a2, g, 1)  // @a2
  LD(weak, x)  // @r
}
"""
ISA2_EDGES = {"s0": "release", "a1": "acquire", "s1": "release", "a2": "acquire"}
ISA2_PLACES = {
    "warp": (place("warp", 3), "cta", "cta"),
    "block": (place("block", 3), "cta", "cta"),
    "gpu": (place("gpu", 3), "gpu", "gpu"),
    "stream": (place("stream", 3), "gpu", "gpu"),
    "gpu-then-peer": (together(At(), At(block=1), At(device=1)), "gpu", "sys"),
    "block-then-peer": (together(At(), At(thread=40), At(device=1)), "cta", "sys"),
    "peer-then-gpu": (together(At(device=1), At(), At(block=1)), "sys", "gpu"),
    "peer-and-back": (together(At(), At(device=1), At(block=1)), "sys", "sys"),
}
for name, (drive, one, two) in ISA2_PLACES.items():
    sems = {k: f"{v}.{one if k in ('s0', 'a1') else two}" for k, v in ISA2_EDGES.items()}
    suite.add(f"isa2-{name}", fill(ISA2, **sems), drive, seeds=range(4))
    for edge in ISA2_EDGES:
        if name not in ("warp", "stream"):
            weaker = {**sems, edge: sems[edge].replace(ISA2_EDGES[edge], "relaxed")}
            suite.add(f"isa2-{name}-relaxed-{edge}", fill(ISA2, **weaker), drive, races="w~r", seeds=range(4))
for name, edge, flags in (("gpu-then-peer", "s1", "s1~a2"), ("peer-then-gpu", "a1", "s0~a1"), ("gpu", "a2", "s1~a2")):
    drive, one, two = ISA2_PLACES[name]
    sems = {k: f"{v}.{one if k in ('s0', 'a1') else two}" for k, v in ISA2_EDGES.items()}
    narrow = {"sys": "gpu", "gpu": "cta"}[sems[edge].split(".")[1]]
    sems[edge] = f"{ISA2_EDGES[edge]}.{narrow}"
    suite.add(
        f"isa2-{name}-narrow-{edge}",
        fill(ISA2, **sems),
        drive,
        races=f"w~r {flags}",
        edge="scope" if edge != "a1" else None,
    )
FOUR = """
P(0) {
  ST(weak, x, 1)
  ST(release.cta, f, 1)
}
P(1) {
  SPIN(acquire.cta, f, 1)
  ST(release.gpu, g, 1)
}
P(2) {
  SPIN(acquire.gpu, g, 1)
  ST(release.sys, h, 1)
}
P(3) {
  SPIN(acquire.sys, h, 1)
  LD(weak, x)
}
"""
suite.add("order-passes-from-block-to-gpu-to-system", FOUR, together(At(), At(thread=33), At(block=1), At(device=1)))
CHAIN = """
LATE(0)
if (T(0)) {
  u32 b = blockIdx.x;
  if (b == 0) ST(weak, x, 1)  // @w
  if (b > 0) SPIN(acquire.gpu, f + b, 1)
  if (b == gridDim.x - 1) LD(weak, x)  // @r
  if (b == at.a) ST(relaxed.gpu, f + b + 1, 1) else ST(release.gpu, f + b + 1, 1)
}
"""
for broken in (999, 0, 70, 148):
    suite.add(
        f"a-chain-of-150-blocks{'' if broken == 999 else f'-broken-at-{broken}'}",
        CHAIN,
        lambda here: here.launch(grid=150, block=32),
        races="" if broken == 999 else "w~r",
        values=(broken, 0),
        seeds=range(3),
    )


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
