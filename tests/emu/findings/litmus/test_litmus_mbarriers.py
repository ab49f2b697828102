# SPDX-License-Identifier: Apache-2.0
"""Barrier objects in shared memory: what their phases order, for threads and for bulk copies."""

from __future__ import annotations

from typing import Any

import pytest
from litmus import At, Suite, fill, grid, together

suite = Suite()
TOP = """
__device__ __forceinline__ u32 at_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#define INIT(b, n) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at_shared(b)), "r"((u32)(n)) : "memory");
#define ARRIVE(how, b) { u64 s_; \\
  asm volatile("mbarrier.arrive" how ".shared::cta.b64 %0, [%1];" : "=l"(s_) : "r"(at_shared(b)) : "memory"); }
#define ARRIVE_TX(b, n) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" \\
  :: "r"(at_shared(b)), "r"((u32)(n)) : "memory");
#define TRY(how, d, b, p) asm volatile("{ .reg .pred q; mbarrier." how ".shared::cta.b64 q, [%1], %2; " \\
  "selp.u32 %0, 1, 0, q; }" : "=r"(d) : "r"(at_shared(b)), "r"((u32)(p)) : "memory");
#define ASK(b, p) { u32 d_; TRY("try_wait.parity", d_, b, p) }
#define AWAIT(b, p) { u32 d_; do TRY("try_wait.parity", d_, b, p) while (!d_); }
#define AWAIT_RELAXED(b, p) { u32 d_; do TRY("try_wait.parity.relaxed.cta", d_, b, p) while (!d_); }
#define BULK(dst, src, n, b) asm volatile( \\
  "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" \\
  :: "r"(at_shared(dst)), "l"(src), "r"((u32)(n)), "r"(at_shared(b)) : "memory");
"""
SHARED = """
__shared__ alignas(128) u32 s[64];
__shared__ u64 b[4];
if (T(0)) { INIT(b, at.a) INIT(b + 1, 1) INIT(b + 2, 1) }  // @init
"""


def add(name: str, body: str, drive: Any = None, **verdict: Any) -> None:
    suite.add(name, body, drive or grid(1, 96), **{"top": TOP, "seeds": range(4), "values": (1, 0), **verdict})


# Messages -------------------------------------------------------------------------------------------------------------

MESSAGE = (
    SHARED
    + """
BAR
if (T(0)) { LATE(0) STS(s, 1)  // @w
  $arrive }
if (T(50)) { LATE(1) $wait
  READS(s) }  // @r
"""
)
for name, arrive, wait, races in (
    ("arrive-and-wait", 'ARRIVE("", b)', "AWAIT(b, 0)", ""),
    ("arrive-release-and-wait", 'ARRIVE(".release.cta", b)', "AWAIT(b, 0)", ""),
    ("arrive-that-expects-nothing", "ARRIVE_TX(b, 0)", "AWAIT(b, 0)", ""),
    ("arrive-relaxed", 'ARRIVE(".relaxed.cta", b)', "AWAIT(b, 0)", "w~r"),
    ("wait-relaxed", 'ARRIVE("", b)', "AWAIT_RELAXED(b, 0)", "w~r"),
    ("wait-relaxed-and-fence", 'ARRIVE("", b)', "AWAIT_RELAXED(b, 0) __threadfence_block();", ""),
    ("no-wait", 'ARRIVE("", b)', "", "w~r"),
    ("asked-once", 'ARRIVE("", b)', "ASK(b, 0)", ""),
    ("asked-for-the-phase-before", 'ARRIVE("", b)', "ASK(b, 1)", "w~r"),
    ("another-barrier", 'ARRIVE("", b + 1) ARRIVE("", b)', "AWAIT(b + 1, 0)", ""),
):
    add(
        f"message-{name}",
        fill(MESSAGE, arrive=arrive, wait=wait),
        races=races,
        maybe="w~r" if name == "asked-once" else "",
    )
