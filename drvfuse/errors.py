# SPDX-License-Identifier: Apache-2.0
"""The exceptions that drvfuse raises, all derived from `DrvfuseError`, and checks of arguments that raise them."""

from __future__ import annotations

import math
import numbers
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_FLOAT32 = struct.Struct("f")
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_SHOWN = 200  # characters of a value in a message


class DrvfuseError(Exception):
    """The base of all errors of drvfuse. Copies and pickles of an error keep its type, text and fields."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), *self.args), self.__dict__


def _restored(kind: type[DrvfuseError], *args: Any) -> DrvfuseError:
    """An error of type `kind` with the arguments `args`, for unpickling. `__init__` is not called, since the pickled
    state restores the fields."""
    return kind.__new__(kind, *args)


class DriverUnavailable(DrvfuseError):
    """The driver that was asked for cannot be used here; the text says what to install or set."""


class DriverError(DrvfuseError):
    """A driver call failed.

    `call` and `args_text` are the function and its arguments, and `code` and `name` the CUresult. `explanation` is the
    driver's own text with the usual causes, and `calls` are the calls before the failed one, oldest first.
    """

    def __init__(
        self, call: str, args_text: str, code: int, name: str, explanation: str, calls: Sequence[str] = ()
    ) -> None:
        self.call, self.args_text, self.code, self.name = call, args_text, code, name
        self.explanation, self.calls = explanation, tuple(calls)
        text = f"{call}({args_text}) failed with {name} ({code}): {explanation}"
        if self.calls:
            text += "\nlast driver calls before it:\n  " + "\n  ".join(self.calls)
        super().__init__(text)


class MulticastError(DriverError):
    """A call of a multicast object's set-up failed. Everything that the set-up had made is undone on all ranks.

    `rank` is the rank of the group whose call failed; it is the same in the errors of all ranks, and None if no group
    made the object. The other fields are those of `DriverError`; `explanation` begins with what `code` means for
    multicast.
    """

    def __init__(
        self,
        call: str,
        args_text: str,
        code: int,
        name: str,
        explanation: str,
        calls: Sequence[str] = (),
        rank: int | None = None,
    ) -> None:
        super().__init__(call, args_text, code, name, explanation, calls)
        self.rank = rank
        if rank is not None:
            self.args = (f"rank {rank}, in a multicast set-up that all ranks have taken back: {self.args[0]}",)


class CompileError(DrvfuseError):
    """NVRTC refused a source. `name` is the program, `log` the compiler's log with the source lines that it names."""

    def __init__(self, name: str, log: str) -> None:
        self.name, self.log = name, log
        super().__init__(f"{name} does not compile:\n{log}")


class ArgumentError(DrvfuseError, ValueError):
    """An argument is wrong: `argument` names it, `got` is what it was, `expected` what it must be.

    Raised before anything is launched or written.
    """

    def __init__(self, argument: str, got: object, expected: str) -> None:
        self.argument, self.got, self.expected = argument, got, expected
        super().__init__(f"{argument} is {got}; it must be {expected}")


