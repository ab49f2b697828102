# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launches, peers, aliases, read-only loads, variables of devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings import driver as types
from driver_helpers import ok
from litmus import At, Lab, Suite, fill, grid, together

suite = Suite()

# Programmatic dependent launches --------------------------------------------------------------------------------------
# The dependent may start when every block of its primary has triggered or ended. The primary's accesses happen before
# those that the dependent makes after its griddepcontrol.wait, but not before those that it makes earlier. Even seeds
# start dependents late, odd ones early.

PDL = """
P(0) {
  $first
  ST(weak, x, 1)  // @w
  $trigger
  ST(weak, y, 1)  // @late
}
P(1) {
  $before
  $wait
  $after
}
P(2) {
  $third
}
"""


def _chain(*steps: tuple[int, bool], threads: int = 32) -> Callable[[Lab], None]:
    """Return a function that launches a kernel for each of `steps`, in one stream. A step is the kernel's role, and
    True for a programmatic dependent launch."""

    def drive(here: Lab) -> None:
        for role, pdl in steps:
            here.launch({role: At()}, here.stream(0), pdl=pdl, block=threads)

    return drive


TWO = _chain((0, False), (1, True))
DATA, LATE = "LD(weak, x)  // @r", "LD(weak, y)  // @r"
for name, parts, races in (
    ("waits", {"wait": "GDC_WAIT", "after": DATA}, ""),
    ("waits-for-what-follows-the-trigger", {"wait": "GDC_WAIT", "after": LATE}, ""),
    ("does-not-wait", {"after": DATA}, "w~r"),
    ("reads-before-its-wait", {"before": DATA, "wait": "GDC_WAIT"}, "w~r"),
    ("writes-before-its-wait", {"before": "ST(weak, x, 2)  // @r", "wait": "GDC_WAIT"}, "w~r"),
    ("writes-behind-its-wait", {"wait": "GDC_WAIT", "after": "ST(weak, x, 2)"}, ""),
    ("reads-something-else-before-its-wait", {"before": "LD(weak, z)", "wait": "GDC_WAIT", "after": DATA}, ""),
    ("writes-what-was-read-before", {"first": "LD(weak, z)  // @a", "before": "ST(weak, z, 2)  // @r"}, "a~r"),
    ("triggers-itself", {"before": "TRIGGER", "after": DATA}, "w~r"),
):
    for trigger in ("TRIGGER", ""):
        body = fill(
            PDL, **{"first": "", "before": "", "wait": "", "after": "", "third": "", **parts, "trigger": trigger}
        )
        suite.add(
            f"dependent-{name}{'' if trigger else '-without-a-trigger'}",
            body,
            TWO,
            races=races,
            edge="griddepcontrol|programmatic|PDL|dependent" if races else None,
        )
# The dependent never waits, so the report must name griddepcontrol.wait as missing, whichever access comes first.
suite.add(
    "dependent-reads-what-its-primary-has-yet-to-write",
    fill(PDL, first="", trigger="TRIGGER LATE(0)", before="", wait="", after=LATE, third=""),
    TWO,
    races="late~r",
    edge="griddepcontrol",
)
WAITED = fill(PDL, first="", trigger="TRIGGER", before="", wait="", after=DATA, third="")
suite.add("dependent-launched-without-the-attribute", WAITED, _chain((0, False), (1, False)))


def _fill_between(here: Lab) -> None:
    here.launch({0: At()}, here.stream(0))
    ok(here.cuda.cuMemsetD32Async(here.m + 8192, 0, 1, here.stream(0)))
    here.launch({1: At()}, here.stream(0), pdl=True)


suite.add("dependent-behind-a-fill-is-an-ordinary-launch", WAITED, _fill_between)

# Three launches in a chain. After a griddepcontrol.wait a thread is ordered after its primary, the previous launch. It
# is ordered after the launch before the primary only if the primary has waited too.
LINK = {"first": "", "trigger": "TRIGGER", "before": "TRIGGER", "after": ""}
for name, wait, third, last, races in (
    ("all-wait", "GDC_WAIT", "GDC_WAIT LD(weak, x)  // @r", True, ""),
    ("the-second-does-not-wait", "", "GDC_WAIT LD(weak, x)  // @r", True, "w~r"),
    ("the-third-does-not-wait", "GDC_WAIT", "LD(weak, x)  // @r", True, "w~r"),
    ("the-third-is-an-ordinary-launch", "GDC_WAIT", "LD(weak, x)  // @r", False, ""),
    ("the-second-does-not-wait-and-the-third-is-ordinary", "", "LD(weak, x)  // @r", False, ""),
):
    suite.add(
        f"chain-{name}",
        fill(PDL, **LINK, wait=wait, third=third),
        _chain((0, False), (1, True), (2, last)),
        races=races,
    )
WAIT_OF_ONE = """
P(0) {
  ST(weak, x, 1)  // @w
}
if (at.a && threadIdx.x == 0) GDC_WAIT
$meet
P(1) {
  LD(weak, x)  // @r
}
"""


