# SPDX-License-Identifier: Apache-2.0
"""Clusters of blocks: their barrier, when the shared memory of other blocks exists, scopes, st.async, mbarriers.

An access may race with the start or the end of the block that owns the memory. In the expected pair, "host" takes the
place of a mark for that start or end.
"""

from __future__ import annotations

from typing import Any

import pytest
from cluster_source import TOP
from litmus import Suite, fill, grid

suite = Suite()
MORE = """
#define R(i) (rank_() == (i))
#define LD_OF(sem, v, p, r) \\
  asm volatile("ld." #sem ".shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(of_(p, r)) : "memory");
#define ST_OF(sem, p, r, v) \\
  asm volatile("st." #sem ".shared::cluster.u32 [%0], %1;" :: "r"(of_(p, r)), "r"((u32)(v)) : "memory");
#define SPIN_ON(sem, p, n) { u32 v_; do LD_OF(sem, v_, p, rank_()) while (v_ < (n)); }
#define RED_OF(sem, p, r) \\
  asm volatile("red." #sem ".shared::cluster.add.u32 [%0], 1;" :: "r"(of_(p, r)) : "memory");
#define SEND_TWO(p, r, b) \\
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" \\
               :: "r"(of_(p, r)), "r"(1), "r"(2), "r"(of_(b, r)) : "memory");
#define PASS(how) C_ARRIVE(how ".aligned") C_WAIT
"""
TWO = grid(2, 64, cluster=2)


def add(name: str, body: str, drive: Any = None, **verdict: Any) -> None:
    suite.add(name, body, drive or TWO, **{"top": TOP + MORE, "seeds": range(4), **verdict})


# The barrier ----------------------------------------------------------------------------------------------------------

ARRIVALS = (
    ("released", 'PASS(".release")', ""),
    ("by-default", 'PASS("")', ""),
    ("relaxed", 'PASS(".relaxed")', "w~r"),
    ("fence-and-relaxed", 'FENCE(acq_rel.cluster) PASS(".relaxed")', ""),
    ("wide-fence-and-relaxed", 'FENCE(sc.sys) PASS(".relaxed")', ""),
    ("narrow-fence-and-relaxed", 'FENCE(acq_rel.cta) PASS(".relaxed")', "w~r"),
    ("mbarrier-fence-and-relaxed", 'C_INIT_FENCE PASS(".relaxed")', "w~r"),
)
PLACES = {
    "shared": ("C_ST(s, 1, 1)", "READS(s)"),
    "global": ("ST(weak, x, 1)", "LD(weak, x)"),
}
ORDER = """
__shared__ u32 s[32];
C_SYNC
if (R(0) && T(0)) { LATE(0) $write  // @w
}
$between
if (R(1) && T(40)) { LATE(1) $read  // @r
}
C_SYNC
"""
for where, (write, read) in PLACES.items():
    for name, between, races in (*ARRIVALS, ("missing", "", "w~r")):
        edge = r"arrived at the barrier of the cluster with \.relaxed" if name == "relaxed" else None
        edge = "the last release of that block that was seen came before" if name == "missing" else edge
        add(f"barrier-{where}-{name}", fill(ORDER, write=write, read=read, between=between), races=races, edge=edge)
OWN = ORDER.replace("R(1)", "R(0)")
for name, between, races in ARRIVALS:
    add(f"barrier-own-block-{name}", fill(OWN, write="STS(s, 1)", read="READS(s)", between=between), races=races)
OTHER = """
if (blockIdx.x == 0 && T(0)) { LATE(0) ST(weak, x, 1)  // @w
}
C_SYNC
if (blockIdx.x == 3 && T(40)) { LATE(1) LD(weak, x)  // @r
}
C_SYNC
"""
add("barrier-of-another-cluster", OTHER, grid(4, 64, cluster=2), races="w~r")
SPLIT = """
if (R(0) && T(0)) ST(weak, x, 1)  // @w
C_ARRIVE(".release.aligned")
if (R(0) && T(0)) ST(weak, y, 1)  // @behind
C_WAIT
if (R(1) && T(9)) { LD(weak, x) LD(weak, y)  // @r
}
C_SYNC
"""
add("barrier-orders-what-comes-before-the-arrival", SPLIT, races="behind~r")
EXITED = """
if (R(0) && T(0)) { LATE(0) ST(weak, x, 1)  // @w
}
if (R(0)) return;
C_SYNC
if (T(9)) { LATE(1) LD(weak, x)  // @r
}
"""
add("barrier-learns-nothing-from-an-exit", EXITED, races="w~r")

