# SPDX-License-Identifier: Apache-2.0
"""Litmus tests with threads of one block: barriers of the block, of some of its warps and of a warp, and operations
that do not order accesses although they synchronise lanes or are fences."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from litmus import Suite, fill, grid

suite = Suite()

# A write by one thread and a read by another, with a barrier or other code between ------------------------------------

BETWEEN = """
__shared__ u32 s;
u32 t = threadIdx.x;
LATE(0)
if (t == 0) $first  // @w
$between
if (t == at.a) { LATE(1) $second }  // @r
"""
SHARED = ("STS(&s, 1)", "READS(&s)")
GLOBAL = ("ST(weak, x, 1)", "LD(weak, x)")
BACK = ("LD(weak, x)", "ST(weak, x, 1)")
TWICE = ("ST(weak, x, 1)", "ST(weak, x, 2)")
ACCESSES = {"shared": SHARED, "global": GLOBAL, "read-then-write": BACK, "write-then-write": TWICE}
# Thread 0 of a block of 96 makes the first access of ACCESSES, and thread 1 or 70 the second. Each value below is the
# code between the two accesses, and the second threads (1, 70) for which this code orders the two accesses.
BETWEENS = {
    "nothing": ("", ()),
    "syncthreads": ("BAR", (1, 70)),
    "three-syncthreads": ("BAR BAR BAR", (1, 70)),
    "bar-sync": ("BARRIER(0, 96)", (1, 70)),
    "named-barrier": ("BARRIER(5, 96)", (1, 70)),
    "barrier-sync": ('asm volatile("barrier.sync 3;" ::: "memory");', (1, 70)),
    "bar-red": ("__syncthreads_and(t);", (1, 70)),
    "bar-red-count": ("__syncthreads_count(t);", (1, 70)),
    "syncwarp": ("WARP(0xffffffff)", (1,)),
    "syncwarp-of-two": ("if (t < 2) WARP(3)", (1,)),
    "syncwarp-of-others": ("if (t == 0 || t == 2) WARP(5)", ()),
    "shuffle": ("__shfl_xor_sync(0xffffffff, t, 1);", ()),
    "vote": ("__ballot_sync(0xffffffff, t);", ()),
    "reduction": ("__reduce_add_sync(0xffffffff, t);", ()),
    "match": ("__match_any_sync(0xffffffff, t);", ()),
    "threadfence": ("__threadfence();", ()),
    "threadfence-system": ("__threadfence_system();", ()),
    "first-two-warps": ("if (t < 64) BARRIER(1, 64)", (1,)),
    "last-two-warps": ("if (t >= 32) BARRIER(1, 64)", ()),
    "two-barriers-of-two-warps": ("if (t < 64) BARRIER(1, 64) if (t >= 32) BARRIER(2, 64)", (1, 70)),
    "two-barriers-of-two-warps-in-the-other-order": ("if (t >= 32) BARRIER(2, 64) if (t < 64) BARRIER(1, 64)", (1,)),
    "arrive-and-sync": ("if (t < 32) ARRIVE(1, 96) else BARRIER(1, 96)", (70,)),
    "sync-and-arrive": ("if (t < 32) BARRIER(1, 96) else ARRIVE(1, 96)", (1,)),
}
# bar.arrive does not wait, so it orders nothing for the other lanes of its warp.
for (name, (text, ordered)), (kind, (first, second)), reader in itertools.product(
    BETWEENS.items(), ACCESSES.items(), (1, 70)
):
    if kind != "shared" and name not in (
        "nothing",
        "syncthreads",
        "syncwarp",
        "first-two-warps",
        "arrive-and-sync",
        "vote",
    ):
        continue
    suite.add(
        f"{kind}-{name}-thread-{reader}",
        fill(BETWEEN, first=first, between=text, second=second),
        grid(1, 96),
        races="" if reader in ordered else "w~r",
        values=(reader, 0),
        seeds=range(4),
        edge="barrier|syncthreads|syncwarp|warp" if name == "nothing" else None,
    )
for kind, (first, second) in ACCESSES.items():
    suite.add(
        f"{kind}-by-one-thread",
        fill(BETWEEN, first=first, between="", second=second),
        grid(1, 96),
        seeds=range(2),
    )

# Threads that leave ---------------------------------------------------------------------------------------------------

LEAVE = """
__shared__ u32 s;
u32 t = threadIdx.x;
LATE(0)
if (t == $writer) STS(&s, 1)  // @w
if ($leaves) return;
BAR
if (t == 0) READS(&s)  // @r
"""
suite.add("others-leave-before-the-barrier", fill(LEAVE, writer="1", leaves="t >= 64"), grid(1, 96))
suite.add("lanes-leave-before-the-barrier", fill(LEAVE, writer="1", leaves="t % 32 > 10"), grid(1, 96), exited=True)
# An exited thread has not executed the barrier, so nothing orders its earlier writes.
suite.add("a-warp-leaves-after-its-write", fill(LEAVE, writer="70", leaves="t >= 64"), grid(1, 96), races="w~r")
suite.add(
    "a-lane-leaves-after-its-write", fill(LEAVE, writer="50", leaves="t == 50"), grid(1, 96), races="w~r", exited=True
)

# Producers and consumers ----------------------------------------------------------------------------------------------

PIPE = """
__shared__ u32 s[2][32];
u32 t = threadIdx.x % 32;
for (int i = 0; i < 6; i++) {
  if (threadIdx.x < 32) {
    LATE(0)
    $empty
    STS(&s[i % $depth][t], i)  // @w
    $full
    $more
  } else {
    LATE(1)
    $wait
    READS(&s[i % $depth][(t + 3) % 32])  // @r
    $done
  }
}
"""
EMPTY = "if (i >= $depth) { if (i % $depth) BARRIER(4, 64) else BARRIER(3, 64) }"
FULL = "if (i % $depth) ARRIVE(2, 64) else ARRIVE(1, 64)"
WAIT = "if (i % $depth) BARRIER(2, 64) else BARRIER(1, 64)"
DONE = "if (i + $depth < 6) { if (i % $depth) ARRIVE(4, 64) else ARRIVE(3, 64) }"
for depth in ("1", "2"):
    suite.add(
        f"pipe-of-{depth}",
        fill(PIPE, empty=EMPTY, full=FULL, wait=WAIT, done=DONE, more="", depth=depth),
        grid(1, 64),
    )
    suite.add(
        f"pipe-of-{depth}-filled-after-the-arrival",
        fill(
            PIPE,
            empty=EMPTY,
            full=FULL,
            wait=WAIT,
            done=DONE,
            more="STS(&s[i % $depth][t], i + 1)  // @late",
            depth=depth,
        ),
        grid(1, 64),
        races="late~r",
    )
suite.add(
    "arrivals-on-the-other-barrier",
    """
