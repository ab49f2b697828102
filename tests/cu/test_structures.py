# SPDX-License-Identifier: Apache-2.0
"""Structures that the host reads in the kernels' sources have the layout that the compiler gives them there."""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import re

import pytest

import drvfuse as df
from drvfuse import structures
from drvfuse.comm import workspace
from drvfuse.ops.collectives.rows.kernel import NormForm
from drvfuse.ops.collectives.sums.params import MOST_TENSORS
from drvfuse.structures import CU, DEFINITIONS, body, laid_out

SIZES = {"MOST_TENSORS": MOST_TENSORS, "MAX_RANKS": workspace.MAX_RANKS, **workspace.defines()}


def load_all() -> None:
    """Import every module that lays structures out, and make the variants of parameters that forms need."""
    for package in ("drvfuse.ops", "drvfuse.check"):
        module = importlib.import_module(package)
        for found in pkgutil.walk_packages(module.__path__, f"{package}."):
            importlib.import_module(found.name)
    params = importlib.import_module("drvfuse.ops.collectives.rows.params")
    for kind in [kind for kind in DEFINITIONS if issubclass(kind, params.RowsParams)]:
        params.params_of(kind, NormForm(beta=True))


def definition(number: int, numbers: dict[type[ctypes.Structure], int]) -> str:
    """The text of a structure as its source has it, under a name that no other structure has."""
    kind = list(numbers)[number]
    bases = [base for base in kind.__mro__[1:] if base in numbers]
    extends = f" : S{numbers[bases[0]]}" if bases else ""
    text = body(DEFINITIONS[kind])
    for part in DEFINITIONS[kind].parts:
        text = re.sub(rf"\b{DEFINITIONS[part].name} (?=\w)", f"S{numbers[part]} ", text)
    return f"struct S{number}{extends} {{\n{text}\n}};"


@pytest.mark.emulated
def test_every_structure_has_the_layout_of_its_source() -> None:
    load_all()
    kinds = [kind for kind in DEFINITIONS if kind._fields_]
    assert len(kinds) > 40
    numbers = {kind: number for number, kind in enumerate(kinds)}
    texts = [definition(number, numbers) for number in range(len(kinds))]
    pointed = {name for text in texts for name in re.findall(r"\b([A-Z]\w*|bf16)\*", text)}
    lines, expected = [], []
    for number, kind in enumerate(kinds):
        lines.append(f"out[{len(expected)}] = sizeof(S{number});")
        expected.append(ctypes.sizeof(kind))
        for name, *_ in kind._fields_:
            lines.append(f"out[{len(expected)}] = u32(__INTADDR__(&(((S{number}*)0)->{name})));")
            lines.append(f"out[{len(expected) + 1}] = sizeof(((S{number}*)0)->{name});")
            expected += [getattr(kind, name).offset, getattr(kind, name).size]
    source = "\n".join(
        ['#include "common/types.cuh"', *(f"struct {name};" for name in sorted(pointed))]
        + [f"constexpr int {name} = {value};" for name, value in SIZES.items()]
        + [*texts, 'extern "C" __global__ void layout(u32* out) {', *lines, "}"]
    )
    with df.emu.Machine(devices=1) as machine:
        device = df.device(0, driver=machine)
        out = device.zeros(len(expected), "uint32")
        df.compile(source, driver=machine, include=[CU])["layout"].prepare(1, 1, out, device=device)(device.stream)
        device.synchronize()
        assert out.numpy().tolist() == expected


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("struct Other { int x; };", LookupError, "does not define struct Small"),
        ("struct Small { int x : 3; };", SyntaxError, "'int x : 3' is no field"),
        ("struct Small { unsigned long x; };", SyntaxError, "'unsigned long x' is no field"),
        ("struct Small { u7 x; };", KeyError, "u7"),
        ("struct Small { int x[N]; };", KeyError, "N"),
    ],
)
def test_what_the_host_cannot_read_is_refused(text, error, words, tmp_path) -> None:
    file = tmp_path / "small.cuh"
    file.write_text(text)

    class Small(ctypes.Structure):
        pass

    with pytest.raises(error, match=words):
        laid_out(str(file))(Small)
    assert Small not in DEFINITIONS


def test_fields_are_chosen_by_macros_and_functions_are_skipped(tmp_path) -> None:
    file = tmp_path / "both.cuh"
    file.write_text("""
struct Both {
    int a, b;  // a comment; with a semicolon
    __device__ int sum() const { if (a) { return b; } return a; }
#if MORE
    const u8* pointer;
#endif
    float last[2 + N];
};
""")

    def fields(*macros: str) -> list[str]:
        class Both(ctypes.Structure):
            pass

        kind = laid_out(str(file), "Both", macros, sizes={"N": 1})(Both)
        del structures.DEFINITIONS[kind]
        return [name for name, *_ in kind._fields_]

    assert fields() == ["a", "b", "last"]
    assert fields("MORE") == ["a", "b", "pointer", "last"]
