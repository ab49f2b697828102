# SPDX-License-Identifier: Apache-2.0
"""The table of instruction forms: the PTX of each, the kinds of its operands, and which results count as equal.

A form's body reads the operand registers x y z w (of the kinds in `sources`) and writes `r` (and `s`, the high half of
a 128-bit result). It may use the registers of `batch.TEMPORARIES`; `%cell` and `%near`, the addresses of 16 bytes for
each thread in global and in shared memory; `%room`, the address of 48 further bytes in shared memory; and `%lane`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

FAMILIES = ("integer", "bits", "float", "convert", "select", "memory", "warp", "cluster", "video", "asynchronous")


@dataclass(frozen=True)
class Form:
    """One instruction form. `name` is its opcode; if several forms have this opcode, a space and a note follow."""

    name: str
    body: str
    sources: tuple[str, ...]
    result: str
    rule: str = "exact"


def form(opcode: str, sources: str, result: str, body: str = "", rule: str = "exact", note: str = "") -> Form:
    """A form of an opcode. Its default body is the instruction with result r and the operands x y z w in order."""
    kinds = tuple(sources.split())
    body = body or f"{opcode} {', '.join(['r', *'xyzw'[: len(kinds)]])};"
    return Form(f"{opcode} {note}".strip(), body, kinds, result, rule)


def alike(opcodes: Iterable[str], kind: str, count: int, rule: str = "exact") -> Iterator[Form]:
    """A form for each of `opcodes`. `kind` is the type of its `count` operands and of its result, and is
    appended to the opcode."""
    return (form(f"{opcode}.{kind}", " ".join([kind] * count), kind, rule=rule) for opcode in opcodes)


@functools.cache
def table(families: tuple[str, ...] = FAMILIES) -> tuple[Form, ...]:
    """All forms of these families, in order. Raises ValueError if two forms have the same name."""
    found: list[Form] = []
    for family in families:
        found += importlib.import_module(f".forms_{family}", __package__).forms()
    twice = [name for name, count in Counter(f.name for f in found).items() if count > 1]
    if twice:
        raise ValueError(f"more than one form has the name {', '.join(sorted(twice))}")
    return tuple(found)


def product(*choices: tuple[str, ...]) -> Iterator[str]:
    """Every concatenation of one item from each of `choices`, in order. Items are modifiers with their dot, or ""."""
    return map("".join, itertools.product(*choices))


_MULTICAST = "needs a multicast object, which no tool of drvfuse creates on a GPU"

# Opcodes without a form, and why.
EXCLUDED = {
    "activemask": "which lanes are converged is the hardware's choice",
    "applypriority": "a cache hint without a result",
    "brkpt": "stops the kernel; the driver's tests cover it",
    "createpolicy": "the bits of a cache policy are the hardware's own",
    "discard": "makes memory undefined; a cache hint otherwise",
    "elect": "which lane is elected is the hardware's choice",
    "multimem.ld_reduce": _MULTICAST,
    "multimem.red": _MULTICAST,
    "multimem.st": _MULTICAST,
    "nanosleep": "time only",
    "pmevent": "an event for profilers without a result",
    "prefetch": "a cache hint without a result",
    "prefetchu": "a cache hint without a result",
    "setmaxnreg": "changes the register file only, and needs all warps of a warpgroup",
    "trap": "stops the kernel; the driver's tests cover it",
}
