# SPDX-License-Identifier: Apache-2.0
"""Runs cases and mutants under many seeds, on several processes."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from ..errors import DrvfuseError
from .cases import CASES
from .mutant import Verdict, hunt
from .mutants import MUTANTS
from .run import Finding, explore

MUTANT_SEEDS = 12
"""The number of seeds within which a mutant must be found."""

PROFILE = "strict"
"""The profile of the race detector for cases, since drvfuse's kernels rely on the PTX memory model alone. Mutants must
be found by the profile "hardware", which reports fewer races."""

_PR_SET_PDEATHSIG = 1
_TASKS_PER_JOB = 4  # tasks in the pool at a time, for each process; too many could fill the pipes to the processes
_INTERRUPT_SECONDS = 0.2  # seconds within which Ctrl-C takes effect


@dataclass(frozen=True)
class Outcome:
    """The findings of a case under a seed."""

    name: str
    seed: int
    findings: tuple[Finding, ...]


Task = tuple[str, Sequence[int]]
"""The name of a case with one seed, or the name of a mutant with the seeds to try."""


def tasks(names: Sequence[str], seeds: Sequence[int], mutant_seeds: Sequence[int]) -> list[Task]:
    """Return the cases under the first seed, then the mutants, then the cases under the other seeds. In this order
    parallel processes begin with different kernels."""
    found: list[Task] = [(name, (seed,)) for seed in seeds[:1] for name in names if name in CASES]
    found += [(name, mutant_seeds) for name in names if name in MUTANTS]
    return found + [(name, (seed,)) for seed in seeds[1:] for name in names if name in CASES]


def perform(task: Task) -> Outcome | Verdict:
    """Do one task in this process. Findings are returned and not logged."""
    name, seeds = task
    with _unlogged():
        if name in MUTANTS:
            return hunt(MUTANTS[name], seeds)
        return Outcome(name, seeds[0], tuple(explore(name, CASES[name], seeds[0], PROFILE)))


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    log = logging.getLogger("drvfuse")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def run(todo: Sequence[Task], jobs: int) -> Generator[Outcome | Verdict, None, None]:
    """Yield the results, in the order in which tasks end. If `jobs` is 1, this process does all tasks, else `jobs`
    other processes do them. Closing the iterator ends the processes.

    Raises DrvfuseError if a process of the pool is killed.
    """
    if jobs == 1:
        yield from map(perform, todo)
        return
    context = multiprocessing.get_context("spawn")  # an emulated machine does not survive a fork
    pool = ProcessPoolExecutor(min(jobs, len(todo)), mp_context=context, initializer=_start)
    others = set(multiprocessing.active_children())
    waiting = iter(todo)
    running: set[Future[Outcome | Verdict]] = set()
    try:
        while True:
            with _interrupts_held():
                for task in itertools.islice(waiting, _TASKS_PER_JOB * jobs - len(running)):
                    running.add(pool.submit(perform, task))
                ended, running = wait(running, return_when=FIRST_COMPLETED, timeout=_INTERRUPT_SECONDS)
                results = [future.result() for future in ended]
            yield from results
            if not running and not ended:
                break
    except BaseException as error:
        with _interrupts_held():
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
        if isinstance(error, BrokenProcessPool):
            raise DrvfuseError(
                "a worker process was killed, or crashed; run with --jobs 1 to check without worker processes"
            ) from None
        raise
    with _interrupts_held():
        pool.shutdown()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """A `with` block that holds SIGINT back until its end. Processes that are started in the block do not get SIGINT.

    KeyboardInterrupt may be raised between any two bytecodes of the main thread. It could leave a lock taken that the
    threads of the pool need, and the process does not exit before these threads end.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread runs Python's signal handlers
        yield
        return
    noted: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if noted:
            signal.raise_signal(signal.SIGINT)


def _start() -> None:
    """Make this process of the pool ignore SIGINT, and end when its parent process ends, however that happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl: Callable[..., int] = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