# Blocks that have started and not ended -------------------------------------------------------------------------------

PRESENT = """
__shared__ u32 s[32];
$before
if (R(0) && T(0)) { LATE(0) C_ST(s, 1, 1)  // @w
}
$after
if (R(1) && T(40)) LATE(1)
"""
for name, before, races in (
    ("barrier", "C_SYNC", ""),
    ("relaxed-barrier", 'PASS(".relaxed")', ""),
    ("flag", "if (R(1) && T(3)) ST(release.gpu, f, 1) if (R(0) && T(0)) SPIN(acquire.gpu, f, 1)", ""),
    ("nothing", "", "host~w"),
):
    add(
        f"begun-by-{name}",
        fill(PRESENT, before=before, after="C_SYNC"),
        races=races,
        late=(0,),
        edge="ensures that the block whose shared memory is accessed has started",
    )
for name, after, races in (
    ("barrier", "C_SYNC", ""),
    ("arrival-alone", 'C_ARRIVE(".release.aligned") if (R(1)) C_WAIT', ""),
    ("flag", "if (R(0) && T(0)) ST(release.gpu, f, 1) if (R(1) && T(40)) SPIN(acquire.gpu, f, 1)", ""),
    ("relaxed-barrier", 'PASS(".relaxed")', "host~w"),
    ("nothing", "", "host~w"),
):
    add(
        f"not-ended-by-{name}",
        fill(PRESENT, before="C_SYNC", after=after),
        races=races,
        late=(1,),
        edge="may have ended",
    )

# Scopes ---------------------------------------------------------------------------------------------------------------

FLAG = """
__shared__ u32 flag[1];
if (T(0)) flag[0] = 0;
C_SYNC
if (blockIdx.x == 0 && T(0)) { LATE(0) ST(weak, x, 1)  // @w
  $store }
if (blockIdx.x == at.a && T(40)) { LATE(1) $load
  LD(weak, x)  // @r
}
C_SYNC
"""
for name, store, load, races in (
    ("cluster", "ST(release.cluster, f, 1)", "SPIN(acquire.cluster, f, 1)", ""),
    ("wider-release", "ST(release.gpu, f, 1)", "SPIN(acquire.cluster, f, 1)", ""),
    ("wider-acquire", "ST(release.cluster, f, 1)", "SPIN(acquire.sys, f, 1)", ""),
    ("fences", "FENCE(acq_rel.cluster) ST(relaxed.cluster, f, 1)", "SPIN(relaxed.cluster, f, 1) FENCE(sc.cluster)", ""),
    ("narrow-fence", "FENCE(acq_rel.cta) ST(relaxed.cluster, f, 1)", "SPIN(acquire.cluster, f, 1)", "w~r"),
    ("relaxed", "ST(relaxed.cluster, f, 1)", "SPIN(acquire.cluster, f, 1)", "w~r"),
    ("atomics", "RED(release.cluster, add.u32, f, 1)", "SPIN(acquire.cluster, f, 1)", ""),
    ("shared", "ST_OF(release.cluster, flag, 1, 1)", "SPIN_ON(acquire.cluster, flag, 1)", ""),
    ("shared-relaxed", "ST_OF(relaxed.cluster, flag, 1, 1)", "SPIN_ON(acquire.cluster, flag, 1)", "w~r"),
    ("shared-atomic", "RED_OF(release.cluster, flag, 1)", "SPIN_ON(acquire.cluster, flag, 1)", ""),
):
    add(f"scope-{name}", fill(FLAG, store=store, load=load), races=races, values=(1, 0))
narrow = fill(FLAG, store="ST(release.cta, f, 1)  // @f\n", load="SPIN(acquire.cluster, f, 1)  // @g\n")
add("scope-narrow-release", narrow, races="w~r f~g", values=(1, 0))
narrow = fill(FLAG, store="ST(release.cluster, f, 1)  // @f\n", load="SPIN(acquire.cta, f, 1)  // @g\n")
add("scope-narrow-acquire", narrow, races="w~r f~g", values=(1, 0))
for block, races in ((1, ""), (2, "w~r f~g")):
    body = fill(FLAG, store="ST(release.cluster, f, 1)  // @f\n", load="SPIN(acquire.cluster, f, 1)  // @g\n")
    add(f"scope-cluster-seen-by-block-{block}", body, grid(4, 64, cluster=2), races=races, values=(block, 0))
