# SPDX-License-Identifier: Apache-2.0
"""Message passing: one thread writes data and signals, another one waits and reads.

It is free of races if and only if the signal is a release pattern and the wait an acquire pattern (PTX ISA, "Release
and Acquire Patterns"), the wait observes the signal, and the scopes at both ends include the other thread.
"""

from __future__ import annotations

from typing import Any

import pytest
from litmus import NEEDS, SCOPES, Suite, covers, fill, place

MP = """
P(0) {
  ST(weak, x, 42)  // @w
  $signal  // @s
}
P(1) {
  $wait  // @a
  LD(weak, x)  // @r
}
"""
suite = Suite()

# Scopes ---------------------------------------------------------------------------------------------------------------

for where in NEEDS:
    for ours in SCOPES:
        for theirs in SCOPES:
            good = covers(ours, where) and covers(theirs, where)
            suite.add(
                f"scopes-{ours}-{theirs}-{where}",
                fill(MP, signal=f"ST(release.{ours}, f, 1)", wait=f"SPIN(acquire.{theirs}, f, 1)"),
                place(where, 2),
                races="" if good else "w~r s~a",
                edge="scope",
                seeds=range(4),
            )
for where in ("gpu", "peer"):
    for scope in SCOPES:
        good = covers(scope, where)
        for kind in ("acq_rel", "sc"):
            suite.add(
                f"release-fence-{kind}-{scope}-{where}",
                fill(MP, signal=f"FENCE({kind}.{scope}) ST(relaxed.sys, f, 1)", wait="SPIN(acquire.sys, f, 1)"),
                place(where, 2),
                races="" if good else "w~r",
                edge="scope|fence|release",
                seeds=range(3),
            )
            suite.add(
                f"acquire-fence-{kind}-{scope}-{where}",
                fill(MP, signal="ST(release.sys, f, 1)", wait=f"SPIN(relaxed.sys, f, 1) FENCE({kind}.{scope})"),
                place(where, 2),
                races="" if good else "w~r",
                edge="scope|fence|acquire",
                seeds=range(3),
            )
    # Both accesses of the flag need the wide scope too: only morally strong accesses synchronise.
    narrow = "cta" if where == "gpu" else "gpu"
    suite.add(
        f"wide-fences-around-a-narrow-store-{where}",
        fill(MP, signal=f"FENCE(sc.sys) ST(relaxed.{narrow}, f, 1)", wait="SPIN(acquire.sys, f, 1)"),
        place(where, 2),
        races="w~r s~a",
        edge="scope",
    )
    suite.add(
        f"wide-fences-around-a-narrow-load-{where}",
        fill(MP, signal="ST(release.sys, f, 1)", wait=f"SPIN(relaxed.{narrow}, f, 1) FENCE(sc.sys)"),
        place(where, 2),
        races="w~r s~a",
        edge="scope",
    )

# Signals and waits ----------------------------------------------------------------------------------------------------

