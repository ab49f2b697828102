# SPDX-License-Identifier: Apache-2.0
"""Parts of words, vectors, several readers and writers of one word."""

from __future__ import annotations

from typing import Any

import pytest
from litmus import At, Suite, fill, grid, place, together

suite = Suite()
HELPERS = """
#define S8(p) asm volatile("st.global.u8 [%0], %1;" :: "l"(p), "r"(1) : "memory");
#define S16(p) asm volatile("st.global.u16 [%0], %1;" :: "l"(p), "h"((u16)1) : "memory");
#define S32(p) asm volatile("st.global.u32 [%0], %1;" :: "l"(p), "r"(1) : "memory");
#define S64(p) asm volatile("st.global.u64 [%0], %1;" :: "l"(p), "l"(1ull) : "memory");
#define S2x64(p) asm volatile("st.global.v2.u64 [%0], {%1, %1};" :: "l"(p), "l"(1ull) : "memory");
#define S4x32(p) asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" :: "l"(p), "r"(1) : "memory");
#define L8(p) { u32 v_; asm volatile("ld.global.u8 %0, [%1];" : "=r"(v_) : "l"(p) : "memory"); }
#define L16(p) { u16 v_; asm volatile("ld.global.u16 %0, [%1];" : "=h"(v_) : "l"(p) : "memory"); }
#define L32(p) { u32 v_; asm volatile("ld.global.u32 %0, [%1];" : "=r"(v_) : "l"(p) : "memory"); }
#define L64(p) { u64 v_; asm volatile("ld.global.u64 %0, [%1];" : "=l"(v_) : "l"(p) : "memory"); }
// Elements of a vector that nobody reads do not count as read.
#define L2x64(p) { u64 a_, b_; \\
  asm volatile("{ .reg .pred p; ld.global.v2.u64 {%0, %1}, [%2]; setp.eq.u64 p, %0, %1; }" \\
  : "=l"(a_), "=l"(b_) : "l"(p) : "memory"); }
#define L4x32(p) { u32 a_, b_, c_, d_; \\
  asm volatile("{ .reg .pred p; ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" \\
               " setp.eq.u32 p, %0, %1; setp.eq.u32 p, %2, %3; }" \\
  : "=r"(a_), "=r"(b_), "=r"(c_), "=r"(d_) : "l"(p) : "memory"); }
#define RELAXED8(p) asm volatile("st.relaxed.gpu.global.u8 [%0], %1;" :: "l"(p), "r"(1) : "memory");
#define RELAXED4x32(p) \\
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %1, %1, %1};" :: "l"(p), "r"(1) : "memory");
"""
SIZE = {"8": 1, "16": 2, "32": 4, "64": 8, "4x32": 16, "2x64": 16}

# Two accesses race if and only if they have a byte in common ----------------------------------------------------------

PART = "char* b = (char*)x;\nP(0) {\nS$one(b + $at0)  // @w\n}\nP(1) {\n$how$two(b + $at1)  // @r\n}"
OVERLAPS = [
    ("8", 0, "8", 0), ("8", 0, "8", 1), ("8", 2, "8", 3), ("8", 3, "8", 4), ("16", 0, "16", 2), ("16", 2, "16", 2),
    ("8", 0, "16", 2), ("8", 1, "16", 0), ("8", 2, "16", 0), ("8", 3, "32", 0), ("8", 4, "32", 0), ("16", 2, "32", 0),
    ("32", 0, "32", 4), ("32", 4, "64", 0), ("32", 8, "64", 0), ("64", 0, "64", 8), ("64", 8, "2x64", 0),
    ("64", 16, "2x64", 0),
    ("4x32", 0, "32", 0), ("4x32", 0, "32", 4), ("4x32", 0, "32", 8), ("4x32", 0, "32", 12), ("4x32", 0, "32", 16),
    ("4x32", 16, "32", 12), ("4x32", 0, "8", 15), ("4x32", 0, "8", 16), ("4x32", 0, "64", 8), ("4x32", 0, "4x32", 16),
    ("2x64", 0, "16", 14), ("2x64", 0, "16", 16), ("32", 12, "4x32", 0), ("8", 7, "4x32", 0), ("8", 23, "2x64", 16),
]  # fmt: skip
for one, at0, two, at1 in OVERLAPS:
    for how in "LS":
        common = at0 < at1 + SIZE[two] and at1 < at0 + SIZE[one]
        suite.add(
            f"{one}-at-{at0}-{'load' if how == 'L' else 'store'}-{two}-at-{at1}",
            fill(PART, one=one, at0=str(at0), how=how, two=two, at1=str(at1)),
            place("gpu", 2),
            races="w~r" if common else "",
            top=HELPERS,
            seeds=range(1, 3),
            profiles=("hardware",),
        )

