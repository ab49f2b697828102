# SPDX-License-Identifier: Apache-2.0
"""Processes for tests of several ranks: interpreters that run functions again and again, each time on a fresh machine.

    def rank_main(rank, size, word):                      # a function of a test module
        with df.Group.connect() as group: ...
        return word * rank

    def test_it(pool):
        assert pool.run(3, rank_main, "ab", machine={"race": True}) == ["", "ab", "abab"]
        assert not pool.machine.reports

The machine is in the test's own process and is served to the ranks, which find it by DRVFUSE_EMU_MACHINE; it stays open
until the next run. RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RUN_ID are
set as torchrun sets them, the last one to a new value for each run. A process that is killed or does not end in time
is replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from drvfuse.emu import Machine
from drvfuse.emu.serve.server import Server

_MAIN = "import sys; sys.path[:] = {path!r}; import process_pool; process_pool.serve_pool({fd})"
_runs = itertools.count(1)


@dataclass(frozen=True)
class Died:
    """A process that ended, or was killed, before its function returned. `status` is as in `subprocess`."""

    status: int


class RankFailed(AssertionError):
    """A rank raised an exception, died or did not end in time; `outcomes` are those of all ranks."""

    def __init__(self, message: str, outcomes: Sequence[Any]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


class _Worker:
    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        fd = theirs.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN.format(path=sys.path, fd=fd)], pass_fds=[fd], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def end(self) -> None:
        self.pipe.close()  # the child ends when it notices the closed pipe
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Job:
    """The ranks of one run. `kill(rank)` sends a signal. `outcomes()` waits for all ranks and gives for each what the
    function returned, the exception that it raised (with its traceback as a note), or `Died`. `environments` has
    the environment variables of each rank.
    """

    def __init__(self, workers: list[_Worker], message: tuple[Any, ...], environments: list[dict[str, str]]) -> None:
        self.workers, self.environments = workers, environments
        self.finished = [False] * len(workers)
        for worker, environment in zip(workers, environments, strict=True):
            worker.pipe.send((*message, environment))

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        self.workers[rank].process.send_signal(number)

    def outcomes(self, timeout: float = 60) -> list[Any]:
        """Wait for all ranks. After `timeout` seconds, kill the ranks that have not ended and raise TimeoutError."""
        deadline = time.monotonic() + timeout
        found: dict[int, Any] = {}
        while len(found) < len(self.workers):
            left = {self.workers[rank].pipe: rank for rank in range(len(self.workers)) if rank not in found}
            ready = wait(list(left), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(left.values())
                for rank in late:
                    self.workers[rank].process.kill()
                raise TimeoutError(f"ranks {late} have not ended within {timeout} s; those that have: {found}")
            for pipe in ready:
                rank = left[pipe]  # type: ignore[index]
                try:
                    found[rank] = pipe.recv()  # type: ignore[union-attr]
                    self.finished[rank] = True
                except (EOFError, ConnectionResetError):
                    found[rank] = Died(self.workers[rank].process.wait())
        return [found[rank] for rank in range(len(self.workers))]


class ProcessPool:
    """A pool of interpreters, which start when they are first needed. `machine` is the machine of the last run."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._server: Server | None = None
        self._images: dict[str, Any] = {}

    @property
    def machine(self) -> Machine:
        assert self._server is not None
        return self._server.machine

    @property
    def address(self) -> str:
        assert self._server is not None
        return self._server.address

    def _serve(self, options: Mapping[str, Any]) -> Server:
        self.close_machine()
        machine = Machine(**{"devices": 8, **options}, served=True)
        machine.images = self._images  # translations are shared by all machines
        self._server = Server(machine)
        return self._server

    def close_machine(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server.machine.close()
            self._server = None

    @contextlib.contextmanager
    def job(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        machine: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[Job]:
        """Start `function(rank, size, *args)` of a module in `size` processes, on a new machine with the options
        `machine`."""
        server = self._serve(machine or {})
        while len(self._idle) < size:
            self._idle.append(_Worker())
        workers = [self._idle.pop() for _ in range(size)]
        shared = {
            "DRVFUSE_DRIVER": "emu",
            "DRVFUSE_EMU_MACHINE": server.address,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": f"pool-{os.getpid()}-{next(_runs)}",
            **(environment or {}),
        }
        ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        started = Job(workers, (function.__module__, function.__qualname__, args, size), ranks)
        try:
            yield started
        finally:
            for worker, finished in zip(workers, started.finished, strict=True):
                if finished and worker.process.poll() is None:
                    self._idle.append(worker)
                else:
                    worker.end()
            server.wait_for_clients()

    def run(
        self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 60, **options: Any
    ) -> list[Any]:
        """The results of the function by rank. Raises RankFailed if it did not return on all ranks."""
        with self.job(size, function, *args, **options) as job:
            outcomes = job.outcomes(timeout)
        bad = [rank for rank, found in enumerate(outcomes) if isinstance(found, (BaseException, Died))]
        if bad:
            first = outcomes[bad[0]]
            text = "".join(traceback.format_exception_only(first)) if isinstance(first, BaseException) else repr(first)
            raise RankFailed(f"ranks {bad} of {size} failed; rank {bad[0]}: {text}", outcomes)
        return outcomes

    def close(self) -> None:
        for worker in self._idle:
            worker.end()
        self._idle.clear()
        self.close_machine()


# Code of the pool's processes ---------------------------------------------------------------------------------------


def serve_pool(fd: int) -> None:
    """Run the functions that arrive through the pipe until it is closed."""
    pipe = Connection(fd)
    while True:
        try:
            module, name, args, size, environment = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            outcome = function(int(environment["RANK"]), size, *args)
        except Exception as error:
            error.add_note(traceback.format_exc())
            outcome = error.with_traceback(None)
        finally:
            _detach()
            os.environ.clear()
            os.environ.update(before)
        try:
            pipe.send(outcome)
        except Exception as error:  # the result or the exception cannot be pickled
            pipe.send(RuntimeError(f"{type(outcome).__name__} {outcome!r} cannot be sent: {error!r}"))


def _detach() -> None:
    """Detach from the machine, as happens when a process ends."""
    from drvfuse.emu.machine import machine

    if machine._default is not None:
        machine._default.close()