GOOD_SIGNALS = {
    "release": "ST(release.$s, f, 1)",
    "fence": "FENCE(acq_rel.$s) ST(relaxed.$s, f, 1)",
    "fence-sc": "FENCE(sc.$s) ST(relaxed.$s, f, 1)",
    "fence-release": "FENCE(release.$s) ST(relaxed.$s, f, 1)",
    "fence-volatile": "FENCE(acq_rel.$s) ST(volatile, f, 1)",
    "fence-other-store": "FENCE(acq_rel.$s) ST(relaxed.$s, g, 1) ST(relaxed.$s, f, 1)",
    "exchange": "ATOM(release.$s, exch.b32, f, 1)",
    "atomic-acq-rel": "ATOM(acq_rel.$s, add.u32, f, 1)",
    "fence-atomic": "FENCE(acq_rel.$s) ATOM(relaxed.$s, add.u32, f, 1)",
    "reduction": "RED(release.$s, add.u32, f, 1)",
    "fence-reduction": "FENCE(acq_rel.$s) RED(relaxed.$s, or.b32, f, 1)",
    "release-then-relaxed": "ST(release.$s, f, 1) ST(relaxed.$s, f, 2)",
}
BAD_SIGNALS = {
    "relaxed": "ST(relaxed.$s, f, 1)",
    "volatile": "ST(volatile, f, 1)",
    "atomic-relaxed": "ATOM(relaxed.$s, add.u32, f, 1)",
    "atomic-acquire": "ATOM(acquire.$s, add.u32, f, 1)",
    "reduction-relaxed": "RED(relaxed.$s, add.u32, f, 1)",
    "fence-too-late": "ST(relaxed.$s, f, 1) FENCE(sc.$s)",
    "fence-acquire": "FENCE(acquire.$s) ST(relaxed.$s, f, 1)",
    "fence-proxy": 'asm volatile("fence.proxy.alias;" ::: "memory"); ST(relaxed.$s, f, 1)',
    "release-of-another-word": "ST(release.$s, g, 1) ST(relaxed.$s, f, 1)",
}
GOOD_WAITS = {
    "acquire": "SPIN(acquire.$s, f, 1)",
    "fence": "SPIN(relaxed.$s, f, 1) FENCE(acq_rel.$s)",
    "fence-sc": "SPIN(relaxed.$s, f, 1) FENCE(sc.$s)",
    "fence-acquire": "SPIN(relaxed.$s, f, 1) FENCE(acquire.$s)",
    "volatile-fence": "SPIN(volatile, f, 1) FENCE(acq_rel.$s)",
    "relaxed-then-acquire": "SPIN(relaxed.$s, f, 1) LD(acquire.$s, f)",
    "atomic": "u32 v; do RMW(v, acquire.$s, add.u32, f, 0) while (v == 0);",
    "compare-and-swap": "u32 v; do CAS(v, acquire.$s, f, 0, 0) while (v == 0);",
    "atomic-fence": "u32 v; do RMW(v, relaxed.$s, add.u32, f, 0) while (v == 0); FENCE(acq_rel.$s)",
    "fence-after-another-load": "SPIN(relaxed.$s, f, 1) LD(relaxed.$s, g) FENCE(acq_rel.$s)",
}
BAD_WAITS = {
    "relaxed": "SPIN(relaxed.$s, f, 1)",
    "fence-too-early": "FENCE(sc.$s) SPIN(relaxed.$s, f, 1)",
    "fence-release": "SPIN(relaxed.$s, f, 1) FENCE(release.$s)",
    "atomic-relaxed": "u32 v; do RMW(v, relaxed.$s, add.u32, f, 0) while (v == 0);",
    "atomic-release": "u32 v; do RMW(v, release.$s, add.u32, f, 0) while (v == 0);",
    "acquire-of-another-word": "SPIN(relaxed.$s, f, 1) LD(acquire.$s, g)",
}
for where in ("gpu", "peer"):
    s = NEEDS[where]
    for signals, wrong in ((GOOD_SIGNALS, ""), (BAD_SIGNALS, "w~r")):
        for name, text in signals.items():
            suite.add(
                f"signal-{name}-{where}",
                fill(MP, signal=text, wait="SPIN(acquire.$s, f, 1)", s=s),
                place(where, 2),
                races=wrong,
                edge="release|fence",
                seeds=range(4),
            )
    for waits, wrong in ((GOOD_WAITS, ""), (BAD_WAITS, "w~r")):
        for name, text in waits.items():
            suite.add(
                f"wait-{name}-{where}",
                fill(MP, signal="ST(release.$s, f, 1)", wait=text, s=s),
                place(where, 2),
                races=wrong,
                edge="acquire|fence",
                seeds=range(4),
            )
    # A volatile load is a relaxed one; the hardware profile takes it for an acquire, the strict one does not.
    for name in ("release", "fence", "fence-volatile", "reduction"):
        suite.add(
            f"volatile-wait-after-{name}-{where}",
            fill(MP, signal=GOOD_SIGNALS[name], wait="SPIN(volatile, f, 1)", s=s),
            place(where, 2),
            strict="w~r",
            edge="acquire|volatile|fence",
        )
    for name in ("relaxed", "volatile"):
        suite.add(
            f"volatile-wait-after-bad-{name}-{where}",
            fill(MP, signal=BAD_SIGNALS[name], wait="SPIN(volatile, f, 1)", s=s),
            place(where, 2),
            races="w~r",
        )

# Weak flags -----------------------------------------------------------------------------------------------------------
# The accesses of a plain flag race with each other, and synchronise nothing.