# Strong accesses have to be of the same size to be morally strong (PTX ISA, "Morally strong operations"); a vector
# access counts as one scalar access for each element.
MIXED = "char* b = (char*)x;\nP(0) {\n$one  // @w\n}\nP(1) {\n$two  // @r\n}"
suite.add(
    "strong-byte-in-a-strong-word",
    fill(MIXED, one="RELAXED8(b + 1)", two="LD(relaxed.gpu, x)"),
    place("gpu", 2),
    races="w~r",
    edge="size",
    top=HELPERS,
)
suite.add(
    "strong-vector-and-its-words",
    fill(MIXED, one="RELAXED4x32(b)", two="LD(relaxed.gpu, x + 2)"),
    place("gpu", 2),
    top=HELPERS,
)
suite.add("strong-bytes", fill(MIXED, one="RELAXED8(b)", two="RELAXED8(b)"), place("gpu", 2), top=HELPERS)

# Bytes of one word by several threads ---------------------------------------------------------------------------------

BYTES = """
char* b = (char*)x;
P(0) { S8(b)  // @b0
 $r0 }
P(1) { S8(b + 1)  // @b1
 $r1 }
P(2) { S16(b + 2)  // @b2
 $r2 }
P(3) {
  $waits
  L32(b)  // @r
}
"""
for missing in (None, 0, 1, 2):
    releases = {f"r{i}": f"ST({'relaxed' if i == missing else 'release'}.gpu, f + {i}, 1)" for i in range(3)}
    suite.add(
        f"bytes-of-three-writers{'' if missing is None else f'-{missing}-unordered'}",
        fill(BYTES, **releases, waits=" ".join(f"SPIN(acquire.gpu, f + {i}, 1)" for i in range(3))),
        place("gpu", 4),
        races="" if missing is None else f"b{missing}~r",
        top=HELPERS,
    )
BYTE_READERS = """
char* b = (char*)x;
P(0) { L8(b)  // @b0
 $r0 }
P(1) { L8(b + 1)  // @b1
 $r1 }
P(2) { L16(b + 2)  // @b2
 $r2 }
P(3) {
  $waits
  S32(b)  // @w
}
"""
for missing in (None, 0, 1, 2):
    releases = {f"r{i}": f"ST({'relaxed' if i == missing else 'release'}.gpu, f + {i}, 1)" for i in range(3)}
    suite.add(
        f"bytes-of-three-readers{'' if missing is None else f'-{missing}-unordered'}",
        fill(BYTE_READERS, **releases, waits=" ".join(f"SPIN(acquire.gpu, f + {i}, 1)" for i in range(3))),
        place("gpu", 4),
        races="" if missing is None else f"b{missing}~w",
        top=HELPERS,
    )

# Many readers, then a writer ------------------------------------------------------------------------------------------

