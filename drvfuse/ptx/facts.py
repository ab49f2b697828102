# SPDX-License-Identifier: Apache-2.0
"""Facts about kernels, read from PTX: parameters with sizes and offsets, launch bounds, PDL instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Param:
    """A kernel parameter: kind "int" (also pointers), "float" or "bytes" (a struct by value), size and offset."""

    kind: str
    size: int
    offset: int


@dataclass(frozen=True)
class KernelInfo:
    """What is known of a kernel without loading it.

    `name` is what it was asked for as, `lowered` its symbol. `has_pdl_wait` and `has_pdl_trigger` say whether it, or a
    function it calls, contains griddepcontrol.wait or .launch_dependents. `max_threads` comes from __launch_bounds__.
    """

    name: str
    lowered: str
    params: tuple[Param, ...]
    param_bytes: int
    has_pdl_wait: bool
    has_pdl_trigger: bool
    max_threads: int | None


_NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', re.S)
_HEAD = re.compile(r"\.(?P<what>entry|func)\b\s*(?:\([^)]*\)\s*)?(?P<name>[\w$]+)")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\b(?:\s+\.(?:global|const|shared|local))?(?:\s+\.align\s+\d+)?\s+)?(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?"
)
_CALL = re.compile(r"\bcall(?:\.uni)?\b([^;]*);")
_MAXNTID = re.compile(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


@dataclass(frozen=True)
class _Function:
    entry: bool
    header: str
    body: str


def _functions(ptx: str) -> Iterator[tuple[str, _Function]]:
    text = _NOISE.sub("", ptx)
    position = 0
    while (head := _HEAD.search(text, position)) is not None:
        opening, semicolon = text.find("{", head.end()), text.find(";", head.end())
        if opening < 0 or 0 <= semicolon < opening:  # a declaration
            position = head.end()
            continue
        depth, end = 1, opening + 1
        for brace in re.finditer(r"[{}]", text[opening + 1 :]):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                end = opening + 1 + brace.end()
                break
        yield head["name"], _Function(head["what"] == "entry", text[head.end() : opening], text[opening:end])
        position = end


def _params(header: str) -> tuple[tuple[Param, ...], int]:
    params, offset = [], 0
    for match in _PARAM.finditer(header):
        element = int(re.sub(r"\D", "", match["type"])) // 8
        size = element * int(match["count"] or 1)
        align = int(match["align"] or element)
        offset = (offset + align - 1) // align * align
        kind = "bytes" if match["count"] else "float" if match["type"] in ("f32", "f64") else "int"
        params.append(Param(kind, size, offset))
        offset += size
    return tuple(params), offset


def kernels(ptx: str, lowered: Mapping[str, str]) -> dict[str, KernelInfo]:
    """Every kernel of the PTX, by its symbol and, for those in `lowered` (name expression -> symbol), by that name."""
    functions = dict(_functions(ptx))

    def reaches(name: str, instruction: str, seen: set[str]) -> bool:
        if name in seen or name not in functions:
            return False
        seen.add(name)
        body = functions[name].body
        if instruction in body:
            return True
        called = {word for call in _CALL.findall(body) for word in re.findall(r"[\w$]+", call)}
        return any(reaches(callee, instruction, seen) for callee in called)

    def describe(name: str, symbol: str) -> KernelInfo:
        header = functions[symbol].header
        params, size = _params(header)
        bound = _MAXNTID.search(header)
        threads = None
        if bound:
            threads = int(bound[1]) * int(bound[2] or 1) * int(bound[3] or 1)
        wait = reaches(symbol, "griddepcontrol.wait", set())
        trigger = reaches(symbol, "griddepcontrol.launch_dependents", set())
        return KernelInfo(name, symbol, params, size, wait, trigger, threads)

    found = {name: describe(name, name) for name, function in functions.items() if function.entry}
    found.update({name: describe(name, symbol) for name, symbol in lowered.items() if symbol in found})
    return found
