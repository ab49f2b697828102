# SPDX-License-Identifier: Apache-2.0
"""A configured set of emulated GPUs in this process."""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, SupportsInt

from ... import config
from ...errors import ArgumentError, ClosedError, foreign, require_flag, require_integer, shown
from ..findings.race import PROFILES, Detector
from ..findings.reports import Report
from ..space.window import Window
from .memory.exports import Shared
from .memory.mappables import Mappables
from .objects import Device
from .process import api, interrupts
from .process.failure import Injected
from .process.lock import MachineLock
from .process.order import Recorder, Replayer
from .process.process import Process
from .process.threads import Threads
from .process.waits import Waits
from .run import residency
from .run.engine import Engine, EngineModule
from .run.engine_launch import EngineLaunch
from .run.progress import Progress
from .run.work import Command, Dim, Launch

if TYPE_CHECKING:
    from ..findings.counters import Counters, Summary

log = logging.getLogger("drvfuse.emu")

MAX_DEVICES = 8
LAUNCHES_KEPT = 4096
Peers = bool | Sequence[Sequence[bool]] | Callable[[int, int], bool] | None
"""Which devices reach which: all (None, True), none (False), a matrix, or a function of two ordinals."""

_ARCHES = {
    "sm_80": residency.Limits(2048, 32, 164 << 10, 163 << 10),
    "sm_86": residency.Limits(1536, 16, 100 << 10, 99 << 10),
    "sm_89": residency.Limits(1536, 24, 100 << 10, 99 << 10),
    "sm_90": residency.Limits(2048, 32, 228 << 10, 227 << 10),
    "sm_100": residency.Limits(2048, 32, 228 << 10, 227 << 10),
    "sm_103": residency.Limits(2048, 32, 228 << 10, 227 << 10),
    "sm_120": residency.Limits(1536, 24, 100 << 10, 99 << 10),
}


@dataclass(frozen=True)
class LaunchRecord:
    """A kernel that has ended, with or without an error, and its counts. `process` is the name of its process if the
    machine has several processes.
    """

    kernel: str
    device: int
    grid: Dim
    block: Dim
    counters: Counters
    process: str | None = None