GATHER = """
C_SYNC
if (T(0) && !R(3)) { LATE(0) ST(weak, x + 32 * rank_(), 1)  // @w
  RED($release, add.u32, f, 1) }
if (T(40) && R(3)) { LATE(1) SPIN($acquire, f, 3)
  for (u32 i = 0; i < 3; i++) LD(weak, x + 32 * i)  // @r
}
C_SYNC
"""
for release, acquire in (("release.gpu", "acquire.cluster"), ("release.cluster", "acquire.gpu")):
    body = fill(GATHER, release=release, acquire=acquire)
    add(f"scope-three-blocks-{release}-{acquire}", body, grid(4, 64, cluster=4))

# mbarriers ------------------------------------------------------------------------------------------------------------

SHARED = """
__shared__ alignas(16) u32 s[32];
__shared__ u64 bar[2];
"""
REMOTE = (
    SHARED
    + """
if (T(0)) { C_INIT(bar, 1) C_INIT(bar + 1, 1) }
C_SYNC
if (R(0) && T(0)) { LATE(0) C_ST(s, 1, 1)  // @w
  C_ARRIVE_AT("$arrive", bar, 1) }
if (R(1) && T(40)) { LATE(1) C_AWAIT("$wait", bar, 0)
  READS(s)  // @r
}
C_SYNC
"""
)
for name, arrive, wait, races, strict in (
    ("cluster", ".release.cluster", ".acquire.cluster", "", ""),
    ("by-default", "", "", "", "w~r"),
    ("narrow-wait", ".release.cluster", ".acquire.cta", "", "w~r"),
    ("narrow-arrival", ".release.cta", ".acquire.cluster", "", "w~r"),
    ("relaxed-arrival", ".relaxed.cluster", ".acquire.cluster", "w~r", "w~r"),
    ("relaxed-wait", ".release.cluster", ".relaxed.cluster", "w~r", "w~r"),
):
    add(f"mbarrier-{name}", fill(REMOTE, arrive=arrive, wait=wait), races=races, strict=strict)
MIXED = (
    SHARED
    + """
if (T(0)) C_INIT(bar, 2)
C_SYNC
if (R(1) && T(0)) C_EXPECT(bar, 4)
if (R(1) && T(33)) STS(s + 9, 1)  // @other
if (R(0) && T(0)) { C_ST(s, 1, 1)
  C_ARRIVE_AT(".release.cluster", bar, 1) C_SEND(s + 1, 1, 7, bar) }
if (R(1)) { C_AWAIT(".acquire.cluster", bar, 0)
  READS(s) READS(s + 1)
  READS(s + 9)  // @r
}
C_SYNC
"""
)
add("mbarrier-arrivals-of-different-scopes-are-no-race", MIXED, races="other~r")
MADE = (
    SHARED
    + """
if (T(0)) { C_INIT(bar, 1)  // @init
  $fence }
$start
if (R(0) && T(3)) $use  // @use
if (R(1) && T(9)) { C_AWAIT(".acquire.cluster", bar, 0) }  // @wait
C_SYNC
"""
)
for use, call in (("arrival", 'C_ARRIVE_AT(".release.cluster", bar, 1)'), ("send", "{ C_SEND(s, 1, 1, bar) }")):
    for name, fence, start, races in (
        ("released", "", "C_SYNC", ""),
        ("fence-and-relaxed", "C_INIT_FENCE", 'PASS(".relaxed")', ""),
        ("wide-fence-and-relaxed", "FENCE(acq_rel.cluster)", 'PASS(".relaxed")', ""),
        ("relaxed", "", 'PASS(".relaxed")', "init~use init~wait"),
    ):
        body = fill(MADE, fence=fence, start=start, use=call)
        if use == "send":
            body = body.replace("C_AWAIT", "C_EXPECT(bar, 4) C_AWAIT")
        add(f"mbarrier-made-{name}-{use}", body, races=races)

# st.async -------------------------------------------------------------------------------------------------------------

