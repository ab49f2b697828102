# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies to shared memory. A wait orders them for the thread that issued them; a barrier after the wait
orders them for other threads."""

from __future__ import annotations

from typing import Any

import pytest
from litmus import At, Suite, fill, grid, together

suite = Suite()
TOP = """
__device__ __forceinline__ u32 at_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#define CP(dst, src) \\
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at_shared(dst)), "l"(src) : "memory");
#define CP16(dst, src, n) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" \\
  :: "r"(at_shared(dst)), "l"(src), "r"((u32)(n)) : "memory");
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory");
#define WAIT(n) asm volatile("cp.async.wait_group " #n ";" ::: "memory");
#define WAIT_ALL asm volatile("cp.async.wait_all;" ::: "memory");
"""
NOT_WAITED = "has not waited for this copy"
EARLY = "nothing orders the read before this copy: no barrier.*was meant to find.*cp.async.wait_group.*and a barrier"


def add(name: str, body: str, drive: Any, **verdict: Any) -> None:
    suite.add(name, body, drive, **{"top": TOP, "seeds": range(4), **verdict})


# One thread -----------------------------------------------------------------------------------------------------------

ALONE = """
__shared__ alignas(16) u32 s[16];
if (T(at.a)) {
  $before
  CP(s, x)  // @c
  $between
  $after
}
"""
READ, WRITE, SOURCE = "READS(s)  // @r", "STS(s, 1)  // @w", "ST(weak, x, 1)  // @o"
BETWEENS = {  # the code between a copy and an access of its thread, and whether that code waits for the copy
    "nothing": ("", False),
    "commit": ("COMMIT", False),
    "commit-and-wait": ("COMMIT WAIT(0)", True),
    "wait-all": ("WAIT_ALL", True),
    "wait-without-commit": ("WAIT(0)", False),
    "wait-for-all-but-one": ("COMMIT WAIT(1)", False),
    "an-empty-group-behind-it": ("COMMIT COMMIT WAIT(1)", True),
    "another-group-behind-it": ("COMMIT CP(s + 8, x + 8) COMMIT WAIT(1)", True),
    "in-one-group-with-another": ("CP(s + 8, x + 8) COMMIT WAIT(0)", True),
    "one-of-two-waits-for-it": ("COMMIT WAIT(1) COMMIT WAIT(1)", True),
    "wait-before-commit": ("WAIT(0) COMMIT", False),
    "a-fence": ("COMMIT __threadfence();", False),
}
AFTERS = {"read": (READ, "c~r"), "write": (WRITE, "c~w"), "source-overwritten": (SOURCE, "c~o")}
for name, (between, waits) in BETWEENS.items():
    for kind, (after, race) in AFTERS.items():
        add(
            f"alone-{name}-{kind}",
            fill(ALONE, before="", between=between, after=after),
            grid(1, 32),
            races="" if waits else race,
            edge="the thread " + NOT_WAITED,
            values=(3, 0),
            seeds=range(2),
        )
for name, before, after, races in (
    ("used-before", "STS(s, 1) READS(s) LD(weak, x) ST(weak, x, 2)", "", ""),
    ("source-read", "", "LD(weak, x)  // @r", ""),
    ("neighbour-read", "STS(s + 1, 1)", "READS(s + 1)  // @r", ""),
    ("neighbour-of-the-source-overwritten", "", "ST(weak, x + 1, 1)  // @r", ""),
    ("another-copy-of-the-source", "", "CP(s + 4, x)  // @r", ""),
    ("another-copy-to-the-target", "", "CP(s, x + 4)  // @r", "c~r"),
    ("another-copy-to-a-part-of-the-target", "", "CP16(s, x + 4, 16)  // @r", "c~r"),
):
    add(f"alone-{name}", fill(ALONE, before=before, between="COMMIT", after=after), grid(1, 32), races=races)

PARTIAL = """
__shared__ alignas(16) u32 s[8];
if (T(0)) {
  CP16(s, x, at.a)  // @c
  COMMIT
  $after  // @r
}
"""
for name, after, count, races in (
    ("zeroes-read", "READS(s + 3)", 4, "c~r"),
    ("bytes-read", "READS(s)", 4, "c~r"),
    ("source-overwritten", "ST(weak, x, 1)", 4, "c~r"),
    ("source-behind-overwritten", "ST(weak, x + 1, 1)", 4, ""),
    ("whole-source-overwritten", "ST(weak, x + 3, 1)", 16, "c~r"),
    ("no-source-overwritten", "ST(weak, x, 1)", 0, ""),
):
    add(f"partial-{name}", fill(PARTIAL, after=after), grid(1, 32), races=races, values=(count, 0))

# The copies lie side by side in memory. The detector has one entry for 16 bytes, so several copies share an entry.
LOOP = """
__shared__ alignas(16) u32 s[4];
if (T(0)) {
  #pragma unroll 1
  for (u32 i = 0; i < 3; i++) { CP(s + i, x + i)  // @c
    COMMIT }
  WAIT(1)
  $after  // @r
}
"""
for name, after in (("target", "READS(s + at.a)"), ("source", "ST(weak, x + at.a, 1)")):
    for copy in range(3):
        races = "c~r" if copy == 2 else ""
        add(f"loop-{name}-{copy}", fill(LOOP, after=after), grid(1, 32), races=races, values=(copy, 0), seeds=range(2))

# Another thread of the block ------------------------------------------------------------------------------------------

OTHER = """
__shared__ u32 s[4];
u32 t = threadIdx.x;
LATE(0)
if (t == 0) { CP(s, x)  // @c
  COMMIT $first }
