# SPDX-License-Identifier: Apache-2.0
"""Asynchronous reductions do not race with each other; an arrival of cp.async also covers the copies before it."""

from __future__ import annotations

from typing import Any

import pytest
from litmus import Suite, grid

suite = Suite()
TOP = """
__device__ __forceinline__ u32 at_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#define INIT(b, n) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at_shared(b)), "r"((u32)(n)) : "memory");
#define AWAIT(b, parity) { u32 d_; do asm volatile( \\
    "{ .reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2; " \\
    "selp.u32 %0, 1, 0, q; }" : "=r"(d_) : "r"(at_shared(b)), "r"((u32)(parity)) : "memory"); while (!d_); }
#define CP(dst, src) \\
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at_shared(dst)), "l"(src) : "memory");
#define COPIED(b) \\
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(at_shared(b)) : "memory");
#define REDUCE(op, dst, src) asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." op " [%0], [%1], 16;" \\
    :: "l"(dst), "r"(at_shared(src)) : "memory");
#define WAIT_GROUPS asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
#define FENCE asm volatile("fence.proxy.async;" ::: "memory");
"""


def add(name: str, body: str, drive: Any, **verdict: Any) -> None:
    suite.add(name, body, drive, **{"top": TOP, "seeds": range(4), **verdict})


ARRIVAL = """
__shared__ alignas(16) u32 s[64];
__shared__ u64 b;
if (T(0)) { INIT(&b, 1) }
BAR
if (T(0)) {
  $before
  CP(s, x)  // @c
  COPIED(&b)
  $behind
}
if (T(33)) {
  $wait
  $access
}
"""
for name, wait, access, races in (
    ("waits-and-reads", "AWAIT(&b, 0)", "READS(s)  // @r", ""),
    ("waits-and-writes", "AWAIT(&b, 0)", "STS(s, 3)  // @w", ""),
    ("waits-and-overwrites-the-source", "AWAIT(&b, 0)", "ST(weak, x, 1)  // @o", ""),
    ("reads-without-a-wait", "", "READS(s)  // @r", "c~r"),
):
    body = ARRIVAL.replace("$wait", wait).replace("$access", access).replace("$before", "").replace("$behind", "")
    add(f"arrival-{name}", body, grid(1, 64), races=races)
for name, access, races in (
    ("read", "READS(s)  // @r", "c~r"),
    ("after-its-own-wait", "AWAIT(&b, 0) READS(s)  // @r", ""),
):
    body = ARRIVAL.replace("$wait", "").replace("$access", "").replace("$before", "").replace("$behind", access)
    add(f"arrival-own-{name}", body, grid(1, 64), races=races)
another = ARRIVAL.replace("$wait", "AWAIT(&b, 0)").replace("$access", "READS(s + 16)  // @r").replace("$before", "")
add("arrival-and-a-copy-behind-it", another.replace("$behind", "CP(s + 16, x)  // @d"), grid(1, 64), races="d~r")

BULK = """
__shared__ alignas(16) u32 s[16];
if (T(0)) {
  for (int i = 0; i < 16; i++) s[i] = i;
  FENCE
  if (blockIdx.x == 0) {
    REDUCE("add.u32", x, s)  // @a
  } else {
    $other
  }
  WAIT_GROUPS
}
"""
for name, other, races in (
    ("the-same", 'REDUCE("add.u32", x, s)  // @b', ""),
    ("another-operation", 'REDUCE("min.u32", x, s)  // @b', ""),
    ("another-size", 'REDUCE("xor.b64", x, s)  // @b', "a~b"),
    ("an-atomic", "RED(relaxed.gpu, add.u32, x + 1, 1)  // @b", ""),
    ("an-atomic-of-the-block", "RED(relaxed.cta, add.u32, x + 1, 1)  // @b", "a~b"),
    ("a-store", "ST(weak, x + 2, 1)  // @b", "a~b"),
    ("a-load", "LD(weak, x + 3)  // @b", "a~b"),
):
    add(f"reduction-beside-{name}", BULK.replace("$other", other), grid(2, 32), races=races)

SENT = """
__shared__ u32 s[32];
__shared__ u64 b;
u32 target, there;
if (T(0)) {
  s[0] = 0;
  INIT(&b, 1)
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
CLUSTER_SYNC
asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(target) : "r"(at_shared(s)));
asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(at_shared(&b)));
if (blockIdx.x == 0 && T(0))
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 8;" :: "r"(at_shared(&b)) : "memory");
if (T(1)) {
  asm volatile("red.async.relaxed.cluster.mbarrier::complete_tx::bytes.shared::cluster.add.u32 [%0], 1, [%1];"
               :: "r"(target), "r"(there) : "memory");  // @a
}
if (blockIdx.x == 0) {
  $early
  AWAIT(&b, 0)
  READS(s)
}
CLUSTER_SYNC
"""
SYNC = 'asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");'
for name, early, races in (("waited-for", "", ""), ("read-early", "if (T(33)) READS(s)  // @r", "a~r")):
    body = SENT.replace("CLUSTER_SYNC", SYNC).replace("$early", early)
    # `AWAIT` acquires at the scope of the block, which the strict profile rejects as too narrow.
    add(f"reductions-of-two-blocks-{name}", body, grid(2, 64, cluster=2), races=races, profiles=("hardware",))


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