SEND = (
    SHARED
    + """
if (T(0)) { C_INIT(bar, 1) C_INIT(bar + 1, 1) }
C_SYNC
if (R(1) && T(0)) C_EXPECT(bar, 4)
if (R(0) && T(5)) { LATE(0) $before C_SEND(s, 1, 1, bar)  // @c
  $behind }
if (R(1) && T(40)) { LATE(1) $wait
  $read  // @r
}
$end
"""
)
LATE_OR_EARLY = "no wait for the mbarrier|the last release of that block that was seen came before"
for name, wait, races, strict, maybe in (
    ("waited-for", 'C_AWAIT(".acquire.cluster", bar, 0)', "", "", ""),
    ("waited-for-by-default", 'C_AWAIT("", bar, 0)', "", "c~r", "host~c"),
    ("relaxed-wait", 'C_AWAIT(".relaxed.cluster", bar, 0)', "c~r", None, "host~c"),
    ("asked-for-another-phase", 'u32 d; C_TRY(".acquire.cluster", d, bar, 1)', "c~r", None, "host~c"),
    ("not-waited-for", "", "c~r", None, "host~c"),
):
    body = fill(SEND, before="", behind="", wait=wait, read="READS(s)", end="C_SYNC nap(R(1) && T(3));")
    add(f"send-{name}", body, races=races, strict=strict, maybe=maybe, edge=LATE_OR_EARLY)
body = fill(SEND, before="", behind="", wait="", read="", end="C_SYNC nap(R(1) && T(3));")
add("send-that-nobody-waits-for", body, races="host~c", edge="may have ended")
body = fill(SEND, before="C_ST(s + 5, 1, 1)  // @w\n", behind="", wait='C_AWAIT(".acquire.cluster", bar, 0)',
            read="READS(s + 5)", end="C_SYNC")  # fmt: skip
add("send-is-no-release-of-writes", body, races="w~r")
body = fill(SEND, before="", behind="C_SEND(s, 1, 2, bar)  // @d\n", wait='C_AWAIT(".acquire.cluster", bar, 0)',
            read="READS(s)", end="C_SYNC").replace("C_EXPECT(bar, 4)", "C_EXPECT(bar, 8)")  # fmt: skip
add("send-twice-to-one-place", body, races="c~d")


AGAIN = (
    SHARED
    + """
if (T(0)) { C_INIT(bar, 1) C_INIT(bar + 1, $count) }
C_SYNC
if (R(1) && T(0)) C_EXPECT(bar, 4)
if (R(0) && T(0)) $expect
if (R(0) && T(5)) C_SEND(s, 1, 1, bar)  // @first
if (R(1) && threadIdx.x >= 32) { C_AWAIT(".acquire.cluster", bar, 0)
  if (T(40)) { $use  // @r
  }
  $warp
  if (T(at.a)) { $answer } }
if (R(1) && T(0)) { C_AWAIT(".acquire.cluster", bar, 0) C_EXPECT(bar, 4) }
if (R(0) && T(5)) { $wait
  C_SEND(s, 1, 2, bar)  // @c
}
if (R(1) && T(40)) { C_AWAIT(".acquire.cluster", bar, 1) READS(s) }
C_SYNC
"""
)
ANSWER = "C_SEND(s + 8, 0, 3, bar + 1)"
HEARD = 'C_AWAIT(".acquire.cluster", bar + 1, 0)'
for name, use, warp, answer, wait, thread, races in (
    ("behind-an-arrival", "READS(s)", "", 'C_ARRIVE_AT(".release.cluster", bar + 1, 0)', HEARD, 40, ""),
    ("behind-an-answer", "READS(s)", "", ANSWER, HEARD, 40, ""),
    ("behind-an-answer-of-the-warp", "READS(s)", "__syncwarp();", ANSWER, HEARD, 33, ""),
    ("behind-an-answer-of-another-lane", "READS(s)", "", ANSWER, HEARD, 33, "c~r"),
    ("behind-a-relaxed-arrival", "READS(s)", "", 'C_ARRIVE_AT(".relaxed.cluster", bar + 1, 0)', HEARD, 40, "c~r"),
    ("behind-an-answer-when-it-was-written", "STS(s, 1)", "", ANSWER, HEARD, 40, "c~r"),
    ("at-once", "READS(s)", "", 'C_ARRIVE_AT(".release.cluster", bar + 1, 0)', "", 40, "c~r"),
):
    expect = "C_EXPECT(bar + 1, 4)" if answer == ANSWER else ";"
    body = fill(AGAIN, use=use, warp=warp, answer=answer, wait=wait, expect=expect, count="1")
    some = "c~r c~first" if name == "at-once" else ""
    maybe = "c~first" if "relaxed" in name else ""
    add(f"send-again-{name}", body, races="" if some else races, some=some, maybe=maybe, values=(thread, 0))