def _one_waits(here: Lab) -> None:
    here.launch({0: At()}, here.stream(0), block=64, values=(0, 0))
    here.launch({1: At(thread=40)}, here.stream(0), block=64, values=(1, 0), pdl=True)


suite.add("one-thread-waits-and-a-barrier-follows", fill(WAIT_OF_ONE, meet="BAR"), _one_waits)
suite.add("one-thread-waits-for-itself", fill(WAIT_OF_ONE, meet=""), _one_waits, races="w~r")


def _captured(here: Lab) -> None:
    here.function(0)
    stream = here.stream(0)
    ok(here.cuda.cuStreamBeginCapture(stream, types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    TWO(here)
    graph = ok(here.cuda.cuGraphInstantiate(ok(here.cuda.cuStreamEndCapture(stream)), 0))
    for _ in range(2):
        ok(here.cuda.cuGraphLaunch(graph, stream))


for name, wait, races in (("waits", "GDC_WAIT", ""), ("does-not-wait", "", "w~r")):
    body = fill(PDL, first="", trigger="TRIGGER", before="", wait=wait, after=DATA, third="")
    suite.add(f"dependent-in-a-graph-{name}", body, _captured, races=races)

# Peers ----------------------------------------------------------------------------------------------------------------
# Each of two devices runs a kernel that reads the input of the other device, after a barrier of both devices. Then the
# next kernel of each stream writes the input of the device on which it runs.

EXCHANGE = """
u32* ours = at.a ? n : m; u32* theirs = at.a ? m : n;
if (at.b == 0) {
  LATE(0)
  if (T(0)) ST(release.sys, theirs + 1000, 1)
  if (T(0)) SPIN(acquire.sys, ours + 1000, 1)
  BAR
  LD(weak, theirs + threadIdx.x)  // @r
  $end
} else {
  ST(weak, ours + threadIdx.x, 9)  // @w
}
"""
END = "BAR if (T(0)) { ST(release.sys, theirs + 1001, 1) SPIN(acquire.sys, ours + 1001, 1) }"


def _exchange(here: Lab) -> None:
    n = here.zeros(1)
    for step in (1, 0, 1):
        for device in (0, 1):
            here.launch(grid=1, block=64, device=device, n=n, values=(device, step))


RELAXED = END.replace("release", "relaxed")
NEITHER = RELAXED.replace("acquire", "relaxed")
COUNTED = NEITHER.replace("ST(relaxed.sys, ", "RED(relaxed.sys, add.u32, ")
for name, end, races, strict in (
    ("with-a-barrier-at-the-end", END, "", ""),
    ("with-a-barrier-at-the-start-only", "", "w~r", "w~r"),
    ("with-a-relaxed-barrier-at-the-end", RELAXED, "", "w~r"),
    ("with-a-barrier-at-the-end-that-is-relaxed-on-both-sides", NEITHER, "", "w~r"),
    ("with-a-volatile-barrier-at-the-end", NEITHER.replace("relaxed.sys", "volatile"), "", "w~r"),
    ("with-a-barrier-of-atomics-at-the-end", COUNTED, "", "w~r"),
    # no race without the acquire, as the end of the kernel acquires too
    ("with-an-end-that-does-not-acquire", END.replace("acquire", "relaxed"), "", ""),
    ("with-an-end-before-the-reads-of-others", END.replace("BAR ", ""), "w~r", "w~r"),
    ("with-a-relaxed-end-before-the-reads-of-others", RELAXED.replace("BAR ", ""), "w~r", "w~r"),
):
    suite.add(f"inputs-of-peers-{name}", fill(EXCHANGE, end=end), _exchange, races=races, strict=strict)
PINNED = """
P(0) {
  ST(weak, n, 1)  // @w
  ST(release.$s, n + 64, 1)  // @s
}
P(1) {
  SPIN(acquire.$s, n + 64, 1)  // @a
  LD(weak, n)  // @r
}
"""


def _pinned(here: Lab) -> None:
    n = here.pinned()
    for role in (0, 1):
        here.launch({role: At()}, device=role, n=n)


suite.add("pinned-memory-between-devices", fill(PINNED, s="sys"), _pinned)
suite.add("pinned-memory-between-devices-gpu-scope", fill(PINNED, s="gpu"), _pinned, races="w~r s~a", edge="scope")

# Variables of a module: one copy per device --------------------------------------------------------------------------

VARIABLE = "P(0) {\nST(weak, &variable, 1)  // @w\n}\nP(1) {\nLD(weak, &variable)  // @r\n}"
TOP = "__device__ u32 variable;"
suite.add("variable-of-two-devices", VARIABLE, together(At(), At(device=1)), top=TOP)
suite.add("variable-of-two-blocks", VARIABLE, together(At(), At(block=1)), top=TOP, races="w~r")

# Two addresses of one memory ------------------------------------------------------------------------------------------

ALIAS = """
P(0) {
  ST(weak, m, 1)  // @w
  $signal
}
P(1) {
  $wait
  LD(weak, n)  // @r
}
"""
PROXY = 'asm volatile("fence.proxy.alias;" ::: "memory");'


def _aliases(here: Lab) -> tuple[int, int]:
    """Two addresses of the same memory of device 0. Both devices can access it at both addresses."""
    cuda = here.cuda
    prop = types.CUmemAllocationProp()
    prop.type = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = 0
    size = ok(cuda.cuMemGetAllocationGranularity(prop, types.CUmemAllocationGranularity_flags(0)))
    handle = ok(cuda.cuMemCreate(size, prop, 0))
    access = []
    for device in (0, 1):
        item = types.CUmemAccessDesc()
        item.location.type = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        item.location.id = device
        item.flags = types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        access.append(item)
    found = []
    for _ in range(2):
        address = ok(cuda.cuMemAddressReserve(size, 0, 0, 0))
        ok(cuda.cuMemMap(address, size, 0, handle, 0))
        ok(cuda.cuMemSetAccess(address, size, access, 2))
        found.append(int(address))
    ok(cuda.cuMemsetD32(found[0], 0, 8192))
    ok(cuda.cuCtxSynchronize())
    return found[0], found[1]


def _through_aliases(here: Lab) -> None:
    m, n = _aliases(here)
    here.launch({0: At(), 1: At(block=1)}, m=m, n=n)


def _aliases_of_devices(here: Lab) -> None:
    m, n = _aliases(here)
    here.launch({0: At()}, m=m, n=n)
    here.launch({1: At()}, device=1, m=m, n=n)


def _aliases_in_turn(here: Lab) -> None:
    m, n = _aliases(here)
    here.launch({0: At()}, m=m, n=n)
    here.launch({1: At()}, m=m, n=n)


SIGNAL, WAIT = "ST(release.sys, f, 1)", "SPIN(acquire.sys, f, 1)"
suite.add("aliases", fill(ALIAS, signal="", wait=""), _through_aliases, races="w~r")
suite.add("aliases-of-two-devices", fill(ALIAS, signal="", wait=""), _aliases_of_devices, races="w~r")
for name, drive in (("", _through_aliases), ("-of-two-devices", _aliases_of_devices)):
    suite.add(f"aliases{name}-in-order", fill(ALIAS, signal=f"{PROXY} {SIGNAL}", wait=f"{WAIT} {PROXY}"), drive)
suite.add(
    "aliases-with-the-flag-through-both",
    fill(ALIAS, signal=f"{PROXY} ST(release.gpu, m + 16, 1)", wait=f"SPIN(acquire.gpu, n + 16, 1) {PROXY}"),
    _through_aliases,
)
suite.add("aliases-in-two-kernels", fill(ALIAS, signal="", wait=""), _aliases_in_turn)

# The read-only path ---------------------------------------------------------------------------------------------------
# ld.global.nc may only read memory that is not written while its kernel runs, even if the write is ordered before the
# load.

NC = '{ u32 v_; asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v_) : "l"(x) : "memory"); }'
READ_ONLY = f"""
P(0) {{
  ST(weak, x, 1)  // @w
  ST(release.sys, f, 1)
}}
P(1) {{
  SPIN(acquire.sys, f, 1)
  {NC}  // @r
}}
"""
READ_ONLY_LATER = f"P(0) {{\nST(weak, x, 1)  // @w\n}}\nP(1) {{\n{NC}  // @r\n}}"
for name, at in (("kernel", At(block=1)), ("block", At(thread=1)), ("peer", At(device=1))):
    suite.add(
        f"read-only-load-of-what-its-{name}-writes-meanwhile",
        READ_ONLY,
        together(At(), at),
        races="w~r",
    )
OWN = f"if (T(0)) ST(weak, x, 1)  // @w\nBAR\nif (T(at.a)) {NC}  // @r"
for name, thread in (("the-thread-itself", 0), ("another-thread", 40)):
    suite.add(
        f"read-only-load-of-what-{name}-wrote-before-a-barrier",
        OWN,
        grid(1, 64),
        races="r~w",
        values=(thread, 0),
        edge="read-only",
    )


def _later(here: Lab) -> None:
    here.launch({0: At()})
    here.launch({1: At()})


suite.add("read-only-load-of-what-an-earlier-kernel-wrote", READ_ONLY_LATER, _later)
suite.add(
    "read-only-load-of-what-nobody-writes",
    READ_ONLY_LATER.replace("ST(weak, x, 1)", "LD(weak, x)"),
    together(At(), At(block=1)),
)
suite.add("read-only-load-without-any-order", READ_ONLY_LATER, together(At(), At(block=1)), races="w~r")


@pytest.mark.parametrize(("case", "profile"), suite.params())
def test_reports_agree_with_the_verdict_of_each_case(case: Any, profile: str) -> None:
    suite.check(case, profile)