$barrier
if (t == 0) { $second }
$third
if (t == at.a) { LATE(1) $after  // @r
}
"""
WAITED = "no barrier is between the copying thread's wait"
# `close` and `far`: whether accesses of another thread of the warp, and of another warp, are ordered after the copy
for name, parts, close, far, edge in (
    ("wait-and-barrier", ("WAIT(0)", "BAR", "", ""), True, True, None),
    ("wait-all-and-barrier", ("WAIT_ALL", "BAR", "", ""), True, True, None),
    ("wait-and-two-barriers", ("WAIT(0)", "BAR", "", "BAR"), True, True, None),
    ("wait-between-barriers", ("", "BAR", "WAIT(0)", "BAR"), True, True, None),
    ("wait-and-warp-barrier", ("WAIT(0)", "WARP(0xffffffff)", "", ""), True, False, f"barrier|{WAITED}"),
    ("wait-and-named-barrier", ("WAIT(0)", "BARRIER(3, 64)", "", ""), True, True, None),
    ("wait-and-shuffle", ("WAIT(0)", "__shfl_xor_sync(0xffffffff, t, 1);", "", ""), False, False, f"barrier|{WAITED}"),
    ("wait-alone", ("WAIT(0)", "", "", ""), False, False, f"barrier|{WAITED}"),
    ("barrier-alone", ("", "BAR", "", ""), False, False, "the copying thread " + NOT_WAITED),
    ("wait-too-large", ("WAIT(1)", "BAR", "", ""), False, False, "the copying thread " + NOT_WAITED),
    ("wait-behind-the-barrier", ("", "BAR", "WAIT(0)", ""), False, False, f"{NOT_WAITED}|{WAITED}"),
    ("no-order-at-all", ("", "", "", ""), False, False, f"{NOT_WAITED}|{EARLY}"),
    ("another-thread-waits", ("", "if (t) WAIT(0) BAR", "", ""), False, False, NOT_WAITED),
):
    for kind, after in (("read", "READS(s)"), ("write", "STS(s, 2)"), ("source", "ST(weak, x, 1)")):
        for reader in (1, 40):
            if kind != "read" and name not in ("wait-and-barrier", "wait-alone", "barrier-alone"):
                continue
            ordered = close if reader == 1 else far
            first, barrier, second, third = parts
            add(
                f"{name}-{kind}-by-thread-{reader}",
                fill(OTHER, first=first, barrier=barrier, second=second, third=third, after=after),
                grid(1, 64),
                races="" if ordered else "c~r",
                edge=edge,
                values=(reader, 0),
            )

LEAVES = """
__shared__ u32 s[4];
if (T(0)) { CP(s, x)  // @c
  return; }
BAR
if (T(40)) READS(s)  // @r
"""
add("a-thread-leaves-without-a-wait", LEAVES, grid(1, 64), races="c~r", exited=True)

REUSE = """
__shared__ u32 s[4];
if (T(0)) STS(s, 1)
BAR
if (T(40)) { LATE(1) READS(s)  // @r
}
$between
if (T(0)) { LATE(0) CP(s, x)  // @c
  WAIT_ALL }