class Memory(Protocol):
    """An array that has an address and a size, such as drvfuse's."""

    @property
    def ptr(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Machine:
    """Emulated GPUs. `machine.driver` (`EmulatedDriver`) is the driver API of the machine's own process.

    `process()` makes further processes, each with a driver of its own, as if it were another process of the operating
    system. The docstring of `Process` says what they share.

    devices   the number of devices, 1 to 8
    arch      their architecture: "sm_90a", "sm_100a", ...; PTX of a module must be for this or an older architecture
    seed      decides the order in which blocks and warps run and when queued work starts. The same seed and the same
              calls give the same run, step for step. With 0, ready work starts at once, in the order of the calls.
              Other seeds draw the order in which work of different streams starts, and hold some of it back. Odd seeds
              start a programmatic launch as early as allowed, even seeds as late as possible.
    race      the race detector, which reports data races and lets the run continue. With True or "hardware" it accepts
              order that hardware gives beyond the PTX memory model, with "strict" it does not (`native/race.cuh`)
    peers     which pairs of devices can reach each other: None or True = all, False = none, a matrix, or a function
              `f(from, to) -> bool`
    sm_count  the number of multiprocessors per device, which limits how many blocks are resident
    memory_bytes  device memory per device
    check_initialised  a kernel that reads memory which was never written is a fault; without it, the memory reads as 0
    delay_stores  a kernel's stores reach other blocks, devices and the host late, at a moment that the seed decides,
              unless a release or fence of sufficient scope makes them visible earlier. So a missing release or fence
              gives wrong results with some seeds. Loads are never stale, so a missing acquire has no effect.
    record    a file to which the order of the calls of all processes and threads is written
              (`machine/process/order.py`)
    replay    a file of `record`: calls are made in the recorded order, so that the run is repeated step for step. A
              call that does not match the record raises `Diverged`
    served    whether other processes of the operating system can use the machine (`drvfuse.emu.serve`)

    `reports` are the findings and refused calls, oldest first; `launches` are the last kernels that ended, with their
    counts. Every call takes the machine's lock. Nothing runs between calls. `close()` gives the memory back. After it,
    driver calls return CUDA_ERROR_DEINITIALIZED, `declare_polled` and `engine` raise ClosedError, and `reports`,
    `launches`, `counters()` and `clock()` can still be read.
    """

    def __init__(
        self,
        devices: int = MAX_DEVICES,
        arch: str = "sm_90a",
        seed: int = 0,
        race: bool | str = False,
        peers: Peers = None,
        sm_count: int = 132,
        memory_bytes: int = 16 << 30,
        check_initialised: bool = True,
        delay_stores: bool = False,
        record: str | os.PathLike[str] | None = None,
        replay: str | os.PathLike[str] | None = None,
        *,
        served: bool = False,
    ) -> None:
        self.runtime_driver: Any = None  # the `runtime.driver.Driver` of the machine's own process
        devices = _integer("devices", devices, 1, MAX_DEVICES)
        seed = _integer("seed", seed, -(1 << 128), 1 << 128)
        sm_count = _integer("sm_count", sm_count, 1)
        memory_bytes = _integer("memory_bytes", memory_bytes, 1)
        for name, flag in (
            ("check_initialised", check_initialised),
            ("delay_stores", delay_stores),
            ("served", served),
        ):
            require_flag(name, flag)
        if not isinstance(race, bool) and not (isinstance(race, str) and race in PROFILES):
            raise ArgumentError("race", shown(race), "False, True or one of " + ", ".join(map(repr, PROFILES)))
        match = re.fullmatch(r"(sm_(\d+)(\d))([af]?)", arch) if isinstance(arch, str) else None
        if match is None or match[1] not in _ARCHES:
            raise ArgumentError("arch", shown(arch), f"one of {', '.join(_ARCHES)}, with or without the suffix a or f")
        self._reachable = _peer_table(devices, peers)
        self.arch, self.capability = arch, (int(match[2]), int(match[3]))
        self.limits = _ARCHES[match[1]]
        self.seed, self.sm_count, self.delay_stores = seed, sm_count, delay_stores
        self.lock = MachineLock()
        options = {"devices": devices, "arch": arch, "seed": seed, "race": race, "sm_count": sm_count}
        options |= {"memory_bytes": memory_bytes, "delay_stores": delay_stores, "check_initialised": check_initialised}
        if record is not None and replay is not None:
            raise ArgumentError("replay", shown(replay), "None if `record` is given")
        if replay is not None:
            self.lock.order = Replayer(replay, options, self.lock.stand_aside)
        elif record is not None:
            self.lock.order = Recorder(record, options)
        self.reports: list[Report] = []
        self.launches: deque[LaunchRecord] = deque(maxlen=LAUNCHES_KEPT)
        self.pid = os.getpid()
        self.closed = False
        self.several = False  # whether a process besides the machine's own was ever made
        cells = race is not False
        self.window = Window(
            config.get("emu_window_gib"), check_initialised=check_initialised, cells=cells, shares_host=served
        )
        self.detector = Detector(self.window, "hardware" if race is True else str(race)) if cells else None
        self._loop_limit = config.get("emu_loop_limit")
        self.host_wait = config.get("emu_host_wait")
        self.devices = [Device(i, memory_bytes) for i in range(devices)]
        self.images: dict[str, EngineModule] = {}
        self.mappables = Mappables(self)
        self.shared = Shared()
        self.progress = Progress(self, self.detector)
        self.waits = Waits(self)
        self._engine: Engine | None = None
        self._process_numbers = itertools.count()
        self.own = Process(self, next(self._process_numbers), "0", self.window.table)
        self.processes = [self.own]

    @property
    def engine(self) -> Engine:
        """The engine. It is made at its first use, as it loads native code."""
        if self._engine is None:
            self.require_open()
            self._engine = Engine(
                self.window, self.seed, self.sm_count, self._loop_limit, self.detector, self.delay_stores
            )
            if self.several or self.lock.order is not None:
                self._engine.count_resumes()
        return self._engine

    def require_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self!r} was closed, and its memory with it")

    @property
    def driver(self) -> Any:
        """The driver API of the machine's own process, with cuda.bindings.driver's names."""
        return self.own.driver

    @property
    def threads(self) -> Threads:
        return self.own.threads

    @property
    def injected(self) -> list[Injected]:
        return self.own.injected

    @property
    def refusal(self) -> Report | None:
        """The report on the last driver call of the machine's own process that failed."""
        return self.own.refusal

    def process(self, name: str | None = None) -> Process:
        """Make one more process that uses this machine. `name` distinguishes it in reports and records. It has at least
        one character, all printable, and no other live process may have it. With None, the name is the process's
        number.
        """
        self.require_open()
        with interrupts.held(), self.lock:
            self.lock.called(self.own, f"process {name or ''}".strip())
            number = next(self._process_numbers)
            name = str(number) if name is None else name
            if not isinstance(name, str) or not name.strip() or not name.isprintable():
                raise ArgumentError("name", shown(name), "a printable string, or None")
            if any(process.name == name for process in self.processes):
                raise ArgumentError("name", shown(name), "a name that no other live process of the machine has")
            self.several = True
            if self._engine is not None:
                self._engine.count_resumes()
            self.window.table.name = f"process {self.own.name}"
            process = Process(self, number, name, self.window.open_table(f"process {name}"))
            self.processes.append(process)
            return process

    def close(self) -> None:
        """Drop all work and all memory. Idempotent."""
        if not self.closed:
            with interrupts.held():
                self.closed = True
                self.own.handles.clear()
                for process in self.processes:
                    process.handles.clear()
                if self.pid == os.getpid():
                    self.mappables.descriptors.close()
                    if self.lock.order is not None:
                        self.lock.order.close()
                    self.window.close()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Machine of {len(self.devices)} x {self.arch}, seed {self.seed}{', closed' if self.closed else ''}>"

    def inject(
        self, function: str, code: Any, *, device: int | None = None, after: int = 0, times: int = 1
    ) -> Injected:
        """Make a driver function fail, for tests, in the machine's own process. The arguments are those of
        `Process.inject`.
        """
        return self.own.inject(function, code, device=device, after=after, times=times)

    def held(self) -> dict[str, int]:
        """What is allocated now: the bytes of device memory in use (`device_bytes`), and the numbers of `allocations`
        (by cuMemAlloc, pools, pinned and registered memory, and variables of modules), of `physical` allocations by
        cuMemCreate, of `multicast` objects and their `binds`, of `mappings` and of `reservations`. A physical
        allocation that was released, but is still mapped or bound, is counted too.
        """
        return self.own.held()

    def report(self, report: Report) -> None:
        """Keep a report, and log it as one line; a race is logged at level INFO, as it makes no call fail. A call that
        is not emulated is reported once, however often a program makes it.
        """
        if report.kind == "unsupported" and any(_same(report, known) for known in self.reports):
            return
        self.reports.append(report)
        # A name that is no UTF-8 is escaped, since a handler that writes to a file could not encode it.
        line = report.brief().encode(errors="backslashreplace").decode()
        log.log(logging.INFO if report.kind == "race" else logging.WARNING, "%s", line)

    def finding(self, device: int) -> Report | None:
        """The report of the fault that ended the work on a device. None if no context on the device has had a fault."""
        found = (process.finding(device) for process in self.processes)
        return next((finding for finding in found if finding is not None), None)

    def note(self, command: Command, launch: EngineLaunch) -> None:
        """Keep the counts of a kernel that has ended."""
        assert isinstance(command, Launch)
        name, context = command.function.name, command.context
        device, process = context.device.index, context.process.title
        self.launches.append(LaunchRecord(name, device, command.grid, command.block, launch.counters, process))

    def counters(self) -> Summary:
        """The counts of the kernels in `launches`, by kernel and source line."""
        from ..findings.counters import Summary

        return Summary((record.kernel, record.counters) for record in self.launches)

    def clock(self) -> int:
        """Virtual nanoseconds since the machine started."""
        return 0 if self._engine is None else self._engine.clock_ns

    def declare_polled(self, memory: Memory | SupportsInt, nbytes: int | None = None) -> None:
        """Report no races in a range until it is freed. It is for protocols with unordered accesses, such as words that
        carry their own readiness.

        `memory` is an array or an address. For an array, `nbytes` may be left out: the range is the whole array.
        Without `race` this does nothing.
        """
        self.own.declare_polled(memory, nbytes)

    def can_reach(self, source: Device, target: Device) -> bool:
        """True if `source` may be given access to memory of `target`."""
        return self._reachable[source.index][target.index]

    def resident_blocks(self, launch: Launch) -> int:
        """How many blocks of a launch can be resident on a device on which nothing else runs."""
        each = residency.blocks_per_sm(self.limits, launch.function, launch.threads, launch.smem)
        return residency.clusters(self.sm_count, each, launch.cluster_blocks) * launch.cluster_blocks