def shown(value: object) -> str:
    """`repr(value)` for `ArgumentError.got`, shortened, or the kind of a value whose `__repr__` fails."""
    try:
        text = repr(value)
    except Exception:
        return kind_of(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def kind_of(value: object) -> str:
    """The kind of a value with an article, for `ArgumentError.got`: "an int", "a list", "None"."""
    if value is None:
        return "None"
    name = type(value).__name__
    sounds = name.lower().startswith(("a", "e", "i", "o", "nd"))  # "an ndarray", but "a uint8"
    return f"{'an' if sounds else 'a'} {name}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun, for messages: "1 array", "2 arrays". `plural` is the plural of the noun, by
    default the noun with an "s"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def require_kind(argument: str, value: object, kind: type, expected: str) -> None:
    """Raise ArgumentError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise ArgumentError(argument, kind_of(value), expected)


def require_integer(argument: str, value: Any, expected: str, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int within bounds, by default those of 64 bits. Raises ArgumentError for other values, also for a
    bool, and for a number that is not an integer, such as 2.0."""
    if type(value) is int:
        number = value
    else:
        try:
            number = operator.index(value)
        except Exception as error:
            raise ArgumentError(argument, shown(value), expected) from (None if type(error) is TypeError else error)
        if isinstance(value, bool):
            raise ArgumentError(argument, shown(value), expected)
    if not (_LEAST if least is None else least) <= number <= (_MOST if most is None else most):
        raise ArgumentError(argument, shown(value), expected)
    return number


def require_text(argument: str, value: Any, expected: str) -> str:
    """`value`, which must be a str that C and UTF-8 can represent: without "\\0" and lone surrogates."""
    if not isinstance(value, str) or "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ArgumentError(argument, shown(value), expected)
    return value


def require_flag(argument: str, value: Any) -> bool:
    """`value`, which must be True or False."""
    if value is True or value is False:
        return bool(value)
    raise ArgumentError(argument, shown(value), "True or False")


def foreign(argument: str, expected: str, call: Callable[[], T]) -> T:
    """`call()`, which uses an object of the caller. An exception of that object becomes an ArgumentError, from which it
    can be read."""
    try:
        return call()
    except DrvfuseError:
        raise
    except Exception as error:
        raise ArgumentError(argument, f"an object that raised {type(error).__name__}", expected) from error


def any_of(names: Sequence[str]) -> str:
    """The allowed values of an argument, for `ArgumentError.expected`: "a", "a or b", "one of a, b, c"."""
    return " or ".join(names) if len(names) < 3 else "one of " + ", ".join(names)


def require_real(
    argument: str, value: Any, *, least: float = -math.inf, positive: bool = False, finite: bool = True
) -> float:
    """`value` rounded to float32. Raises ArgumentError for a value that is not a number, is NaN or is below `least`.
    With `positive` the value must also be above 0, and with `finite` it must be finite."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except Exception as error:
            raise ArgumentError(argument, shown(value), "a number") from error
        try:
            rounded = float(_FLOAT32.unpack(_FLOAT32.pack(number))[0])
        except OverflowError:
            rounded = math.inf if number > 0 else -math.inf
        # A comparison with NaN is false, so NaN is refused.
        if rounded >= least and not (positive and rounded <= 0) and not (finite and math.isinf(rounded)):
            return rounded
    expected = "a number" + (f", at least {least:g}" if least > -math.inf else "") + (" above 0" if positive else "")
    expected += ", finite in float32" if finite else ""
    raise ArgumentError(argument, shown(value), expected)


class LaunchError(DrvfuseError):
    """A kernel cannot be launched in this way (grid, block, attribute, concurrent use)."""


class Unsupported(DrvfuseError):
    """The request is well formed, but this driver, device or version cannot do it."""


class CaptureError(DrvfuseError):
    """The operation is not legal while a stream is being captured into a graph."""


class ClosedError(DrvfuseError):
    """The object was closed, or it was made before a fork and is used in the child."""


class BarrierTimeout(DrvfuseError):
    """A rank waited for a peer longer than the `spin_timeout` setting and gave up.

    Block `block` of `rank` waited for `peer` in the phase `phase`; the flag had to reach `expected`, and its value was
    `seen`. In a push algorithm the block waited for the 16-byte word `word` of its slots; otherwise `word` is None.
    `call` names the call, counted from 1 since the group was made: "call 17 of the group, allreduce one_stage of 4 x
    (128, 4096) bfloat16". If the call cannot be identified, it is a range of calls.

    All results of that call and of all later calls are undefined on every rank until `group.reset()`. If all ranks are
    in one process, the next call resets the group by itself; in a graph capture it raises CaptureError instead. If the
    ranks are in several processes, all of them must call `group.reset()`. `ended` has each rank whose process has
    ended, with how it ended; such a group cannot be reset.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        block: int,
        phase: str,
        expected: int,
        seen: int,
        call: str = "",
        word: int | None = None,
        ended: Mapping[int, str] | None = None,
    ) -> None:
        self.rank, self.peer, self.block, self.phase = rank, peer, block, phase
        self.expected, self.seen, self.call, self.word = expected, seen, call, word
        self.ended = dict(ended or {})
        where = f" in {call}" if call else ""
        if word is None:
            what = f"{phase} barrier: flag must reach {expected}, stood at {seen}"
        else:
            what = f"{phase}: word {word} of its slots has not come"
        gone = "".join(f" Rank {number} has ended: {how}." for number, how in sorted(self.ended.items()))
        then = "" if gone else "; group.reset() makes the group usable again"
        super().__init__(
            f"rank {rank} gave up waiting for rank {peer}{where} (block {block}, {what}).{gone} All results since that "
            f"call are undefined on every rank{then}."
        )


