# SPDX-License-Identifier: Apache-2.0
"""Atomic operations: release sequences, last arrivers, locks, grid barriers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from litmus import Lab, Suite, fill, grid, place

suite = Suite()

# Read-modify-write operations continue a release sequence; stores of other threads end it ----------------------------

CHAIN = """
P(0) {
  ST(weak, x, 1)  // @w0
  $first  // @first
}
P(1) {
  SPIN($seen, f, 1)  // @seen
  ST(weak, y, 1)  // @w1
  $second  // @second
  ST(relaxed.gpu, g, 1)
}
P(2) {
  SPIN(relaxed.gpu, g, 1)  // not of f: a poll that still reads the first value would acquire it
  LD(acquire.gpu, f)  // @a
  LD(weak, x)  // @r0
  $more  // @r1
}
"""
FIRSTS = {
    "store": "ST(release.gpu, f, 1)",
    "atomic": "ATOM(release.gpu, add.u32, f, 1)",
    "fence": "FENCE(acq_rel.gpu) ST(relaxed.gpu, f, 1)",
    "reduction": "RED(release.gpu, add.u32, f, 1)",
}
SECONDS = {
    "atomic": "ATOM(relaxed.gpu, add.u32, f, 1)",
    "reduction": "RED(relaxed.gpu, add.u32, f, 1)",
    "exchange": "ATOM(relaxed.gpu, exch.b32, f, 2)",
    "compare-and-swap": "{ u32 v; CAS(v, relaxed.gpu, f, 1, 2) }",
}
for (name, first), (how, second) in itertools.product(FIRSTS.items(), SECONDS.items()):
    suite.add(
        f"release-by-{name}-then-{how}",
        fill(CHAIN, first=first, seen="relaxed.gpu", second=second, more=""),
        place("gpu", 3),
        seeds=range(4),
    )
for name, first in FIRSTS.items():
    suite.add(
        f"release-by-{name}-then-a-store-of-another-thread",
        fill(CHAIN, first=first, seen="relaxed.gpu", second="ST(relaxed.gpu, f, 2)", more=""),
        place("gpu", 3),
        races="w0~r0",
        seeds=range(4),
    )
suite.add(
    "a-relaxed-link-carries-none-of-its-own-data",
    fill(CHAIN, first=FIRSTS["store"], seen="relaxed.gpu", second=SECONDS["atomic"], more="LD(weak, y)"),
    place("gpu", 3),
    races="w1~r1",
)
suite.add(
    "a-releasing-link-carries-both",
    fill(
        CHAIN, first=FIRSTS["store"], seen="relaxed.gpu", second="ATOM(release.gpu, add.u32, f, 1)", more="LD(weak, y)"
    ),
    place("gpu", 3),
)
suite.add(
    "a-releasing-store-replaces-the-chain",
    fill(CHAIN, first=FIRSTS["store"], seen="relaxed.gpu", second="ST(release.gpu, f, 2)", more="LD(weak, y)"),
    place("gpu", 3),
    races="w0~r0",
)
suite.add(
    "a-releasing-store-behind-an-acquire-passes-it-on",
    fill(CHAIN, first=FIRSTS["store"], seen="acquire.gpu", second="ST(release.gpu, f, 2)", more="LD(weak, y)"),
    place("gpu", 3),
)
suite.add(
    "a-link-of-narrow-scope-breaks-the-chain",
    fill(CHAIN, first=FIRSTS["store"], seen="relaxed.gpu", second="ATOM(relaxed.cta, add.u32, f, 1)", more=""),
    place("gpu", 3),
    races="second~a w0~r0",  # no race first~a: `a` has observed the store `first`
)
suite.add(
    "a-failed-compare-and-swap-leaves-the-chain",
    fill(
        CHAIN,
        first="ST(release.gpu, f, 2)",
        seen="relaxed.gpu",
        second="{ u32 v; CAS(v, relaxed.gpu, f, 7, 9) }",
        more="",
    ),
    place("gpu", 3),
)
# A compare-and-swap that fails writes nothing: it releases nothing, and does not conflict with reads.
WIDE = """
#define CAS32(old) asm volatile("{ .reg .b32 d; atom.release.gpu.global.cas.b32 d, [%0], %1, %2; }" \\
  :: "l"(f), "r"(old), "r"(5) : "memory");
