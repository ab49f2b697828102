# SPDX-License-Identifier: Apache-2.0
"""Bulk copies to global memory. A wait with .read orders the copies' reads only; a wait without .read also orders their
writes."""

from __future__ import annotations

from typing import Any

import pytest
from litmus import At, Suite, fill, grid, together

suite = Suite()
TOP = """
__device__ __forceinline__ u32 at_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#define PUT(dst, src, n) asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" \\
  :: "l"(dst), "r"(at_shared(src)), "r"((u32)(n)) : "memory");
#define COMMIT asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#define WAIT(n) asm volatile("cp.async.bulk.wait_group " #n ";" ::: "memory");
#define WAIT_READ(n) asm volatile("cp.async.bulk.wait_group.read " #n ";" ::: "memory");
#define OTHER_WAITS asm volatile("cp.async.commit_group; cp.async.wait_all;" ::: "memory");
#define PROXY asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
"""
READ_EDGE = r"no cp\.async\.bulk\.wait_group\.read that covers it"
SEEN_EARLIER = r"release of that block that was seen.*the thread's wait \(cp\.async\.bulk\.wait_group without \.read\)"
WRITE_EDGE = r"no cp\.async\.bulk\.wait_group without \.read that covers it"


def add(name: str, body: str, drive: Any, **verdict: Any) -> None:
    suite.add(name, body, drive, **{"top": TOP, "seeds": range(4), **verdict})


# One thread -----------------------------------------------------------------------------------------------------------

ALONE = """
__shared__ alignas(16) u32 s[32];
if (T(3)) {
  STS(s + 7, 1) PROXY LD(weak, y) ST(weak, y, 1)
  PUT(y, s, 32)  // @c
  $between
  $after
}
"""
# Each value is the code between a copy and a later access by the same thread, whether this code waits until the copy
# has read its source, and whether it waits until the copy has written.
BETWEENS = {
    "nothing": ("", False, False),
    "commit": ("COMMIT", False, False),
    "commit-and-wait": ("COMMIT WAIT(0)", True, True),
    "commit-and-wait-for-the-read": ("COMMIT WAIT_READ(0)", True, False),
    "wait-for-the-read-and-then-for-all": ("COMMIT WAIT_READ(0) WAIT(0)", True, True),
    "wait-without-commit": ("WAIT(0) WAIT_READ(0)", False, False),
    "wait-for-all-but-one": ("COMMIT WAIT(1)", False, False),
    "another-group-behind-it": ("COMMIT PUT(y + 32, s + 16, 16) COMMIT WAIT_READ(1)", True, False),
    "in-one-group-with-another": ("PUT(y + 32, s + 16, 16) COMMIT WAIT(0)", True, True),
    "waits-of-cp-async": ("COMMIT OTHER_WAITS", False, False),
    "fences": ("COMMIT __threadfence_system(); PROXY", False, False),
}
AFTERS = {
    "read": ("LD(weak, y + 7)  // @r", "c~r", WRITE_EDGE),
    "written": ("ST(weak, y + 7, 1)  // @w", "c~w", WRITE_EDGE),
    "source-overwritten": ("STS(s + 7, 1)  // @o", "c~o", READ_EDGE),
}
for name, (between, read, written) in BETWEENS.items():
    for kind, (after, race, edge) in AFTERS.items():
        add(
            f"alone-{name}-{kind}",
            fill(ALONE, between=between, after=after),
            grid(1, 32),
            races="" if (read if kind == "source-overwritten" else written) else race,
            edge="the thread has not waited for this copy: " + edge,
            seeds=range(2),
        )
for name, after, races in (
    ("source-read", "READS(s)  // @r", ""),
    ("neighbours-used", "STS(s + 8, 1) ST(weak, y + 8, 1) LD(weak, y + 8)  // @r", ""),
    ("another-copy-of-the-source", "PUT(y + 8, s, 32)  // @r", ""),
    ("another-copy-to-the-target", "PUT(y + 4, s + 16, 16)  // @r", "c~r"),
):
    add(f"alone-{name}", fill(ALONE, between="COMMIT WAIT_READ(1)", after=after), grid(1, 32), races=races)

# The block ------------------------------------------------------------------------------------------------------------