READERS = """
u32 t = $index;
if ($reader) {
  LATE(0)
  LD(weak, x)  // @r
  if (t == at.a) ST(relaxed.gpu, f + t, 1) else ST(release.gpu, f + t, 1)
  if (t == at.b) LD(weak, x)  // @again
}
if ($writer) {
  LATE(1)
  for (u32 i = 0; i < $count; i++) if (i != at.a || $all) SPIN(acquire.gpu, f + i, 1)
  ST(weak, x, 1)  // @w
}
"""
BLOCKS = {"index": "blockIdx.x", "reader": "T(0) && t < 5", "writer": "T(0) && t == 5", "count": "5"}
LANES = {"index": "threadIdx.x", "reader": "blockIdx.x == 0", "writer": "blockIdx.x == 1 && t == 3", "count": "64"}
SAME = {"index": "threadIdx.x", "reader": "t < 64", "writer": "t == 64", "count": "64"}
KINDS = {
    "blocks": (BLOCKS, grid(6, 32), (0, 1, 2, 3, 4)),
    "threads": (LANES, grid(2, 64), (0, 1, 31, 32, 63)),
    "one-block": (SAME, grid(1, 96), (0, 1, 31, 32, 63)),
}
for kind, (parts, drive, positions) in KINDS.items():
    suite.add(f"readers-{kind}-then-a-writer", fill(READERS, **parts, all="true"), drive, values=(999, 999))
    for position in positions:

        def _is(report: Any, kind: str = kind, position: int = position) -> bool:
            places = (report, report.other)
            if kind == "blocks":
                return position in [p.block[0] for p in places]
            return position in [p.thread[0] for p in places]

        for how in ("true", "false"):
            suite.add(
                f"readers-{kind}-reader-{position}-{'relaxed' if how == 'true' else 'forgotten'}",
                fill(READERS, **parts, all=how),
                drive,
                races="r~w",
                values=(position, 999),
                detail=_is,
                seeds=range(3),
            )
        suite.add(
            f"readers-{kind}-reader-{position}-reads-again",
            fill(READERS, **parts, all="true"),
            drive,
            races="again~w",
            values=(999, position),
            detail=_is,
            seeds=range(3),
        )
suite.add(
    "readers-behind-a-barrier-and-one-release",
    """
if (blockIdx.x == 0) {
  LATE(0)
  LD(weak, x)
  BAR
  if (T(0)) ST(release.gpu, f, 1)
} else if (T(0)) {
  SPIN(acquire.gpu, f, 1)
  ST(weak, x, 1)
}
""",
    grid(2, 96),
)
# All threads read a word, one thread writes it, and both steps repeat.
suite.add(
    "readers-and-a-writer-in-turns",
    """
u32 t = threadIdx.x;
for (u32 i = 0; i < 6; i++) {
  LD(weak, x)
  BAR
  if (t == i * 13) ST(weak, x, i)
  BAR
}
""",
    grid(1, 96),
)
suite.add(
    "readers-and-a-writer-in-turns-without-the-first-barrier",
    """
u32 t = threadIdx.x;
for (u32 i = 0; i < 6; i++) {
  LD(weak, x)  // @r
  if (t == i * 13) ST(weak, x, i)  // @w
  BAR
}
""",
    grid(1, 96),
    races="r~w",
)

# A reader of one word is ordered after the writer of one half of it, but not after the writer of the other half.
TWO = """
P(0) {
  ST(weak, x, 1)  // @w0
  ST(release.gpu, f, 1)
}
P(1) {
  SPIN(acquire.gpu, f, 1)
  ST(weak, x, 2)  // @w1
  ST($second, g, 1)
}
P(2) {
  SPIN(relaxed.gpu, g, 1)
  LD(acquire.gpu, f)
  $also
  LD(weak, x)  // @r
}
"""
suite.add("behind-both-writers", fill(TWO, second="release.gpu", also="LD(acquire.gpu, g)"), place("gpu", 3))
suite.add("behind-the-first-writer-only", fill(TWO, second="release.gpu", also=""), place("gpu", 3), races="w1~r")
suite.add(
    "behind-a-silent-writer", fill(TWO, second="relaxed.gpu", also="LD(acquire.gpu, g)"), place("gpu", 3), races="w1~r"
)
suite.add(
    "devices-beside-each-other",
    fill(TWO, second="release.gpu", also="LD(acquire.gpu, g)").replace(".gpu", ".sys"),
    together(At(), At(device=1), At(block=1)),
)


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