#define CAS64(old) asm volatile("{ .reg .b64 d; atom.release.gpu.global.cas.b64 d, [%0], %1, %2; }" \\
  :: "l"(f), "l"((u64)old << 40), "l"(5ull) : "memory");
#define LD32(sem) asm volatile("{ .reg .b32 d; ld." #sem ".global.b32 d, [%0]; }" :: "l"(f) : "memory");
#define LD64(sem) asm volatile("{ .reg .b64 d; ld." #sem ".global.b64 d, [%0]; }" :: "l"(f) : "memory");
#define ST64(sem) asm volatile("st." #sem ".global.b64 [%0], %1;" :: "l"(f), "l"(5ull) : "memory");
"""
COMPARED = """
P(0) {
  ST(weak, x, 1)  // @w
  $swap  // @s
  ST(relaxed.gpu, g, 1)
}
P(1) {
  SPIN(relaxed.gpu, g, 1)
  $read  // @a
  LD(weak, x)  // @r
}
"""
for bits, old in itertools.product((32, 64), (0, 7)):
    for sem, races in (("acquire.gpu", "w~r" if old else ""), ("weak", "w~r" if old else "w~r s~a")):
        suite.add(
            f"compare-and-swap-{bits}-of-0-with-{old}-then-{sem}",
            fill(COMPARED, swap=f"CAS{bits}({old})", read=f"LD{bits}({sem})"),
            place("gpu", 2),
            races=races,
            top=WIDE,
        )
# A release and an acquire synchronise only if they access words of the same size.
suite.add(
    "flag-of-64-bits-polled-by-32",
    "P(0) {\nST(weak, x, 1)  // @w\nST64(release.gpu)  // @s\n}\n"
    "P(1) {\nSPIN(acquire.gpu, f, 1)  // @a\nLD(weak, x)  // @r\n}",
    place("gpu", 2),
    races="w~r s~a",
    edge="size",
    top=WIDE,
)
OWN = """
P(0) {
  ST(weak, x, 1)  // @w0
  ST(release.gpu, f, 1)
  ST(weak, y, 1)  // @w1
  $again
}
P(1) {
  SPIN(acquire.gpu, f, 2)
  LD(weak, x)  // @r0
  LD(weak, y)  // @r1
}
"""
for name, again, races in (
    ("relaxed-store", "ST(relaxed.gpu, f, 2)", "w1~r1"),
    ("relaxed-atomic", "ATOM(relaxed.gpu, add.u32, f, 1)", "w1~r1"),
    ("release", "ST(release.gpu, f, 2)", ""),
):
    suite.add(f"own-{name}-after-a-release", fill(OWN, again=again), place("gpu", 2), races=races)

# A reduction (red) does not acquire by its read (PTX ISA, note at "Release and Acquire Patterns"); an atomic may
# acquire.
SILENT = """
P(0) {
  ST(weak, x, 1)  // @w
  ST(release.gpu, f, 1)
  ST(relaxed.gpu, g, 1)
}
P(1) {
  SPIN(relaxed.gpu, g, 1)
  $update
  FENCE(acq_rel.gpu)
  LD(weak, x)  // @r
}
"""
suite.add("an-atomic-and-a-fence-acquire", fill(SILENT, update="ATOM(relaxed.gpu, add.u32, f, 1)"), place("gpu", 2))
suite.add(
    "a-reduction-and-a-fence-do-not",
    fill(SILENT, update="RED(relaxed.gpu, add.u32, f, 1)"),
    place("gpu", 2),
    races="w~r",
)

# Several threads increment one word.
COUNT = """
if (T(0) && blockIdx.x < 4) {
  LATE(0)
  ST(weak, x + blockIdx.x, 1)  // @w
  if (blockIdx.x == at.a) RED(relaxed.gpu, add.u32, f, 1) else $how
}
if (T(0) && blockIdx.x == 4) {
  LATE(1)
  SPIN(acquire.gpu, f, 4)
  for (int i = 0; i < 4; i++) LD(weak, x + i)  // @r
}
"""
for how in ("RED(release.gpu, add.u32, f, 1)", "ATOM(acq_rel.gpu, add.u32, f, 1)"):
    for lazy in (999, 0, 1, 2, 3):
        suite.add(
            f"four-count-by-{how[:3].lower()}{'' if lazy == 999 else f'-but-block-{lazy}-relaxed'}",
            fill(COUNT, how=how),
            grid(5, 32),
            races="" if lazy == 999 else "w~r",
            values=(lazy, 0),
            detail=lambda r, lazy=lazy: lazy in (r.block[0], r.other.block[0]),
            seeds=range(4),
        )

# The last block to arrive reads what all wrote ------------------------------------------------------------------------

LAST = """
u32 t = threadIdx.x, b = blockIdx.x;
__shared__ u32 last;
LATE(0)
ST(weak, x + b * 64 + t, t)  // @w
$every
$meet
if (t == 0) {
  u32 old;
  $before
  RMW(old, $sem, add.u32, f, 1)
  $after
  STS(&last, old)
}
BAR
u32 place; LDS(place, &last)
if (place == gridDim.x - 1) {
  $reader
  for (int i = 0; i < 4; i++) LD(weak, x + i * 64 + (t + 1) % 64)  // @r
  $reset  // @reset
}
"""
GPU = "FENCE(acq_rel.gpu)"
LASTS: dict[str, tuple[dict[str, str], str, str | None, tuple[str, ...]]] = {
    "acq-rel": ({"sem": "acq_rel.gpu"}, "", None, ()),
    "fences-of-one": ({"before": GPU, "after": GPU}, "", None, ()),
    "threadfences": ({"before": "__threadfence();", "after": "__threadfence();"}, "", None, ()),
    "release-and-fence": ({"sem": "release.gpu", "after": GPU}, "", None, ()),
    "fence-and-acquire": ({"before": GPU, "sem": "acquire.gpu"}, "", None, ()),
    "all-fence-then-one-counts": ({"every": GPU, "after": GPU}, "", "w~r", ()),
    "all-threadfence-then-one-counts": ({"every": "__threadfence();", "after": GPU}, "", "w~r", ()),
    "no-fence-before": ({"after": GPU}, "w~r", None, ()),
    "no-fence-after": ({"before": GPU}, "w~r", None, ()),
    "no-fence": ({}, "w~r", None, ()),
    "release-only": ({"sem": "release.gpu"}, "w~r", None, ()),
    "acquire-only": ({"sem": "acquire.gpu"}, "w~r", None, ()),
    "one-fences-before-the-barrier": ({"every": f"if (t == 0) {GPU}", "after": GPU}, "w~r", None, ()),
    "all-fence-for-the-block": ({"every": "FENCE(acq_rel.cta)", "after": GPU}, "w~r", None, ()),
    "one-fences-for-the-block": ({"before": "FENCE(acq_rel.cta)", "after": GPU}, "w~r", None, ()),
    "acq-rel-without-the-barrier": ({"sem": "acq_rel.gpu", "meet": ""}, "w~r", None, ()),
    # A fence of a thread that has read no flag acquires nothing.
    "fences-of-the-readers": ({"before": GPU, "reader": GPU}, "w~r", None, ("strict",)),
}
for name, (parts, races, strict, profiles) in LASTS.items():
    parts = {
        "every": "",
        "meet": "BAR",
        "before": "",
        "sem": "relaxed.gpu",
        "after": "",
        "reader": "",
        "reset": "",
        **parts,
    }
    suite.add(
        f"last-arriver-{name}",
        fill(LAST, **parts),
        grid(4, 64),
        races=races,
        strict=strict,
        profiles=profiles or ("hardware", "strict"),
    )
# The last block may reset the counter with a plain store: it has observed the operations of all other blocks.
for name in ("acq-rel", "fences-of-one", "threadfences"):
    parts = {
        "every": "",
        "meet": "BAR",
        "before": "",
        "sem": "relaxed.gpu",
        "after": "",
        "reader": "",
        **LASTS[name][0],
    }
    suite.add(
        f"last-arriver-{name}-resets-plainly",
        fill(LAST, **parts, reset="if (t == 0) ST(weak, f, 0)"),
        grid(4, 64),
    )
# A grid of one block has no other block to wait for.
suite.add(
    "last-arriver-alone",
    fill(LAST, every="", meet="BAR", before="", sem="relaxed.gpu", after="", reader="", reset="").replace(
        "i < 4", "i < 1"
    ),
    grid(1, 64),
)

# Locks ----------------------------------------------------------------------------------------------------------------

LOCK = """
if (T(0)) {
  LATE(0)
  for (int round = 0; round < 3; round++) {
    u32 old;
    do CAS(old, $take, f, 0, 1) while (old);  // @take
    $after
    { u32 v; GET(v, weak, x) ST(weak, x, v + 1) }  // @c
    $before
    $give  // @give
  }
}
"""
LOCKS: dict[str, tuple[tuple[str, str, str, str], str, str]] = {
    "acquire-release": (("acquire.gpu", "", "", "ST(release.gpu, f, 0)"), "", ""),
    "exchange": (("acquire.gpu", "", "", "ATOM(release.gpu, exch.b32, f, 0)"), "", ""),
    "fences": (("relaxed.gpu", GPU, GPU, "ST(relaxed.gpu, f, 0)"), "", ""),
    "threadfences": (
        ("relaxed.gpu", "__threadfence();", "__threadfence();", "ATOM(relaxed.gpu, exch.b32, f, 0)"),
        "",
        "",
    ),
    "volatile-release": (("acquire.gpu", "", GPU, "ST(volatile, f, 0)"), "", ""),
    "relaxed-take": (("relaxed.gpu", "", "", "ST(release.gpu, f, 0)"), "c~c", ""),
    "releasing-take": (("release.gpu", "", "", "ST(release.gpu, f, 0)"), "c~c", ""),
    "relaxed-give": (("acquire.gpu", "", "", "ST(relaxed.gpu, f, 0)"), "c~c", ""),
    "no-fence-after-taking": (("relaxed.gpu", "", GPU, "ST(relaxed.gpu, f, 0)"), "c~c", ""),
    "no-fence-before-giving": (("relaxed.gpu", GPU, "", "ATOM(relaxed.gpu, exch.b32, f, 0)"), "c~c", ""),
    "plain-give": (("acquire.gpu", "", GPU, "ST(weak, f, 0)"), "c~c give~take", "give~give"),
    "of-the-block-only": (("acquire.cta", "", "", "ST(release.cta, f, 0)"), "c~c give~take", "give~give take~take"),
}
for name, ((take, after, before, give), races, maybe) in LOCKS.items():
    suite.add(
        f"lock-{name}",
        fill(LOCK, take=take, after=after, before=before, give=give),
        grid(3, 32),
        races=races,
        maybe=maybe,
    )
LANES = fill(LOCK, take="acquire.cta", after="", before="", give="ST(release.cta, f, 0)").replace(
    "T(0)", "threadIdx.x < 3"
)
suite.add("lock-between-lanes-of-a-warp", LANES, grid(1, 32))
suite.add(
    "lock-between-lanes-of-a-warp-relaxed",
    LANES.replace("acquire", "relaxed"),
    grid(1, 32),
    races="c~c",
)
TICKET = """
if (T(0)) {
  LATE(0)
  for (int round = 0; round < 3; round++) {
    u32 mine; RMW(mine, relaxed.gpu, add.u32, f, 1)
    { u32 now; do GET(now, $wait, g) while (now != mine); }
    { u32 v; GET(v, weak, x) ST(weak, x, v + 1) }  // @c
    ST($give, g, mine + 1)
  }
}
"""
for wait, give in itertools.product(("acquire", "relaxed"), ("release", "relaxed")):
    suite.add(
        f"ticket-lock-{wait}-{give}",
        fill(TICKET, wait=f"{wait}.gpu", give=f"{give}.gpu"),
        grid(3, 32),
        races="" if (wait, give) == ("acquire", "release") else "c~c",
    )

# Grid barriers --------------------------------------------------------------------------------------------------------

GRID = """
u32 t = threadIdx.x, b = blockIdx.x, n_ = gridDim.x;
LATE(0)
for (u32 k = 0; k < 4; k++) {
  ST(weak, $buffer + b * 64 + t, k)  // @w
  $enter
  if (t == 0) {
    $arrive
  }
  $leave
  LD(weak, $buffer + (b + 1) % n_ * 64 + (t + 5) % 64)  // @r
}
"""
COUNTER = "RED(release.gpu, add.u32, f, 1) SPIN(acquire.gpu, f, (k + 1) * n_)"
GENERATION = """
    u32 old; RMW(old, acq_rel.gpu, add.u32, f, 1)
    if (old == n_ - 1) {
      ST(relaxed.gpu, f, 0)
      ST(release.gpu, g, k + 1)
    } else SPIN(acquire.gpu, g, k + 1)
