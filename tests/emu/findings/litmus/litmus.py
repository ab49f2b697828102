# SPDX-License-Identifier: Apache-2.0
"""A declarative harness for litmus tests of the race detector.

A litmus case has three parts: the body of a kernel in CUDA C++; the place where the kernel's threads run (`Drive`); and
for each profile of the detector the pairs of accesses that race, by the PTX memory consistency model and the CUDA rules
for streams. The line of an access ends with a mark such as `// @w`. A race is a pair of marks, "w~r"; several races are
pairs separated by spaces. The accesses of a queued copy or fill have the mark "host".

`P(0) { ... }` is the code of role 0, which one thread executes; `together(...)` and `place(...)` choose the thread of
each role. Bodies without roles use blockIdx and threadIdx. `LATE(i)` sleeps in runs in which role i is late, so that
each of two accesses comes first in some run. A race has to be reported in both orders, unless a case says otherwise.

Every case runs once for each of its seeds, on a new machine each time. The case fails if a required report is missing,
if there is any other report (except those that `exited` allows), or if a launch fails.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import ok, ptx

from drvfuse.emu import Machine

SEEDS = range(6)
PROFILES = ("hardware", "strict")
WORDS = 1 << 14
PER_MODULE = 12
# Reads of uninitialised memory are allowed: in a race the read may come before the first write.
DEFAULTS = {"devices": 2, "sm_count": 8, "check_initialised": False}
NOBODY = 0xFFFFFFFF

PRELUDE = """
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned u32; typedef unsigned long long u64;
struct Setup { u32 role[8]; u32 late, a, b; };
__device__ __forceinline__ bool nap(bool late) {
  for (int i = 0; late && i < 40; i++) __nanosleep(1000);
  return true;
}
__device__ __forceinline__ u32 self() { return blockIdx.x << 10 | threadIdx.x; }
#define T(i) (threadIdx.x == (i))
#define P(i) if (self() == at.role[i] && nap(at.late == (i)))
#define LATE(i) nap(at.late == (i));
#define LD(sem, p) { u32 v_; asm volatile("ld." #sem ".global.u32 %0, [%1];" : "=r"(v_) : "l"(p) : "memory"); }
#define GET(v, sem, p) asm volatile("ld." #sem ".global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
#define ST(sem, p, v) asm volatile("st." #sem ".global.u32 [%0], %1;" :: "l"(p), "r"((u32)(v)) : "memory");
#define SPIN(sem, p, v) { u32 v_; do GET(v_, sem, p) while (v_ < (v)); }
#define RMW(v, sem, op, p, n) \\
  asm volatile("atom." #sem ".global." #op " %0, [%1], %2;" : "=r"(v) : "l"(p), "r"((u32)(n)) : "memory");
#define ATOM(sem, op, p, n) { u32 v_; RMW(v_, sem, op, p, n) }
#define RED(sem, op, p, n) asm volatile("red." #sem ".global." #op " [%0], %1;" :: "l"(p), "r"((u32)(n)) : "memory");
#define CAS(v, sem, p, old, n) \\
  asm volatile("atom." #sem ".global.cas.b32 %0, [%1], %2, %3;" \\
               : "=r"(v) : "l"(p), "r"((u32)(old)), "r"((u32)(n)) : "memory");
#define FENCE(sem) asm volatile("fence." #sem ";" ::: "memory");
#define MEMBAR(level) asm volatile("membar." #level ";" ::: "memory");
#define BAR __syncthreads();
#define BARRIER(id, n) asm volatile("bar.sync " #id ", " #n ";" ::: "memory");
#define ARRIVE(id, n) asm volatile("bar.arrive " #id ", " #n ";" ::: "memory");
#define WARP(mask) __syncwarp(mask);
#define LDS(v, p) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"((u32)__cvta_generic_to_shared(p)) : "memory");
#define READS(p) { u32 v_; LDS(v_, p) }
#define STS(p, v) \\
  asm volatile("st.shared.u32 [%0], %1;" :: "r"((u32)__cvta_generic_to_shared(p)), "r"((u32)(v)) : "memory");
#define GDC_WAIT asm volatile("griddepcontrol.wait;" ::: "memory");
#define TRIGGER asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
"""
VARIABLES = "u32 *x = m, *y = m + 1024, *z = m + 2048, *f = m + 3072, *g = m + 4096, *h = m + 5120;"

Pair = tuple[str, str]
Drive = Callable[["Lab"], None]


def pairs(text: str) -> frozenset[Pair]:
    """Return the races that a text such as "w~r s~a" lists, each as a pair of marks in alphabetical order."""
    found = set()
    for item in text.split():
        one, two = sorted(item.split("~"))
        found.add((one, two))
    return frozenset(found)


class Setup(ctypes.Structure):
    """The kernels' last parameter: the thread of each role, the role that sleeps before its accesses (`late`), and two
    values for the body (`a` and `b`)."""

    _fields_ = [
        ("role", ctypes.c_uint32 * 8),
        ("late", ctypes.c_uint32),
        ("a", ctypes.c_uint32),
        ("b", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class At:
    """The thread that executes a role, the code in `P(i)`. Roles of one device and stream are one launch."""

    device: int = 0
    block: int = 0
    thread: int = 0
    stream: int = 0


@dataclass(frozen=True)
class Case:
    """A kernel body, the threads that run it, and the expected reports.

    races   pairs that must be reported in the hardware profile
    strict  pairs that must be reported in the strict profile; None: those of `races`
    some    pairs of which at least one must be reported; the others may be
    maybe   pairs that may be reported, as they follow from the same mistake
    edge    a pattern that the text `edge` of every required report, which says what order is missing, has to match,
            ignoring case
    detail  a further condition for each reported race
    late    the role that is late in the first run, in the second, and so on; None: no role, then each role
    values  the kernel's parameters at.a and at.b
    exited  lanes exit before a barrier of their warp, and the strict profile must also report that
    """

    name: str
    body: str
    drive: Drive
    races: str = ""
    strict: str | None = None
    some: str = ""
    maybe: str = ""
    edge: str | None = None
    detail: Callable[[Any], bool] | None = None
    late: tuple[int, ...] | None = None
    seeds: Sequence[int] = SEEDS
    profiles: tuple[str, ...] = PROFILES
    values: tuple[int, int] = (0, 0)
    top: str = ""
    exited: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def required(self, profile: str) -> frozenset[Pair]:
        return pairs(self.races if profile == "hardware" or self.strict is None else self.strict)

    def lates(self) -> tuple[int, ...]:
        if self.late is not None:
            return self.late
        roles = {int(n) for n in re.findall(r"\b(?:P|LATE)\((\d)\)", self.body)}
        return (NOBODY, *sorted(roles))


@dataclass(frozen=True)
class Kernel:
    """A kernel with the body of a case: its name, the source of its module, and for each marked line of that source the
    mark, such as "w" for `// @w`."""

    name: str
    source: str
    marks: dict[int, str]


class Suite:
    """The cases of a test module, whose kernels are compiled together."""

    def __init__(self) -> None:
        self.cases: list[Case] = []
        self._kernels: dict[tuple[str, str], None] = {}

    def add(self, name: str, body: str, drive: Drive, **verdict: Any) -> None:
        case = Case(name, body, drive, **verdict)
        if any(other.name == name for other in self.cases):
            raise ValueError(f"two cases are named {name}")
        unknown = {mark for pair in _mentioned(case) for mark in pair} - {*re.findall(r"// @(\w+)", body), "host"}
        if unknown:
            raise ValueError(f"{name}: no access is marked {', '.join(sorted(unknown))}")
        self.cases.append(case)
        self._kernels[case.top, case.body] = None

    def params(self) -> list[Any]:
        """Return each case with each of its profiles, for `pytest.mark.parametrize(("case", "profile"), ...)`."""
        return [
            pytest.param(case, profile, id=f"{case.name}-{profile}") for case in self.cases for profile in case.profiles
        ]

    def kernel(self, case: Case) -> Kernel:
        return self._modules[case.top, case.body]

    @functools.cached_property
    def _modules(self) -> dict[tuple[str, str], Kernel]:
        """The kernel of each (top, body).

        A module holds at most PER_MODULE kernels, because running one case loads its whole module.
        """
        kernels = {}
        keys = sorted(self._kernels, key=lambda key: key[0])
        for top in dict.fromkeys(top for top, _ in keys):
            bodies = [body for t, body in keys if t == top]
            for start in range(0, len(bodies), PER_MODULE):
                text = [PRELUDE, top]
                named = {f"k{start + i}": body for i, body in enumerate(bodies[start : start + PER_MODULE])}
                for name, body in named.items():
                    text.append(
                        f'extern "C" __global__ void {name}(u32* m, u32* n, Setup at) {{ {VARIABLES}\n{body}\n}}'
                    )
                source = "\n".join(text)
                found = ((i, re.search(r"// @(\w+)\s*$", line)) for i, line in enumerate(source.split("\n"), 1))
                marks = {line: match[1] for line, match in found if match}
                kernels.update({(top, body): Kernel(name, source, marks) for name, body in named.items()})
        return kernels

    def check(self, case: Case, profile: Any) -> None:
        """Run a case under its seeds; the test fails with a list of all disagreements.

        The strict profile runs under all seeds if it has a verdict of its own, otherwise under the last two.
        """
        seeds = case.seeds if profile == "hardware" or case.strict is not None else case.seeds[-2:]
        found = [text for seed in seeds for text in self.disagreements(case, profile, seed)]
        if found:
            pytest.fail(f"{case.name}, {profile}:\n  " + "\n  ".join(found[:12]) + f"\n{case.body}", pytrace=False)

    def disagreements(self, case: Case, profile: Any, seed: int) -> list[str]:
        lates = case.lates()
        late = lates[seed % len(lates)]
        with lab(self, case, profile, seed, late) as made:
            case.drive(made)
            made.finish()
            reports = list(made.machine.reports)
        who = f"seed {seed}, {'nobody' if late == NOBODY else f'role {late}'} late: "
        return [who + text for text in judge(case, profile, reports, self.kernel(case).marks)]


def _mentioned(case: Case) -> frozenset[Pair]:
    return pairs(" ".join((case.races, case.strict or "", case.some, case.maybe)))


def judge(case: Case, profile: str, reports: Sequence[Any], marks: dict[int, str]) -> list[str]:
    """Lines that say how the reports of one run differ from those that the case expects; none if they agree."""
    others = [report for report in reports if report.kind != "race"]
    left = case.exited and profile == "strict"
    wrong = [f"not a race: {report}" for report in others if not left or report.kind != "barrier_exited"]
    wrong += ["no report of the lanes that have exited"] if left and not others else []
    required, some = case.required(profile), pairs(case.some)
    seen: set[Pair] = set()
    for report in reports:
        if report.kind != "race":
            continue
        one, two = sorted(_mark(place, marks) for place in (report, report.other))
        seen.add((one, two))
        if (one, two) not in required | some | pairs(case.maybe):
            wrong.append(f"false report {one}~{two}: {report}")
        elif (one, two) in required and case.edge and not re.search(case.edge, report.edge, re.IGNORECASE):
            wrong.append(f"{one}~{two}: the missing edge is not named by {report.edge!r}")
        if not report.edge or case.detail is not None and not case.detail(report):
            wrong.append(f"{one}~{two}: the details are wrong: {report} {report.other} {report.edge!r}")
    wrong += [f"missed {one}~{two}" for one, two in sorted(required - seen)]
    if some and not some & seen:
        wrong.append(f"missed all of {case.some}")
    return wrong


def _mark(place: Any, marks: dict[int, str]) -> str:
    if place.line is None:
        return "host"
    return marks.get(place.line, f"line{place.line}")


# Running --------------------------------------------------------------------------------------------------------------


class Lab:
    """A machine with the memory, the streams and the kernel of a case.

    `m` holds WORDS words of zeros on device 0; every device can access the memory of every other device.
    """

    def __init__(self, suite: Suite, case: Case, machine: Machine, late: int) -> None:
        self.machine, self.cuda, self.case = machine, machine.driver, case
        kernel = suite.kernel(case)
        self._kernel, self._image = kernel.name.encode(), ptx(kernel.source)
        self._late = late
        cuda = self.cuda
        ok(cuda.cuInit(0))
        self.contexts = [ok(cuda.cuDevicePrimaryCtxRetain(d)) for d in range(len(machine.devices))]
        self._functions: dict[int, Any] = {}
        self._streams: dict[tuple[int, int, int], Any] = {}
        for here in self.contexts:
            ok(cuda.cuCtxSetCurrent(here))
            for there in self.contexts:
                if there is not here:
                    ok(cuda.cuCtxEnablePeerAccess(there, 0))
        self.use(0)
        self.m = self.zeros()

    def use(self, device: int) -> None:
        ok(self.cuda.cuCtxSetCurrent(self.contexts[device]))

    def zeros(self, device: int = 0, words: int = WORDS) -> int:
        """New memory that the host has set to 0."""
        self.use(device)
        pointer = ok(self.cuda.cuMemAlloc(4 * words))
        ok(self.cuda.cuMemcpyHtoD(pointer, np.zeros(words, np.uint32), 4 * words))
        return int(pointer)

    def pinned(self, words: int = WORDS) -> int:
        address = int(ok(self.cuda.cuMemHostAlloc(4 * words, 0)))
        ctypes.memset(address, 0, 4 * words)
        return address

    def stream(self, number: int = 0, device: int = 0, flags: int = 1) -> Any:
        """One of the device's streams; non-blocking unless flags is 0."""
        key = (device, number, flags)
        if key not in self._streams:
            self.use(device)
            self._streams[key] = ok(self.cuda.cuStreamCreate(flags))
        return self._streams[key]

    def event(self, device: int = 0) -> Any:
        self.use(device)
        return ok(self.cuda.cuEventCreate(2))

    def function(self, device: int) -> Any:
        if device not in self._functions:
            self.use(device)
            module = ok(self.cuda.cuModuleLoadData(self._image))
            self._functions[device] = ok(self.cuda.cuModuleGetFunction(module, self._kernel))
        return self._functions[device]

    def launch(
        self,
        roles: dict[int, At] | None = None,
        stream: Any = None,
        *,
        device: int = 0,
        grid: int | tuple[int, int, int] | None = None,
        block: int | tuple[int, int, int] | None = None,
        m: int | None = None,
        n: int | None = None,
        smem: int = 0,
        pdl: bool = False,
        cooperative: bool = False,
        cluster: int | None = None,
        values: tuple[int, int] | None = None,
    ) -> None:
        """Queue the kernel with these roles on a stream, the device's first one by default."""
        target = self.stream(0, device) if stream is None else stream
        roles = roles or {}
        setup = Setup(role=(ctypes.c_uint32 * 8)(*[NOBODY] * 8), late=self._late)
        setup.a, setup.b = self.case.values if values is None else values
        for role, at in roles.items():
            setup.role[role] = at.block << 10 | at.thread
        blocks = grid or 1 + max(at.block for at in roles.values())
        threads = block or 32 * (1 + max(at.thread for at in roles.values()) // 32)
        config = types.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        config.blockDimX, config.blockDimY, config.blockDimZ = (threads, 1, 1) if isinstance(threads, int) else threads
        config.sharedMemBytes, config.hStream = smem, target
        attributes = []
        for wanted, name, member in (
            (pdl, "PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed"),
            (cooperative, "COOPERATIVE", "cooperative"),
        ):
            if wanted:
                attribute = types.CUlaunchAttribute()
                attribute.id = getattr(types.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
                setattr(attribute.value, member, 1)
                attributes.append(attribute)
        if cluster is not None:
            attribute = types.CUlaunchAttribute()
            attribute.id = types.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dim = attribute.value.clusterDim
            dim.x, dim.y, dim.z = cluster, 1, 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        first = self.m if m is None else m
        pointers = (first, first if n is None else n)
        function = self.function(device)
        self.use(device)
        kinds = (ctypes.c_void_p, ctypes.c_void_p, None)
        ok(self.cuda.cuLaunchKernelEx(config, function, ((*pointers, setup), kinds), 0))

    def finish(self) -> None:
        """Wait for all queued work, which must succeed."""
        for device in range(len(self.contexts)):
            self.use(device)
            ok(self.cuda.cuCtxSynchronize())


@contextmanager
def lab(suite: Suite, case: Case, profile: Any, seed: int, late: int) -> Iterator[Lab]:
    with Machine(seed=seed, race=profile, **{**DEFAULTS, **case.options}) as machine:
        yield Lab(suite, case, machine, late)


# Where threads run ----------------------------------------------------------------------------------------------------


def together(*places: At) -> Drive:
    """Return a `Drive` that runs role i at places[i]. It queues all launches before anything runs."""

    def drive(here: Lab) -> None:
        launches: dict[tuple[int, int], dict[int, At]] = {}
        for role, at in enumerate(places):
            launches.setdefault((at.device, at.stream), {})[role] = at
        for (device, stream), roles in launches.items():
            here.launch(roles, here.stream(stream, device), device=device)

    return drive


def grid(blocks: Any, threads: Any, **options: Any) -> Drive:
    """Return a `Drive` that launches a kernel without roles once."""
    return lambda here: here.launch(grid=blocks, block=threads, **options)


def place(name: str, roles: int) -> Drive:
    """Return a `Drive` that runs each role in a thread of its own. `name` says where the threads are: in one warp, in
    one block, in one grid ("gpu"), or each in a launch of its own, on several streams ("stream") or devices
    ("peer")."""
    where: dict[str, Callable[[int], At]] = {
        "warp": lambda i: At(thread=i),
        "block": lambda i: At(thread=32 * i + i),
        "gpu": lambda i: At(block=i, thread=7 * i),
        "stream": lambda i: At(stream=i),
        "peer": lambda i: At(device=i),
    }
    return together(*(where[name](i) for i in range(roles)))


SCOPES = ("cta", "gpu", "sys")
NEEDS = {"warp": "cta", "block": "cta", "gpu": "gpu", "stream": "gpu", "peer": "sys"}
"""By names of `place`, the narrowest scope that includes all threads there."""


def covers(scope: str, name: str) -> bool:
    """True if an operation with this scope includes all threads that `place(name, ...)` chooses."""
    return SCOPES.index(scope) >= SCOPES.index(NEEDS[name])


def fill(body: str, **parts: str) -> str:
    """A kernel body with its $names replaced."""
    for name, text in parts.items():
        body = re.sub(rf"\${name}\b", lambda _, t=text: t, body)
    if "$" in body:
        raise ValueError(f"unfilled: {body}")
    return body