__shared__ u32 s;
u32 t = threadIdx.x;
LATE(0)
if (t < 32) {
  if (t == 0) STS(&s, 1)  // @w
  ARRIVE(1, 64)
  BARRIER(2, 64)
} else {
  if (t == 40) READS(&s)  // @r
  BARRIER(1, 64)
  ARRIVE(2, 64)
}
""",
    grid(1, 64),
    races="w~r",
)

# Memory that is written again after it was read -----------------------------------------------------------------------

LOOP = """
$memory
u32 t = threadIdx.x;
for (u32 i = 0; i < 8; i++) {
  LATE(0)
  STS(s + $buffer * 64 + t, i)  // @w
  BAR
  READS(s + $buffer * 64 + (t + 33) % 64)  // @r
  $after
}
"""
STATIC, DYNAMIC = "__shared__ u32 s[256];", "extern __shared__ u32 s[];"
for kind, memory in (("static", STATIC), ("dynamic", DYNAMIC)):
    for name, buffer, after, races in (
        ("two-barriers", "0", "BAR", ""),
        ("one-barrier", "0", "", "w~r"),
        ("one-barrier-two-buffers", "(i % 2)", "", ""),
        ("warp-barrier", "0", "WARP(0xffffffff)", "w~r"),
    ):
        suite.add(
            f"loop-{kind}-{name}",
            fill(LOOP, memory=memory, buffer=buffer, after=after),
            grid(1, 64, smem=1024 if kind == "dynamic" else 0),
            races=races,
            seeds=range(4),
        )
for blocks in (3, 40):
    suite.add(
        f"shared-memory-of-{blocks}-blocks",
        fill(LOOP, memory=STATIC, buffer="0", after="BAR"),
        grid(blocks, 64),
        options={"sm_count": 1},
        seeds=range(2),
    )
FULL_SM = """
extern __shared__ u32 s[];
if (T(0)) { STS(s, 1) if (blockIdx.x == 0) ST(weak, x, 1) }  // @w
BAR
if (T(1)) { READS(s) if (blockIdx.x == gridDim.x - 1) LD(weak, x) }  // @r
"""
# Blocks that run one after another on a multiprocessor, in the same shared memory, are not ordered.
suite.add(
    "blocks-one-after-the-other",
    FULL_SM,
    grid(9, 1024, smem=1024),
    races="w~r",
    options={"sm_count": 1},
)

# Reduction in shared memory -------------------------------------------------------------------------------------------

TREE = """
__shared__ u32 s[128];
u32 t = threadIdx.x;
LATE(0)
STS(s + t, t)  // @fill
for (u32 half = 64; half > 0; half /= 2) {
  $barrier
  if (t < half) { u32 a, b; LDS(a, s + t) LDS(b, s + t + half) STS(s + t, a + b) }  // @step
}
$end
if (t == 100) READS(s)  // @result
"""
IN_WARP = "if (half >= 32) BAR else WARP(0xffffffff)"
for name, barrier, end, races, some in (
    ("barriers", "BAR", "BAR", "", ""),
    ("warp-barriers-within-the-warp", IN_WARP, "BAR", "", ""),
    ("no-barriers-within-the-warp", "if (half >= 32) BAR", "BAR", "step~step", ""),
    ("no-barrier-before-the-result", "BAR", "", "step~result", "fill~result"),
    ("one-barrier-left-out", "if (half != 32) BAR", "BAR", "step~step", ""),
):
    suite.add(
        f"tree-{name}",
        fill(TREE, barrier=barrier, end=end),
        grid(1, 128),
        races=races,
        maybe=some,
        seeds=range(4),
    )

# Shared atomics and counts of barriers --------------------------------------------------------------------------------

SUM = """
__shared__ u32 s;
if (T(0)) STS(&s, 0)  // @zero
$before
atomicAdd(&s, threadIdx.x);  // @add
$after
if (T(40)) READS(&s)  // @read
"""
for name, before, after, races in (
    ("barriers", "BAR", "BAR", ""),
    ("no-barrier-before", "", "BAR", "zero~add"),
    ("no-barrier-after", "BAR", "", "add~read"),
):
    suite.add(
        f"shared-sum-{name}",
        fill(SUM, before=before, after=after),
        grid(1, 64),
        races=races,
        maybe="zero~read" if races else "",
    )
MANY = """
__shared__ u32 s;
for (u32 i = 0; i < at.a; i++) {
  if (T(i % 32)) STS(&s, i)  // @w
  $barrier
  if (T((i + 1) % 32)) READS(&s)  // @r
  $barrier
}
"""
for name, barrier, count in (("warp", "WARP(0xffffffff)", 2200), ("block", "BAR", 2200)):
    suite.add(
        f"thousands-of-{name}-barriers", fill(MANY, barrier=barrier), grid(1, 32), values=(count, 0), seeds=range(1)
    )
WRAP = """
__shared__ u32 s;
LATE(0)
if (T(0)) STS(&s, 1)  // @w
for (u32 i = 0; i < at.a; i++) { if (threadIdx.x < 32) WARP(0xffffffff) }
if (T(at.b)) READS(&s)  // @r
"""
for barriers in (1, 1024, 2048, 4096, 65536):
    suite.add(f"behind-{barriers}-warp-barriers", WRAP, grid(1, 64), values=(barriers, 1), seeds=range(1))
    suite.add(f"beside-{barriers}-warp-barriers", WRAP, grid(1, 64), values=(barriers, 33), races="w~r", seeds=range(1))


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