for name, signal in (("", "ST(weak, f, 1)"), ("-with-fence", "FENCE(sc.sys) ST(weak, f, 1)")):
    suite.add(
        f"plain-store-of-the-flag{name}",
        fill(MP, signal=signal, wait="SPIN(acquire.sys, f, 1)"),
        place("gpu", 2),
        races="s~a w~r",
    )
PLAIN_LOAD = """
P(0) {
  ST(weak, x, 42)  // @w
  ST(release.sys, f, 1)  // @s
  ST(relaxed.sys, g, 1)
}
P(1) {
  SPIN(relaxed.sys, g, 1)
  LD(weak, f)  // @a
  $fence
  LD(weak, x)  // @r
}
"""
suite.add("plain-load-of-the-flag", fill(PLAIN_LOAD, fence=""), place("gpu", 2), races="s~a w~r")

# What a signal covers -------------------------------------------------------------------------------------------------

suite.add(
    "signal-before-the-data",
    "P(0) {\nST(release.gpu, f, 1)\nST(weak, x, 1)  // @w\n}\nP(1) {\nSPIN(acquire.gpu, f, 1)\nLD(weak, x)  // @r\n}",
    place("gpu", 2),
    races="w~r",
)
AGAIN = """
P(0) {
  ST(weak, x, 1)  // @first
  ST(release.gpu, f, 1)
  $then
  ST(weak, x, 2)  // @second
}
P(1) {
  SPIN(acquire.gpu, f, 1)
  LD(weak, x)  // @r
}
"""
for name, then in (("", ""), ("-after-a-barrier", "WARP(1)"), ("-and-a-relaxed-flag", "ST(relaxed.gpu, f, 2)")):
    suite.add(f"second-write-behind-the-signal{name}", fill(AGAIN, then=then), place("gpu", 2), races="second~r")
suite.add(
    "second-write-before-a-relaxed-signal",
    AGAIN.replace("$then", "")
    .replace("// @second", "// @second\n  ST(relaxed.gpu, f, 2)")
    .replace("f, 1)\n  LD", "f, 2)\n  LD"),
    place("gpu", 2),
    races="second~r",
)
suite.add(
    "each-round-has-its-signal",
    """
P(0) {
  for (u32 i = 1; i <= 5; i++) {
    ST(weak, x, i)  // @w
    ST(release.gpu, f, i)
    SPIN(acquire.gpu, g, i)
  }
}
P(1) {
  for (u32 i = 1; i <= 5; i++) {
    SPIN(acquire.gpu, f, i)
    LD(weak, x)  // @r
    ST(release.gpu, g, i)
  }
}
""",
    place("gpu", 2),
)
CREDIT = """
P(0) {
  ST(weak, x, 1)  // @first
  ST(release.$s, f, 1)
  SPIN($credit, g, 1)
  ST(weak, x, 2)  // @second
  ST(release.$s, f, 2)
}
P(1) {
  SPIN(acquire.$s, f, 1)
  LD(weak, x)  // @r1
  ST($done, g, 1)
  SPIN(acquire.$s, f, 2)
  LD(weak, x)  // @r2
}
"""
for where in ("block", "gpu", "peer"):
    s = NEEDS[where]
    for name, credit, done, wrong in (
        ("", "acquire", "release", ""),
        ("-without-acquire", "relaxed", "release", "second~r1"),
        ("-without-release", "acquire", "relaxed", "second~r1"),
    ):
        suite.add(
            f"overwriting-what-was-read{name}-{where}",
            fill(CREDIT, s=s, credit=f"{credit}.{s}", done=f"{done}.{s}"),
            place(where, 2),
            races=wrong,
        )
suite.add(
    "round-two-data-with-round-one-signal",
    """
P(0) {
  ST(release.gpu, f, 1)
  SPIN(relaxed.gpu, g, 1)
  ST(weak, x, 2)  // @w
  ST(release.gpu, f, 2)
}
P(1) {
  SPIN(acquire.gpu, f, 1)
  LD(weak, x)  // @r
  ST(relaxed.gpu, g, 1)
}
""",
    place("gpu", 2),
    races="w~r",
)

# Signals for other threads ------------------------------------------------------------------------------------------
# An access by thread 0, 1 or 40 happens before a signal by thread 0 of its block only if both threads have passed a
# barrier between the access and the signal; for thread 0 itself no barrier is needed. The same holds for an access
# after a wait by thread 0.