# Copies between blocks ------------------------------------------------------------------------------------------------

COPY = """
__shared__ alignas(16) u32 s[64], d[64];
__shared__ u64 bar[2];
if (T(0)) C_INIT(bar, 1)
s[threadIdx.x] = threadIdx.x;  // @w
$proxy
C_SYNC
if (R(1) && T(0)) C_EXPECT(bar, 256)
if (R(0) && T(0)) { LATE(0) C_COPY(d, 1, s, 256, bar)  // @c
}
$again
if (R(1) && T(40)) { LATE(1) $wait
  READS(d + 7)  // @r
}
C_SYNC
"""
WAIT = 'C_AWAIT(".acquire.cluster", bar, 0)'
PROXY = 'asm volatile("fence.proxy.async;" ::: "memory");'
for name, proxy, again, wait, races, maybe in (
    ("waited-for", PROXY, "", WAIT, "", ""),
    ("no-wait", PROXY, "", "", "c~r", "host~c"),
    ("no-proxy-fence", "", "", WAIT, "c~w", ""),
    ("source-overwritten", PROXY, "if (R(0) && T(9)) STS(s + 3, 1)  // @o\n", WAIT, "c~o", ""),
):
    tail = "" if name != "no-wait" else "nap(R(1) && T(3));"
    add(f"copy-{name}", fill(COPY, proxy=proxy, again=again, wait=wait) + tail, races=races, maybe=f"{maybe} host~c")

# An exchange between all blocks of a cluster --------------------------------------------------------------------------

EXCHANGE = """
__shared__ alignas(16) u64 slots[4][2];
__shared__ u64 bar;
u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
if (T(0)) { C_INIT(&bar, 1) C_INIT_FENCE }
$start
if (T(0)) C_EXPECT(&bar, 4 * 2 * 8)
if (lane < 4) {
  SEND_TWO(&slots[rank_()][warp], lane, &bar)  // @c
}
$wait
u32 sum = 0;
for (u32 i = 0; i < 4; i++) sum += (u32)slots[i][0] + (u32)(slots[i][1] >> 32);  // @r
x[blockIdx.x * 64 + threadIdx.x] = sum;
"""
HEAR = 'C_AWAIT(".acquire.cluster", &bar, 0)'
add("exchange", fill(EXCHANGE, start="C_SYNC", wait=HEAR), grid(8, 64, cluster=4))
add("exchange-relaxed", fill(EXCHANGE, start='PASS(".relaxed")', wait=HEAR), grid(8, 64, cluster=4))
late = fill(EXCHANGE, start="C_SYNC", wait=f"if (warp == 0) {HEAR} ") + "C_SYNC"
add("exchange-in-which-a-warp-does-not-wait", late, grid(8, 64, cluster=4), races="c~r")

# Rounds alternate between two buffers. Round k + 2 may overwrite the data of round k, because its senders have received
# round k + 1 from warps that had read round k.
ROUNDS = """
__shared__ alignas(16) u64 slots[2][4][2];
__shared__ u64 bar[2];
u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = 0;
if (T(0)) { C_INIT(bar, 1) C_INIT(bar + 1, 1) C_INIT_FENCE }
C_SYNC
for (u32 i = 0; i < 5; i++) {
  u32 k = i % $buffers;
  if (T(0)) C_EXPECT(bar + k, 4 * 2 * 8)
  if (lane < 4) {
    SEND_TWO(&slots[k][rank_()][warp], lane, bar + k)  // @c
  }
  C_AWAIT(".acquire.cluster", bar + k, i / $buffers & 1)
  if (lane < 8) sum += (u32)slots[k][lane / 2][lane % 2];  // @r
  $warp
}
x[blockIdx.x * 64 + threadIdx.x] = sum;
"""
add("rounds", fill(ROUNDS, buffers="2", warp="__syncwarp();"), grid(8, 64, cluster=4))
add("rounds-that-shuffles-alone-order", fill(ROUNDS, buffers="2", warp=""), grid(8, 64, cluster=4), races="c~r")


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