"""
for name, between, races in (("behind-a-barrier", "BAR", ""), ("at-once", "", "c~r")):
    add(f"buffer-reused-{name}", fill(REUSE, between=between), grid(1, 64), races=races, edge=f"{WAITED}|{EARLY}")

BROADCAST = """
__shared__ u32 s[64];
CP(s + threadIdx.x, x)  // @c
COMMIT
$wait
BAR
if (T(40)) ST(weak, x, 1)  // @w
"""
for name, wait, races in (("all-wait", "WAIT(0)", ""), ("one-does-not-wait", "if (!T(17)) WAIT(0)", "c~w")):
    add(f"one-source-for-all-{name}", fill(BROADCAST, wait=wait), grid(1, 64), races=races)

# Pipelines ------------------------------------------------------------------------------------------------------------

PIPE = """
__shared__ u32 s[$stages][64];
u32 t = threadIdx.x, sum = 0;
for (u32 i = 0; i < $ahead; i++) { CP(&s[i][t], x + 64 * i + t)  // @c
  COMMIT }
for (u32 i = 0; i < 8; i++) {
  $start
  u32 v; LDS(v, &s[i % $stages][(t + 5) % 64])  // @r
  sum += v;
  $end
}
y[t] = sum;
"""
FETCH = """if (i + $ahead < 8) CP(&s[(i + $ahead) % $stages][t], x + 64 * (i + $ahead) + t)  // @d
  COMMIT"""
for name, stages, ahead, start, end, races, maybe in (
    ("two-stages", 2, 2, "WAIT(1) BAR", "BAR $fetch", "", ""),
    ("two-stages-one-ahead", 2, 1, "$fetch WAIT(1) BAR", "BAR", "", ""),
    ("three-stages-one-barrier", 3, 2, "WAIT(1) BAR $fetch", "", "", ""),
    ("four-stages", 4, 3, "WAIT(2) BAR $fetch", "", "", ""),
    ("no-wait", 2, 2, "BAR", "BAR $fetch", "c~r", "d~r c~d d~d"),
    ("wait-too-large", 2, 2, "WAIT(2) BAR", "BAR $fetch", "c~r c~d", "d~r d~d"),
    ("wait-too-large-of-three-stages", 3, 2, "WAIT(2) BAR $fetch", "", "c~r", "d~r"),
    ("wait-behind-the-barrier", 2, 2, "BAR WAIT(1)", "BAR $fetch", "c~r", "d~r"),
    ("no-barrier-before-the-reads", 2, 2, "WAIT(1)", "BAR $fetch", "c~r", "d~r"),
    ("no-barrier-behind-the-reads", 2, 2, "WAIT(1) BAR", "$fetch", "d~r", ""),
    ("a-stage-too-few", 2, 2, "WAIT(1) BAR $fetch", "", "d~r", "c~d d~d"),
):  # fmt: skip
    parts = {"start": start, "end": end, "fetch": FETCH, "stages": str(stages), "ahead": str(ahead)}
    body = PIPE
    for key, text in parts.items():
        body = body.replace(f"${key}", text + "\n" if "fetch" in text or key == "fetch" else text)
    add(f"pipeline-{name}", body, grid(1, 64), races=races, maybe=maybe)

# The source is written by a thread of another block -------------------------------------------------------------------

SENT = """
__shared__ u32 s[4];
P(0) { ST(weak, x, 1)  // @w
  $send }
P(1) { $receive
  CP(s, x)  // @c
  WAIT_ALL
  READS(s) }
"""
for name, send, receive, races in (
    ("released", "ST(release.gpu, f, 1)", "SPIN(acquire.gpu, f, 1)", ""),
    ("relaxed", "ST(relaxed.gpu, f, 1)", "SPIN(acquire.gpu, f, 1)", "w~c"),
    ("unordered", "", "", "w~c"),
):
    add(
        f"source-{name}",
        fill(SENT, send=send, receive=receive),
        together(At(block=0), At(block=1)),
        races=races,
    )
TAKEN = """
__shared__ u32 s[4];
P(0) { CP(s, x)  // @c
  COMMIT $before
  ST(release.gpu, f, 1)
  $after }
P(1) { SPIN(acquire.gpu, f, 1)
  ST(weak, x, 1)  // @w
}
"""
for name, before, after, races in (
    ("waited-for", "WAIT(0)", "", ""),
    ("waited-for-too-late", "", "WAIT(0)", "c~w"),
    ("never-waited-for", "", "", "c~w"),
):
    add(
        f"source-given-away-{name}",
        fill(TAKEN, before=before, after=after),
        together(At(block=0), At(block=1)),
        races=races,
    )

LAUNCHES = """
__shared__ u32 s[4];
P(0) CP(s, x)  // @c
P(1) ST(weak, x, 1)  // @w
"""


def _in_order(here: Any) -> None:
    here.launch({0: At()})
    here.launch({1: At()})


add("the-end-of-a-kernel-ends-its-copies", LAUNCHES, _in_order)
add("another-stream-overwrites-the-source", LAUNCHES, together(At(stream=0), At(stream=1)), races="c~w")


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