add(
    "message-too-early",
    MESSAGE.replace("STS(s, 1)  // @w\n  $arrive", 'ARRIVE("", b) STS(s, 1)  // @w\n').replace("$wait", "AWAIT(b, 0)"),
    races="w~r",
)
add("incomplete-phase", fill(MESSAGE, arrive='ARRIVE("", b)', wait="ASK(b, 0)"), races="w~r", values=(2, 0))
INIT = (
    SHARED
    + """
$barrier
if (T(50)) { nap(true); ARRIVE("", b) }  // @arrive
"""
)
for name, barrier, races in (("behind-a-barrier", "BAR", ""), ("without-a-barrier", "", "init~arrive")):
    add(f"init-{name}", fill(INIT, barrier=barrier), races=races)

ALL = (
    SHARED
    + """
BAR
if (threadIdx.x < 64) STS(s + threadIdx.x, 1)  // @w
$arrive
if (T(3)) { AWAIT(b, 0)
  for (u32 i = 0; i < 64; i++) READS(s + i) }  // @r
"""
)
for name, arrive, count, races in (
    ("all-arrive", 'ARRIVE("", b)', 96, ""),
    ("one-arrives-without-having-written", 'if (!T(17)) ARRIVE("", b)', 95, "w~r"),
):
    add(f"many-{name}", fill(ALL, arrive=arrive), races=races, values=(count, 0))

# Bulk copies ----------------------------------------------------------------------------------------------------------

BULK = (
    SHARED
    + """
BAR
if (T(0)) { $before
  ARRIVE_TX(b, 64)
  BULK(s, x, 64, b)  // @c
  $first }
$barrier
if (T(at.b)) { LATE(1) $second
  $after  // @r
}
"""
)
NOT_WAITED = "no wait for the mbarrier"
EARLY = r"nothing orders the read before this copy: no barrier.*was meant to find.*mbarrier.*\(mbarrier.try_wait\)"
READ, SOURCE = "READS(s + 15)", "ST(weak, x + 15, 1)"
for name, before, first, barrier, second, after, races in (
    ("all-wait", "", "", "AWAIT(b, 0)", "", READ, ""),
    ("reader-waits", "", "", "", "AWAIT(b, 0)", READ, ""),
    ("issuer-waits-and-barrier", "", "AWAIT(b, 0)", "BAR", "", READ, ""),
    ("source-overwritten-behind-the-wait", "", "", "", "AWAIT(b, 0)", SOURCE, ""),
    ("neighbour-read", "", "", "BAR", "", "READS(s + 16)", ""),
    ("source-read", "", "", "BAR", "", "LD(weak, x)", ""),
    ("used-before", "STS(s, 1) LD(weak, x) ST(weak, x, 1)", "", "", "AWAIT(b, 0)", READ, ""),
    ("no-wait", "", "", "BAR", "", READ, "c~r"),
    ("source-overwritten", "", "", "BAR", "", SOURCE, "c~r"),
    ("target-overwritten", "", "", "BAR", "", "STS(s, 2)", "c~r"),
    ("another-bulk-copy-to-it", "", "", "BAR", "", "ARRIVE_TX(b + 1, 16) BULK(s + 12, x, 16, b + 1)", "c~r"),
    ("asked-for-the-phase-before", "", "", "BAR", "ASK(b, 1)", READ, "c~r"),
    ("relaxed-wait", "", "", "BAR", "AWAIT_RELAXED(b, 0)", READ, "c~r"),
    ("wait-for-another-copy", "ARRIVE_TX(b + 1, 16) BULK(s + 32, x, 16, b + 1)", "", "BAR", "AWAIT(b + 1, 0)", READ,
     "c~r"),
    ("wait-for-a-later-copy", "", "ARRIVE_TX(b + 1, 16) BULK(s + 32, x, 16, b + 1)", "BAR", "AWAIT(b + 1, 0)", READ,
     "c~r"),
    ("wait-for-both", "", "ARRIVE_TX(b + 1, 16) BULK(s + 32, x, 16, b + 1)", "BAR", "AWAIT(b, 0) AWAIT(b + 1, 0)", READ,
     ""),
):  # fmt: skip
    for reader in (0, 40):
        add(
            f"bulk-{name}-by-thread-{reader}",
            fill(BULK, before=before, first=first, barrier=barrier, second=second, after=after),
            races=races,
            edge=NOT_WAITED,
            values=(1, reader),
            detail=lambda report: report.other.thread == (0, 0, 0),
        )