BLOCK = """
__shared__ alignas(16) u32 s[32];
if (T(40)) { LATE(0) STS(s + 3, 1)  // @w
  PROXY }
$before
if (T(0)) { LATE(1) PUT(y, s, 64)  // @c
  COMMIT $wait }
$between
if (T(at.a)) { LATE(2) $after  // @r
}
"""
NO_BARRIER = "no barrier is between the copying thread's wait"
READ, OVERWRITE, SOURCE = "LD(weak, y + 3)", "ST(weak, y + 3, 2)", "STS(s + 3, 2)"
for name, before, wait, between, after, races, edge in (
    ("waited-and-barrier", "BAR", "WAIT(0)", "BAR", READ, "", None),
    ("overwritten-behind-a-barrier", "BAR", "WAIT(0)", "BAR", OVERWRITE, "", None),
    ("source-filled-again-behind-a-barrier", "BAR", "WAIT_READ(0)", "BAR", SOURCE, "", None),
    ("source-not-written-yet", "", "WAIT(0)", "BAR", READ, "c~w", "barrier"),
    ("waited-for-the-read", "BAR", "WAIT_READ(0)", "BAR", READ, "c~r", f"{WRITE_EDGE}, followed by a barrier"),
    ("not-waited-for", "BAR", "", "BAR", SOURCE, "c~r", f"{READ_EDGE}, followed by a barrier"),
    ("source-filled-again-without-a-barrier", "BAR", "WAIT_READ(0)", "", SOURCE, "c~r", f"{NO_BARRIER}|barrier"),
    ("read-without-a-barrier", "BAR", "WAIT(0)", "", READ, "c~r",
     f"{NO_BARRIER}|nothing orders the read before this copy.*wait_group without .read. and a barrier"),
):  # fmt: skip
    for reader in (1, 50):
        add(
            f"block-{name}-by-thread-{reader}",
            fill(BLOCK, before=before, wait=wait, between=between, after=after),
            grid(1, 64),
            races=races,
            edge=edge,
            values=(reader, 0),
        )

RING = """
__shared__ alignas(16) u32 s[2][64];
u32 t = threadIdx.x;
for (u32 i = 0; i < 6; i++) {
  $wait
  BAR
  STS(&s[i % 2][t ^ 21], i)  // @w
  PROXY
  BAR
  if (T(0)) { PUT(y + 64 * i, s[i % 2], 256)  // @c
    COMMIT }
}
"""
for name, wait, races in (
    ("of-two", "if (T(0)) WAIT_READ(1)", ""),
    ("waits-for-too-few", "if (T(0)) WAIT_READ(2)", "c~w"),
    ("another-thread-waits", "if (T(1)) WAIT_READ(0)", "c~w"),
):
    add(f"ring-{name}", fill(RING, wait=wait), grid(1, 64), races=races, edge=READ_EDGE, seeds=range(2))

# The proxies ----------------------------------------------------------------------------------------------------------

PROXIES = """
__shared__ alignas(16) u32 s[16];
if (T(40)) { $first STS(s + 3, 1)  // @w
  $writer }
if (T(50)) { $beside }
BAR
if (T(50)) { $between }
BAR
if (T(0)) { $issuer
  PUT(y, s, 64)  // @c
  COMMIT WAIT(0) }
"""
PLACES = ("first", "writer", "beside", "between", "issuer")
for name, place, fence, races in (
    ("of-the-writer", "writer", "PROXY", ""),
    ("of-the-writer-for-all-memory", "writer", 'asm volatile("fence.proxy.async;" ::: "memory");', ""),
    ("of-one-between", "between", "PROXY", ""),
    ("of-the-issuer", "issuer", "PROXY", ""),
    ("missing", "writer", "", "c~w"),
    ("of-the-generic-proxy", "writer", "__threadfence_system();", "c~w"),
    ("of-global-memory", "writer", 'asm volatile("fence.proxy.async.global;" ::: "memory");', "c~w"),
    ("before-the-write", "first", "PROXY", "c~w"),
    ("of-one-that-does-not-know-of-the-write", "beside", "PROXY", "c~w"),
    ("before-another-write", "writer", "PROXY STS(s + 3, 2)  // @v\n", "c~v"),
):
    parts = {p: fence if p == place else "" for p in PLACES}
    add(f"fence-{name}", fill(PROXIES, **parts), grid(1, 64), races=races, edge="no fence.proxy.async", seeds=range(2))