class ExchangeError(DrvfuseError):
    """The engine that exchanges partial sums between nodes failed, or could not connect the ranks.

    `rank` is the local rank on which the failure was found, and `engine` is the engine's name.
    """

    def __init__(self, rank: int, engine: str, problem: str) -> None:
        self.rank, self.engine = rank, engine
        super().__init__(f"rank {rank}: the exchange between nodes by {engine} {problem}")


class ExchangeTimeout(ExchangeError):
    """An exchange between nodes took longer than the `spin_timeout` setting, and was aborted.

    `rank` of node `node` waited for one or more of the ranks `peers`, which have the same number inside the other
    nodes; it is unknown for which of these. All results of that call and of all later calls are undefined on every
    rank until `group.reset()`, which connects the engine again. Graphs that hold exchanges must then be captured again.
    """

    def __init__(self, rank: int, node: int, peers: Sequence[int], engine: str, seconds: float) -> None:
        self.node, self.peers, self.seconds = node, tuple(peers), seconds
        some = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {list(peers)}"
        super().__init__(
            rank,
            engine,
            f"of node {node} with {some} did not end within {seconds:g} s and was aborted. All results since that call "
            "are undefined on every rank; group.reset() connects the engine again, and graphs must be captured again.",
        )


class NodeFailed(DrvfuseError):
    """A kernel of another node gave up before an exchange between nodes, so what that node sent is undefined.

    `rank`, of node `node`, learned this from the exchange of the call `call`. `failed` is the other node; it is None if
    the engine itself has added the sums of the nodes, since the rank cannot tell then which node failed. The ranks of
    the failed node raise the error that is the reason, in most cases a BarrierTimeout or a CallMismatch. All results of
    that call and of all later calls are undefined on every rank until `group.reset()`.
    """

    def __init__(self, rank: int, node: int, failed: int | None, call: str = "") -> None:
        self.rank, self.node, self.failed, self.call = rank, node, failed, call
        where = "another node" if failed is None else f"node {failed}"
        super().__init__(
            f"rank {rank} of node {node}: a kernel of {where} gave up before the exchange between nodes"
            f"{' in ' + call if call else ''}; the ranks of that node raise the reason. All results since that call "
            "are undefined on every rank; group.reset() makes the group usable again."
        )


class GridTimeout(BarrierTimeout):
    """Blocks of an op on one device waited for one another longer than the `spin_timeout` setting, or two launches used
    one workspace at the same time.

    `block` waited until block `peer` had stored a word with the launch number `expected` in the workspace, and last
    read the launch number `seen`. The results of that launch, and of all later launches with the workspace until it is
    zeroed, are undefined. The next call zeroes a workspace of drvfuse; a workspace that was passed as an argument must
    be zeroed by the caller. If the call has a `finish_counter`, that counter is zero again.
    """

    _REASONS = {
        1: "block {block} of a kernel gave up waiting for block {peer} (launch {expected}, found {seen})",
        2: "two launches used one workspace at the same time",
        3: "a launch was given a workspace that was not zeroed before its first use, or not zeroed after a time-out",
        4: "finish_counter held {seen} when a launch began: it was not zero at first, or another launch was using it",
    }

    def __init__(self, device: int, reason: int, block: int, peer: int, expected: int, seen: int) -> None:
        self.rank, self.device, self.block, self.peer = 0, device, block, peer
        self.phase, self.expected, self.seen = "grid", expected, seen
        what = self._REASONS[reason].format(block=block, peer=peer, expected=expected, seen=seen)
        if reason == 4:
            then = "on its stream are undefined; finish_counter is zero again, and the next call works"
        else:
            then = (
                "with its workspace are undefined; the next call zeroes a workspace of drvfuse's own, and whoever "
                "passed one must zero it"
            )
        DrvfuseError.__init__(self, f"device {device}: {what}. The results of that launch and of later ones {then}")