def _integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    bounds = "" if least is None else f" of at least {least}" if most is None else f" between {least} and {most}"
    return require_integer(name, value, f"an integer{bounds}", least, most)


def _peer_table(devices: int, peers: Peers) -> list[list[bool]]:
    if peers is None or isinstance(peers, bool):
        value = peers is not False
        table = [[value] * devices for _ in range(devices)]
    else:
        must = f"None, True, False, a matrix of {devices} x {devices}, or a function of two devices"
        each = range(devices)
        if callable(peers):
            table = foreign("peers", must, lambda: [[bool(peers(i, j)) for j in each] for i in each])
        else:
            table = foreign("peers", must, lambda: [[bool(x) for x in row] for row in peers])
        if len(table) != devices or any(len(row) != devices for row in table):
            raise ArgumentError("peers", f"a matrix of {len(table)} rows", f"{devices} x {devices}")
    for i in range(devices):
        table[i][i] = False
    return table


_default: Machine | None = None
_default_lock = threading.Lock()


def default_machine(*, served: bool = False) -> Machine:
    """The process-wide machine, which `driver="emu"`, `drvfuse.emu.driver` and `drvfuse emu run` use. Made on first
    use.

    If the setting `emu_machine` names an address, it is the machine that another process serves there. Otherwise it is
    a machine of this process with the settings `emu_devices`, `emu_arch`, `emu_seed`, `emu_race` and `emu_delay_stores`
    (defaults: 8 devices, seed 0, no detector). Settings are read when the machine is made. After the machine was
    closed, the next call makes a new one. If this call makes a machine of this process, `served` is passed on to
    `Machine`. Raises ArgumentError for a setting with a wrong value.
    """
    global _default
    with _default_lock:
        if _default is None or _default.closed:
            address = config.get("emu_machine")
            _default = api.attach(address) if address else _configured(served)
        return _default


def _configured(served: bool) -> Machine:
    names = ("devices", "arch", "seed", "race", "delay_stores")
    return Machine(**{name: config.get(f"emu_{name}") for name in names}, served=served)


def _same(one: Report, other: Report) -> bool:
    """Whether two reports are equal in all but their processes."""
    return (one.message, one.kernel, one.file, one.line) == (other.message, other.kernel, other.file, other.line)