FILLED = """
__shared__ alignas(128) u32 s[16];
__shared__ u64 b;
if (T(0)) { u32 to = at_shared(s), at_b = at_shared(&b);
  $fill
  PUT(y, s, 64)  // @c
  COMMIT WAIT(0) }
"""
CP_ASYNC = """asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x) : "memory");  // @w
  OTHER_WAITS"""
BULK_LOAD = """asm volatile("mbarrier.init.shared.b64 [%0], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%0], 64;"
    :: "r"(at_b) : "memory");
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], 64, [%2];"
    :: "r"(to), "l"(x), "r"(at_b) : "memory");
  u32 d; do asm volatile("{ .reg .pred q; mbarrier.try_wait.parity.shared.b64 q, [%1], 0; selp.u32 %0, 1, 0, q; }"
    : "=r"(d) : "r"(at_b) : "memory"); while (!d);"""
for name, text, races in (
    ("cp-async", CP_ASYNC, "c~w"),
    ("cp-async-and-a-fence", CP_ASYNC + " PROXY", ""),
    ("a-bulk-copy", BULK_LOAD, ""),
):
    add(f"filled-by-{name}", fill(FILLED, fill=text), grid(1, 32), races=races, edge="no fence.proxy.async")

# Readers in another block and on another device -----------------------------------------------------------------------

MESSAGE = """
__shared__ alignas(16) u32 s[16];
P(0) { STS(s + 5, 1)
  PROXY
  PUT(y, s, 64)  // @c
  COMMIT $wait
  ST($release.sys, f, 1)
  $late }
P(1) { SPIN(acquire.sys, f, 1)
  $after  // @r
}
"""
for place, there in (("block", At(block=1)), ("device", At(device=1))):
    for name, wait, release, late, races, edge in (
        ("announced", "WAIT(0)", "release", "", "", None),
        ("announced-behind-a-wait-for-the-read", "WAIT_READ(0)", "release", "WAIT(0)", "c~r", SEEN_EARLIER),
        ("announced-too-early", "", "release", "WAIT(0)", "c~r", SEEN_EARLIER),
        ("never-waited-for", "", "release", "", "c~r", f"{WRITE_EDGE}, followed by a release"),
        ("announced-without-a-release", "WAIT(0)", "relaxed", "", "c~r", "without a release"),
    ):
        for kind, after in (("read", "LD(weak, y + 5)"), ("overwritten", "ST(weak, y + 5, 1)")):
            if kind == "read" or (place, name) == ("block", "announced"):
                add(
                    f"{place}-{name}-{kind}",
                    fill(MESSAGE, wait=wait, release=release, late=late, after=after),
                    together(At(), there),
                    races=races,
                    edge=edge,
                    seeds=range(2),
                )

HANDED = """
__shared__ alignas(16) u32 s[16];
P(0) { $before
  ST(release.gpu, f, 1) }
P(1) { $receive
  PUT(y, s, 64)  // @c
  COMMIT WAIT(0) }
"""
for name, before, receive, races in (
    ("read-before", "LD(weak, y + 5)  // @r", "SPIN(acquire.gpu, f, 1)", ""),
    ("still-read", "LD(weak, y + 5)  // @r", "", "c~r"),
    ("still-written", "ST(weak, y + 5, 1)  // @r", "", "c~r"),
):
    add(f"target-{name}", fill(HANDED, before=before, receive=receive), together(At(), At(block=1)), races=races)

LAUNCHES = """
__shared__ alignas(16) u32 s[16];
P(0) PUT(y, s, 64)  // @c
P(1) { $wait LD(weak, y + 5) }  // @r
"""


def _in_order(here: Any) -> None:
    here.launch({0: At()})
    here.launch({1: At()})


def _dependent(here: Any) -> None:
    here.launch({0: At()})
    here.launch({1: At()}, pdl=True)


add("the-end-of-a-kernel-ends-its-copies", fill(LAUNCHES, wait=""), _in_order)
add("a-dependent-waits", fill(LAUNCHES, wait="GDC_WAIT"), _dependent)
add("another-stream-reads", fill(LAUNCHES, wait=""), together(At(stream=0), At(stream=1)), races="c~r")


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