"""
PAIR = "x + k % 2 * 512"
GRIDS = {
    "counter": (PAIR, "BAR", COUNTER, "BAR", ""),
    "fences": (
        PAIR,
        "BAR",
        "FENCE(sc.gpu) RED(relaxed.gpu, add.u32, f, 1) SPIN(relaxed.gpu, f, (k + 1) * n_) FENCE(sc.gpu)",
        "BAR",
        "",
    ),
    "generation": (PAIR, "BAR", GENERATION, "BAR", ""),
    "one-buffer": ("x", "BAR", COUNTER, "BAR", "w~r"),
    "relaxed-arrival": (PAIR, "BAR", COUNTER.replace("release", "relaxed"), "BAR", "w~r"),
    "relaxed-wait": (PAIR, "BAR", COUNTER.replace("acquire", "relaxed"), "BAR", "w~r"),
    "no-barrier-before": (PAIR, "", COUNTER, "BAR", "w~r"),
    "no-barrier-after": (PAIR, "BAR", COUNTER, "", "w~r"),
    "generation-relaxed-arrival": (PAIR, "BAR", GENERATION.replace("acq_rel", "acquire"), "BAR", "w~r"),
    "generation-arrival-does-not-acquire": (PAIR, "BAR", GENERATION.replace("acq_rel", "release"), "BAR", "w~r"),
    "generation-relaxed-store": (PAIR, "BAR", GENERATION.replace("ST(release", "ST(relaxed"), "BAR", "w~r"),
}
for name, (buffer, enter, arrive, leave, races) in GRIDS.items():
    suite.add(
        f"grid-barrier-{name}",
        fill(GRID, buffer=buffer, enter=enter, arrive=arrive, leave=leave),
        grid(4, 64, cooperative=True),
        races=races,
        seeds=range(4),
    )

# Data that is its own flag, and sequence locks ------------------------------------------------------------------------

SENTINEL = """
P(0) {
  ST(weak, y, 5)  // @guarded
  ST($store, x, 7)  // @w
}
P(1) {
  SPIN($load, x, 7)  // @r
  $also
  ST(weak, n + 4, 1)  // @wide
}
P(2) {
  LD(weak, n + 4)  // @near
}
"""


def _declared(here: Lab, nbytes: int = 16, offset: int = 0) -> None:
    here.machine.declare_polled(here.m + offset, nbytes)
    place("gpu", 2)(here)


for store, load, races in (
    ("weak", "volatile", "w~r"),
    ("weak", "relaxed.sys", "w~r"),
    ("volatile", "volatile", ""),
    ("relaxed.gpu", "relaxed.gpu", ""),
):
    body = fill(SENTINEL, store=store, load=load, also="")
    suite.add(f"sentinel-{store}-{load}", body, place("gpu", 2), races=races)
    suite.add(f"sentinel-{store}-{load}-declared", body, _declared)
GUARDED = fill(SENTINEL, store="weak", load="relaxed.gpu", also="LD(weak, y)  // @also")
suite.add("a-declared-sentinel-guards-nothing-else", GUARDED, _declared, races="guarded~also")
suite.add(
    "a-declaration-covers-its-range-only",
    fill(SENTINEL, store="weak", load="relaxed.gpu", also=""),
    lambda here: _declared(here, 16, 16),
    races="w~r",
)


def _near(here: Lab) -> None:
    here.machine.declare_polled(here.m, 16)
    place("gpu", 3)(here)


suite.add(
    "words-behind-a-declared-range-are-checked",
    fill(SENTINEL, store="weak", load="volatile", also=""),
    _near,
    races="wide~near",
)
SEQLOCK = """
P(0) {
  ST(relaxed.gpu, f, 1)
  FENCE(acq_rel.gpu)
  ST($data, x, 1)  // @w
  ST(release.gpu, f, 2)
}
P(1) {
  u32 before, after, v;
  do {
    do GET(before, acquire.gpu, f) while (before & 1);
    GET(v, $data, x)  // @r
    FENCE(acq_rel.gpu)
    GET(after, relaxed.gpu, f)
  } while (before != after);
}
"""
suite.add("sequence-lock-relaxed-data", fill(SEQLOCK, data="relaxed.gpu"), place("gpu", 2))
# The plain accesses race if the reader comes first, so the writer is late here.
suite.add("sequence-lock-plain-data", fill(SEQLOCK, data="weak"), place("gpu", 2), races="w~r", late=(0,))
suite.add("sequence-lock-plain-data-read-late", fill(SEQLOCK, data="weak"), place("gpu", 2), late=(1,))


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