BEHALF = """
if (blockIdx.x == 0) {
  LATE(0)
  if (T($who)) ST(weak, x, 1)  // @w
  $join
  if (T(0)) ST(release.gpu, f, 1)
} else {
  LATE(1)
  if (T(0)) SPIN(acquire.gpu, f, 1)
  $meet
  if (T($reader)) LD(weak, x)  // @r
}
"""
WARP_ONLY = "WARP(0xffffffff)"
for who in (0, 1, 40):
    for join, covered in (("", (0,)), (WARP_ONLY, (0, 1)), ("BAR", (0, 1, 40))):
        suite.add(
            f"signal-for-thread-{who}-{'nothing' if not join else 'warp' if join == WARP_ONLY else 'block'}",
            fill(BEHALF, who=str(who), join=join, meet="BAR", reader="33"),
            lambda here: here.launch(grid=2, block=64),
            races="" if who in covered else "w~r",
            seeds=range(4),
        )
        suite.add(
            f"wait-for-thread-{who}-{'nothing' if not join else 'warp' if join == WARP_ONLY else 'block'}",
            fill(BEHALF, who="33", join="BAR", meet=join, reader=str(who)),
            lambda here: here.launch(grid=2, block=64),
            # Without a barrier the reader does not wait: it may read before or after the write, and races either way.
            races="" if who in covered else "w~r",
            seeds=range(4),
        )

# Three-dimensional grids ----------------------------------------------------------------------------------------------

suite.add(
    "far-corners-of-a-three-dimensional-grid",
    """
u32 block = (blockIdx.z * 2 + blockIdx.y) * 2 + blockIdx.x, thread = (threadIdx.z * 4 + threadIdx.y) * 4 + threadIdx.x;
if (block == 6 && thread == 37) {
  ST(weak, x, 1)  // @w
  ST(relaxed.gpu, f, 1)
}
if (block == 1 && thread == 22) {
  SPIN(acquire.gpu, f, 1)
  LD(weak, x)  // @r
}
""",
    lambda here: here.launch(grid=(2, 2, 2), block=(4, 4, 4)),
    races="w~r",
    detail=lambda r: (
        {(tuple(p.block), tuple(p.thread)) for p in (r, r.other)} == {((0, 1, 1), (1, 1, 2)), ((1, 0, 0), (2, 1, 1))}
    ),
)

# Many signals ---------------------------------------------------------------------------------------------------------

THREADS = """
u32 t = threadIdx.x;
if (blockIdx.x == 0) {
  LATE(0)
  ST(weak, x + $element, t)  // @w
  $join
  if (t == at.a) ST(relaxed.gpu, f + t, 1) else ST(release.gpu, f + t, 1)
} else {
  LATE(1)
  SPIN(acquire.gpu, f + t, 1)
  $meet
  $read
}
"""
ALL = "for (int i = 0; i < 64; i++) LD(weak, x + i)  // @r"
OWN = "LD(weak, x + t)  // @r"


def _two_blocks(here: Any) -> None:
    here.launch(grid=2, block=64)


def _flags(name: str, silent: int = 999, races: str = "", **parts: str) -> None:
    parts = {"element": "t", "join": "", "meet": "", **parts}
    detail = (lambda r: silent in (r.thread[0], r.other.thread[0])) if silent != 999 else None
    suite.add(
        f"flag-of-each-thread-{name}",
        fill(THREADS, **parts),
        _two_blocks,
        races=races,
        values=(silent, 0),
        detail=detail,
    )


_flags("and-own-data", read=OWN)
_flags("then-a-barrier", read=ALL, meet="BAR")
_flags("without-the-barrier", read=ALL, races="w~r")
_flags("then-a-warp-barrier-only", read=ALL, meet=WARP_ONLY, races="w~r")
_flags("for-the-neighbour", element="(t + 1) % 64", read=OWN, races="w~r")
_flags("for-the-neighbour-behind-a-barrier", element="(t + 1) % 64", join="BAR", read=OWN)
for silent in (0, 1, 31, 32, 63):
    _flags(f"but-thread-{silent}", silent, races="w~r", read=ALL, meet="BAR")


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
