# SPDX-License-Identifier: Apache-2.0
"""A run of one case under one seed: its random numbers, its emulated machines, and the findings on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import config
from ..comm.group import Group
from ..emu import Machine
from ..errors import BarrierTimeout, CallMismatch, DriverError, LaunchError
from ..ops.call import faults
from ..ops.call.specialisation import CU
from ..reference import bits
from ..runtime.driver import Driver
from ..runtime.kernel import Kernel
from ..runtime.module import compile as compile_source

_OWN = Path(__file__).parent / "cu"
HANGS = ("deadlock", "timeout")
"""Kinds of findings that mean an endless wait: the emulated driver reports it, or the kernel gives up waiting."""


@dataclass(frozen=True)
class Finding:
    """A finding. `kind` is the kind of a machine's report ("race", "deadlock", ...) or one of these: "mismatch", wrong
    bits; "timeout", a kernel gave up waiting for a peer; "calls", kernels reported that the calls of the ranks differ,
    although they are equal; "error", any other exception."""

    kind: str
    text: str


class Run:
    """The argument of a case: its `seed`, `random` numbers that depend on the case and the seed, and its `findings`.

    `race` is the profile of the race detector, "hardware" or "strict", or False for none. Odd seeds start dependent
    launches as early as possible. Two of every eight seeds delay stores.
    """

    def __init__(self, name: str, seed: int, race: bool | str = "hardware") -> None:
        self.seed, self.race = seed, race
        self.random = np.random.default_rng([seed, *name.encode()])
        self.findings: list[Finding] = []

    def chance(self, probability: float = 0.5) -> bool:
        return bool(self.random.random() < probability)

    def choice(self, values: Sequence[Any]) -> Any:
        return values[int(self.random.integers(len(values)))]

    def shuffled(self, values: Sequence[Any]) -> list[Any]:
        return [values[int(i)] for i in self.random.permutation(len(values))]

    @contextlib.contextmanager
    def machine(self, devices: int, **options: Any) -> Iterator[Machine]:
        """A context manager that makes a machine. Its reports, and exceptions in the `with` block, become findings."""
        with (
            config.override(trace_driver="off"),
            Machine(devices, seed=self.seed, race=self.race, delay_stores=self.seed % 8 >= 6, **options) as machine,
        ):
            machine.images = _images
            try:
                yield machine
            except BarrierTimeout as error:
                self.findings.append(Finding("timeout", str(error)))
            except CallMismatch as error:
                self.findings.append(Finding("calls", str(error)))
            except (DriverError, LaunchError) as error:
                if not machine.reports:
                    self.findings.append(Finding("error", str(error)))
            finally:
                self.findings += [Finding(report.kind, str(report)) for report in machine.reports]

    @contextlib.contextmanager
    def ignored(self, machine: Machine, kind: str) -> Iterator[None]:
        """A `with` block in which reports of kind `kind` are not findings. The block must wait for its queued work."""
        before = len(machine.reports)
        yield
        machine.reports[before:] = [report for report in machine.reports[before:] if report.kind != kind]

    @contextlib.contextmanager
    def group(self, ranks: int, **options: Any) -> Iterator[Group]:
        """A context manager that makes a group on a new machine. `options` are arguments of `Group.local`."""
        with self.machine(ranks) as machine, Group.local(ranks, driver=machine, **options) as group:
            yield group

    def kernel(self, driver: Driver, name: str) -> Kernel:
        """Return the kernel `name` of drvfuse/check/cu/`name`.cu."""
        known = driver.part(_Kernels).known
        if name not in known:
            known[name] = compile_source(
                _OWN / f"{name}.cu", driver=driver, include=[CU], defines=faults.defines(faults.planted())
            )[name]
        return known[name]

    def compare(self, what: str, actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
        """Add a finding unless the arrays are equal bit for bit."""
        wrong = np.flatnonzero(bits(actual).reshape(-1) != bits(expected).reshape(-1))
        if wrong.size:
            at = int(wrong[0])
            got, wanted = actual.reshape(-1)[at], expected.reshape(-1)[at]
            text = f"{what}: {wrong.size} of {expected.size} elements differ, first [{at}]: {got} and not {wanted}"
            self.findings.append(Finding("mismatch", text))


class _Kernels:
    """The kernels of drvfuse/check/cu that a driver has, by name."""

    def __init__(self, driver: Driver) -> None:
        self.known: dict[str, Kernel] = {}


_images: dict[str, Any] = {}  # translated modules, which all machines of this process share

Case = Callable[[Run], None]


def explore(name: str, case: Case, seed: int, race: bool | str = "hardware") -> list[Finding]:
    """Run `case` under `seed`, and return its findings, which are the same in each run."""
    run = Run(name, seed, race)
    try:
        case(run)
    except Exception as error:
        run.findings.append(Finding("error", f"{type(error).__name__}: {error}"))
    return run.findings