EXPECTED_LATE = BULK.replace("ARRIVE_TX(b, 64)", "").replace("$first", "ARRIVE_TX(b, 64)")
add("bulk-expected-behind-its-issue", fill(EXPECTED_LATE, before="", barrier="", second="AWAIT(b, 0)", after=READ),
    values=(1, 40))  # fmt: skip
# The completion of a bulk copy orders only the copy, not earlier accesses of the thread that issued it.
TELLS = (
    SHARED
    + """
BAR
if (T(0)) { STS(s + 32, 1)  // @w
  BULK(s, x, 64, b)
}
if (T(1)) ARRIVE_TX(b, 64)
if (T(40)) { AWAIT(b, 0) READS(s)
  READS(s + 32)  // @r
}
"""
)
add("bulk-tells-nothing-of-its-thread", TELLS, races="w~r")

REUSE = (
    SHARED
    + """
BAR
if (T(40)) { LATE(1) $before
  READS(s)  // @r
  $after }
if (T(0)) { LATE(0) $wait
  ARRIVE_TX(b, 64)
  BULK(s, x, 64, b)  // @c
  AWAIT(b, 0) }
"""
).replace("BAR", "if (T(40)) STS(s, 1)\nBAR", 1)
for name, before, after, wait, races in (
    ("behind-an-arrival", "", 'ARRIVE("", b + 1)', "AWAIT(b + 1, 0)", ""),
    ("behind-an-arrival-before-the-read", 'ARRIVE("", b + 1)', "", "AWAIT(b + 1, 0)", "c~r"),
    ("at-once", "", "", "", "c~r"),
):
    edge = f"{NOT_WAITED}|{EARLY}"
    add(f"bulk-buffer-reused-{name}", fill(REUSE, before=before, after=after, wait=wait), races=races, edge=edge)
for reader in (1, 40):
    body = fill(BULK, before="LATE(0)", first="", barrier="", second="", after=READ)
    add(f"bulk-no-order-at-all-by-thread-{reader}", body, races="c~r", edge=f"{NOT_WAITED}|{EARLY}", values=(1, reader))

PIPE = """
__shared__ alignas(128) u32 s[2][64];
__shared__ u64 full[2], empty[2];
u32 t = threadIdx.x, sum = 0;
if (T(0)) for (u32 i = 0; i < 2; i++) { INIT(full + i, 1) INIT(empty + i, 64) }
BAR
if (t >= 64) {
  for (u32 i = 0; t == 64 && i < 12; i++) {
    if (i >= 2) AWAIT(empty + i % 2, i / 2 - 1 & 1)
    ARRIVE_TX(full + i % 2, 256)
    BULK(s[i % 2], x + i * 64, 256, full + i % 2)  // @c
  }
} else {
  for (u32 i = 0; i < 12; i++) {
    AWAIT(full + i % 2, i / 2 & 1)
    $early
    u32 v; LDS(v, &s[i % 2][t ^ 37])  // @r
    sum += v;
    $late
  }
  y[t] = sum;
}
"""
add("bulk-pipeline", fill(PIPE, early="", late='ARRIVE("", empty + i % 2)'))
add("bulk-pipeline-emptied-too-early", fill(PIPE, early='ARRIVE("", empty + i % 2)', late=""), races="c~r")

TAKEN = """
__shared__ alignas(128) u32 s[64];
__shared__ u64 b[1];
P(0) { INIT(b, 1)
  ARRIVE_TX(b, 64)
  BULK(s, x, 64, b)  // @c
  $before
  ST(release.gpu, f, 1)
  AWAIT(b, 0) }
P(1) { SPIN(acquire.gpu, f, 1)
  ST(weak, x + 3, 1)  // @w
}
"""
for name, before, races in (("waited-for", "AWAIT(b, 0)", ""), ("waited-for-too-late", "", "c~w")):
    add(
        f"bulk-source-given-away-{name}",
        fill(TAKEN, before=before),
        together(At(block=0), At(block=1)),
        races=races,
    )


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
