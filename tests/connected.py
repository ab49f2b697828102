# SPDX-License-Identifier: Apache-2.0
"""Groups with a process per rank, emulated within one real process: each rank has a thread, an emulated process and a
board."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from local_boards import LocalBoards

import drvfuse as df
from drvfuse.nodes.joint import NodesWanted
from drvfuse.runtime.device import Device

T = TypeVar("T")


def together(calls: Sequence[Callable[[], T]], timeout: float = 60.0) -> list[T]:
    """Run each call in a thread of its own and return the results. Raises the first error, with the others as notes."""
    results: list[Any] = [None] * len(calls)
    errors: dict[int, BaseException] = {}

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors[number] = error

    contexts = [contextvars.copy_context() for _ in calls]  # each thread has the settings of the calling thread
    threads = [
        threading.Thread(target=context.run, args=(run, number), daemon=True) for number, context in enumerate(contexts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), f"rank {threads.index(thread)} hangs; errors so far: {errors}"
    if errors:
        first = errors[min(errors)]
        for number, error in sorted(errors.items())[1:]:
            first.add_note(f"rank {number}: {type(error).__name__}: {error}")
        raise first
    return results


def outcomes(calls: Sequence[Callable[[], T]], timeout: float = 60.0) -> list[T | BaseException]:
    """Run each call in a thread of its own and return its result or the exception that it raised."""

    def caught(call: Callable[[], T]) -> T | BaseException:
        try:
            return call()
        except Exception as error:
            return error

    return together([lambda call=call: caught(call) for call in calls], timeout)


class Ranks:
    """n ranks on a machine. Rank i has the emulated process `processes[i]`, the board `boards[i]` and, after `connect`,
    the group `groups[i]`."""

    def __init__(self, machine: df.emu.Machine, n: int, timeout: float = 20.0) -> None:
        self.machine, self.size = machine, n
        self.processes = [machine.process(f"rank {rank}") for rank in range(n)]
        self._timeout = timeout
        self.boards = LocalBoards(n, timeout)
        self.groups: list[df.Group] = []

    def connect(self, devices: Sequence[int] | None = None, **options: Any) -> list[df.Group]:
        """Open a group of all ranks, rank i on device `devices[i]`. An option that is a list has an entry per rank.

        Boards of an earlier call are closed and replaced.
        """
        if self.groups:
            self.boards.close()
            self.boards = LocalBoards(self.size, self._timeout)
        self.groups = together([lambda rank=rank: self.open(rank, devices, **options) for rank in range(self.size)])
        return self.groups

    def open(self, rank: int, devices: Sequence[int] | None = None, **options: Any) -> df.Group:
        """Open the group of one rank, as `connect` does for all."""
        own = {name: value[rank] if isinstance(value, list) else value for name, value in options.items()}
        payload, blocks = own.get("workspace_bytes", 1 << 16), own.get("max_blocks", 4)

        def opened() -> tuple[Device, int, int | None]:
            index = rank if devices is None else devices[rank]
            return df.device(index, driver=self.processes[rank]), payload, blocks

        of_nodes = {name: own[name] for name in ("nodes", "node_order", "exchange", "domain") if name in own}
        return df.Group.of_board(self.boards[rank], opened, NodesWanted(**of_nodes))

    def each(self, call: Callable[[df.Group], T], groups: Sequence[df.Group] | None = None) -> list[T]:
        """Run `call(group)` on every rank at once. Return the results."""
        return together([lambda group=group: call(group) for group in self.groups if groups is None or group in groups])

    def close(self) -> None:
        for group in self.groups:
            group.close()
        for process in self.processes:
            process.close()
        self.boards.close()


@contextmanager
def connected(
    n: int, *, devices: Sequence[int] | None = None, machine: dict[str, Any] | None = None, **options: Any
) -> Iterator[Ranks]:
    """n ranks that have connected, on a machine of their own."""
    with df.emu.Machine(**{"devices": max(n, *(devices or [n - 1])) + 1 if devices else n, **(machine or {})}) as found:
        ranks = Ranks(found, n)
        try:
            ranks.connect(devices, **options)
            yield ranks
        finally:
            ranks.close()
