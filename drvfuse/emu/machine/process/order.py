# SPDX-License-Identifier: Apache-2.0
"""Records of the order in which threads of several processes used a machine, and repetitions of a recorded run.

A run of a machine depends on its seed and on the sequence of calls under its lock. The machine does not decide two
things itself: which thread gets the lock next, and choices that depend on wall-clock time (to give way to other
threads, to advance virtual time). The default value of such a choice is 0. A record is a text file of these events, in
their order, one per line, with tabs between the words:

    3  call  b  0  cuLaunchKernel    thread 0 of process b gets the lock for a call
    0  back  a  0                    thread 0 of process a gets it back in a call that waits
    0  time  20000000                a choice with another value than 0, and the value

The first number of a line is the number of choices with the value 0 since the previous line. Threads of a process are
numbered in the order of their first calls. The first line of the file has the options of the machine, and a repeated
run must have the same options. Actions of processes outside of calls, such as writing pinned memory, are not recorded.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ....errors import ArgumentError, DrvfuseError, shown

if TYPE_CHECKING:
    from .process import Process

_TITLE = "drvfuse record 1"
PATIENCE_S = 60.0
"""Seconds for which a repeated run waits for the next recorded call before it raises `Diverged`."""


class Diverged(DrvfuseError):
    """A repeated run made a call that differs from the recorded one."""


class Order(Protocol):
    """The methods by which a machine's lock records the order of events of a run (`Recorder`), or makes a run repeat a
    recorded order (`Replayer`). The thread that calls a method holds the lock.
    """

    def called(self, process: Process, what: str) -> None:
        """When recording, note that the thread has got the lock for the call `what`. In a repeated run, wait until this
        event is next in the record.
        """

    def back(self, process: Process) -> None:
        """When recording, note that the thread has got the lock back. In a repeated run, wait until this event is next
        in the record.
        """

    def choose(self, kind: str, value: int) -> int:
        """Make a choice that depends on wall-clock time. When recording, note that `value` was chosen, and return it.
        In a repeated run, return the recorded value.
        """

    def close(self) -> None: ...


class Recorder:
    """Writes a record of the order of events to a file."""

    def __init__(self, path: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        try:
            self._file = Path(path).open("w", 1, encoding="utf-8")  # noqa: SIM115 - line by line, so none is lost
        except (OSError, TypeError, ValueError) as error:
            raise ArgumentError("record", shown(path), f"a file that can be written ({error})") from None
        self._usual = 0
        self._known: dict[str, int] = {}
        self._file.write(f"{_TITLE}\t{json.dumps(options)}\n")
        self._close = weakref.finalize(self, self._file.close)

    def close(self) -> None:
        self._write("end")
        self._close()

    def called(self, process: Process, what: str) -> None:
        if process.threads.number is None:
            process.threads.number = self._known.get(process.name, 0)
            self._known[process.name] = process.threads.number + 1
        self._write("call", process.name, process.threads.number, what)

    def back(self, process: Process) -> None:
        self._write("back", process.name, process.threads.number)

    def choose(self, kind: str, value: int) -> int:
        if value:
            self._write(kind, value)
        else:
            self._usual += 1
        return value

    def _write(self, *words: object) -> None:
        if not self._file.closed:
            self._file.write("\t".join(map(str, (self._usual, *words))) + "\n")
        self._usual = 0


class _Line(NamedTuple):
    """A line of a record. `words` are the words that follow the number and the kind."""

    number: int
    kind: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        if self.kind == "call":
            return f"thread {self.words[1]} of process {self.words[0]} calls {self.words[2]}"
        if self.kind == "back":
            return f"thread {self.words[1]} of process {self.words[0]} goes on"
        return " ".join((self.kind, *self.words))


class Replayer:
    """Lets threads continue in the order of a record, and after its end in any order. `wait` releases the lock for a
    moment.
    """

    def __init__(
        self, path: str | os.PathLike[str], options: Mapping[str, Any], wait: Callable[[float], object]
    ) -> None:
        self._wait = wait
        try:
            self._path = Path(path)
            first, *lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            title, written = first.rstrip("\n").split("\t")
            found = json.loads(written)
        except (OSError, TypeError, ValueError) as error:
            raise ArgumentError("replay", shown(path), f"a record of a machine ({error})") from None
        for name in (name for name in options if title != _TITLE or found.get(name) != options[name]):
            got = f"a record of a machine with {name}={found.get(name)!r}"
            raise ArgumentError("replay", got, f"a record of a machine with {name}={options[name]!r}")
        whole = [line.rstrip("\n").split("\t") for line in lines if line.endswith("\n")]
        self._lines = iter([(int(usual), kind, tuple(words)) for usual, kind, *words in whole])
        self._read, self._known = 1, dict[str, int]()
        self._failure: Diverged | None = None
        self._usual = 0  # how many choices with the value 0 the run still has to make before the event on `_line`
        self._line: _Line | None = None
        self._next()

    def called(self, process: Process, what: str) -> None:
        self._turn(process, "call", what)

    def back(self, process: Process) -> None:
        self._turn(process, "back")

    def choose(self, kind: str, value: int) -> int:
        if self._failure is not None:
            raise self._failure
        if self._usual:
            self._usual -= 1
            return 0
        if self._line is None:
            return value
        if self._line.kind == "end":
            self._line = None
            return value
        if self._line.kind != kind:
            raise self._fail(f"instead, the machine makes the choice {kind} {value}")
        chosen = int(self._line.words[0])
        self._next()
        return chosen

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _next(self) -> None:
        self._usual, kind, words = next(self._lines, (0, "", ()))
        self._read += 1
        self._line = _Line(self._read, kind, words) if kind else None

    def _turn(self, process: Process, kind: str, *what: str) -> None:
        """Wait until the next event of the record is this one (process, `kind` and `what`), then go to the next."""
        seen, since = None, 0.0
        while self._failure is None and self._line is not None and self._line.kind != "end":
            number = self._known.get(process.name, 0) if process.threads.number is None else process.threads.number
            words = process.name, str(number), *what
            if self._usual or self._line.kind not in ("call", "back"):
                raise self._fail(f"{_Line(0, kind, words)} before the machine has made its recorded choice")
            if (self._line.kind, self._line.words) == (kind, words):
                if process.threads.number is None:
                    process.threads.number, self._known[process.name] = number, number + 1
                self._next()
                return
            if self._line.words[:2] == words[:2] and process.threads.number is not None:
                raise self._fail(str(_Line(0, kind, words)))
            if seen != self._line:
                seen, since = self._line, time.monotonic()
            elif time.monotonic() > since + PATIENCE_S:
                event = _Line(0, kind, words)
                raise self._fail(f"this event has not come for {PATIENCE_S:.0f} s; instead, {event}")
            self._wait(0.05)
        if self._failure is not None:
            raise self._failure

    def _fail(self, what: str) -> Diverged:
        """Return the error of a run that differs from the record, and keep it: every later call raises it too."""
        line = "nothing" if self._line is None else f"{self._line} (line {self._line.number})"
        usual = f"{self._usual} choices of the machine with the value 0 and " if self._usual else ""
        there = f"the run differs from the record {self._path}: there {usual}{line} comes next"
        self._failure = Diverged(f"{there}; {what}")
        return self._failure