class CallMismatch(DrvfuseError):
    """Two ranks of a group made different calls, where all ranks had to make the same call.

    `call` describes the call of `rank`, and `peer_call` that of `peer`. All results since that call are undefined on
    every rank until `group.reset()`.
    """

    def __init__(self, rank: int, peer: int, call: str, peer_call: str) -> None:
        self.rank, self.peer, self.call, self.peer_call = rank, peer, call, peer_call
        super().__init__(
            f"rank {rank} called {call}, where rank {peer} called {peer_call}. All results since that call are "
            f"undefined on every rank; group.reset() makes the group usable again."
        )


class GroupError(DrvfuseError):
    """A step that all ranks of a group take together failed; every rank that took part in it raises this.

    `what` describes the step. `rank` is the lowest rank that failed, None if the failure is not that of one rank.
    `failure` is the message of the failure. Ranks are those of the group that took the step.
    """

    def __init__(self, what: str, rank: int | None, failure: str) -> None:
        self.what, self.rank, self.failure = what, rank, failure
        where = "" if rank is None else f" on rank {rank}"
        super().__init__(f"{what} failed{where}: {failure}")


class GroupTimeout(GroupError):
    """Ranks did not take part in a step within its time-out.

    `missing` are these ranks, in order. `waiting` says for every rank what it waits for, or what is known about it.
    `seconds` is the time-out.
    """

    def __init__(self, what: str, missing: Sequence[int], waiting: Mapping[int, str], seconds: float) -> None:
        self.missing, self.waiting, self.seconds = tuple(missing), dict(waiting), seconds
        absent = "; ".join(f"rank {rank}: {self.waiting.get(rank, 'nothing is known of it')}" for rank in self.missing)
        present = "; ".join(f"rank {rank}: {text}" for rank, text in self.waiting.items() if rank not in self.missing)
        text = f"{ranks_text(self.missing)} did not take part within {seconds:.3g} s ({absent})"
        super().__init__(what, None, text + (f"; the other ranks wait ({present})" if present else ""))


class RankEnded(GroupError):
    """A rank that a step needs has ended. `how` says whether its process has ended or it has closed the group.

    `rank` is that rank. It is None if the process that serves the boards has ended and has no rank in this group.
    """

    def __init__(self, what: str, rank: int | None, how: str) -> None:
        self.how = how
        super().__init__(what, rank, how)
        without = "" if rank is None else f" without rank {rank}"
        self.args = (f"{what} is impossible{without}: {how}. The ranks that are left can connect as a new group",)


class GroupMismatch(GroupError):
    """Ranks differ in a value that must be equal on all ranks. `values` has the value of each rank."""

    def __init__(self, what: str, values: Mapping[int, str]) -> None:
        self.values = dict(values)
        ranks: dict[str, list[int]] = {}
        for rank, value in sorted(self.values.items()):
            ranks.setdefault(value, []).append(rank)
        texts = "; ".join(f"{ranks_text(those)}: {value}" for value, those in ranks.items())
        super().__init__(what, None, texts)
        self.args = (f"the ranks disagree on {what} ({texts})",)


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks as text, such as "rank 2", "ranks 2 and 5" or "ranks 2, 4 to 7 and 9"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [text for run in runs for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(filter(None, (', '.join(parts[:-1]), parts[-1])))}"
