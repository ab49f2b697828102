# SPDX-License-Identifier: Apache-2.0
"""Scalar video instructions have the results of the PTX manual, for every type and selector. They are not compared with
GPUs: newer ones have no such instructions, and ptxas replaces some with code that differs from the manual
(`tools/fidelity/forms_video.py`)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("llvmlite")
from ptx_harness import Program, pointers  # noqa: E402

TYPES = ("u32", "s32")
SELECTORS = ("", ".b0", ".b1", ".b2", ".b3", ".h0", ".h1")
COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
OPERATIONS = {
    "vadd": lambda a, b: a + b,
    "vsub": lambda a, b: a - b,
    "vabsdiff": lambda a, b: abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
}
COUNT = 64


def field(selector: str) -> tuple[int, int]:
    """The width of a part of a register, in bits, and the index of its first bit."""
    bits = {"": 32, "b": 8, "h": 16}[selector[1:2]]
    return bits, bits * int(selector[2:] or 0)


def part(x: np.ndarray, kind: str, selector: str) -> np.ndarray:
    """The numbers that a selector takes from registers with the bits `x`, as Python integers."""
    bits, at = field(selector)
    values = [int(v) >> at & (1 << bits) - 1 for v in x]
    return np.array([v - (1 << bits) if kind == "s32" and v >> bits - 1 else v for v in values], object)


def clamp(v: np.ndarray, kind: str, bits: int) -> np.ndarray:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind == "s32" else (0, (1 << bits) - 1)
    return np.minimum(np.maximum(v, low), high)


def signed(v: np.ndarray, kind: str) -> np.ndarray:
    return part([int(x) & 0xFFFFFFFF for x in v], kind, "")


def finished(v: np.ndarray, z: np.ndarray, kind: str, saturates: bool, into: str, second: str) -> np.ndarray:
    bits, at = field(into)
    v = clamp(v, kind, bits) if saturates else v
    if second == "add":
        v = v + z
    elif second:
        v = {"min": np.minimum, "max": np.maximum}[second](signed(v, kind), signed(z, kind))
    elif into:
        mask = (1 << bits) - 1 << at
        v = np.array([int(c) & ~mask | int(x) << at & mask for x, c in zip(v, z, strict=True)], object)
    return np.array([int(x) & 0xFFFFFFFF for x in v], np.uint32)


def forms(rng: np.random.Generator) -> list[tuple[str, object]]:
    """Every operation on every type with random modifiers, and its result as a function of x, y and z."""
    found = []
    names = [(op, *kinds, "", "") for op in OPERATIONS for kinds in itertools.product(TYPES, repeat=3)]
    names += [
        ("vset", "u32", a, b, f".{how}", "") for a, b in itertools.product(TYPES, repeat=2) for how in COMPARISONS
    ]
    names += [
        (op, result, a, "u32", "", f".{mode}")
        for op in ("vshl", "vshr")
        for result, a in itertools.product(TYPES, repeat=2)
        for mode in ("clamp", "wrap")
    ]
    for (op, kind, a, b, compare, mode), turn in itertools.product(names, range(4)):
        asel, bsel = rng.choice(SELECTORS, 2)
        saturates = bool(rng.integers(2)) and op != "vset"
        second = str(rng.choice(("", "add", "min", "max"))) if turn % 2 else ""
        into = str(rng.choice(SELECTORS)) if turn % 2 == 0 else ""
        last = ", z" if second or into else ""
        kinds = f".{a}.{b}" if op == "vset" else f".{kind}.{a}.{b}"
        tail = f"{compare}{'.sat' if saturates else ''}{mode}{'.' + second if second else ''}"
        text = f"{op}{kinds}{tail} r{into}, x{asel}, y{bsel}{last};"

        def result(
            x, y, z, op=op, kind=kind, a=a, b=b, compare=compare, mode=mode, rest=(asel, bsel, saturates, into, second)
        ):
            asel, bsel, saturates, into, second = rest
            p, q = part(x, a, asel), part(y, b, bsel)
            if op == "vset":
                v = COMPARISONS[compare[1:]](p, q).astype(int).astype(object)
            elif op in ("vshl", "vshr"):
                q = q & 31 if mode == ".wrap" else np.minimum(q, 32)
                v = p << q if op == "vshl" else p >> q
            else:
                v = OPERATIONS[op](p, q)
            return finished(v, z.astype(object), kind, saturates, into, second)

        found.append((text, result))
    for a, b, sat, scale in itertools.product(TYPES, TYPES, ("", ".sat"), ("", ".shr7", ".shr15")):
        for po, signs in (
            ("", ("", "", "")),
            (".po", ("", "", "")),
            ("", ("-", "", "")),
            ("", ("", "-", "")),
            ("", ("", "", "-")),
        ):
            minus = signs[0] != signs[1]
            final = "s32" if "s32" in (a, b) or minus or signs[2] else "u32"
            asel, bsel = rng.choice(SELECTORS, 2)
            text = f"vmad.{final}.{a}.{b}{po}{sat}{scale} r, {signs[0]}x{asel}, {signs[1]}y{bsel}, {signs[2]}z;"

            def multiplied(x, y, z, a=a, b=b, asel=asel, bsel=bsel, rest=(po, minus, signs[2], final, sat, scale)):
                po, minus, negative, final, sat, scale = rest
                v = part(x, a, asel) * part(y, b, bsel) * (-1 if minus else 1)
                c = signed(z, final)
                v = (v - c if negative else v + c) + bool(po) >> int(scale[4:] or 0)
                return finished(v, z, final, bool(sat), "", "")

            found.append((text, multiplied))
    return found


def test_scalar_video_instructions_do_what_the_manual_says(rng: np.random.Generator) -> None:
    made = forms(rng)
    edges = np.array([0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32)
    x, y, z = (np.concatenate([rng.permutation(edges), rng.integers(0, 1 << 32, COUNT - 11, np.uint32)]) for _ in "xyz")
    y[20:40] %= 40
    body = "".join(f"{text} st.global.u32 [o], r; add.u64 o, o, {4 * COUNT};\n" for text, _ in made)
    ptx = f""".version 8.8
.target sm_90
.address_size 64
.visible .entry k(.param .u64 px, .param .u64 py, .param .u64 pz, .param .u64 po) {{
.reg .b32 t, r, x, y, z; .reg .b64 a, i, o;
mov.u32 t, %tid.x; mul.wide.u32 i, t, 4;
ld.param.u64 a, [px]; add.u64 a, a, i; ld.global.u32 x, [a];
ld.param.u64 a, [py]; add.u64 a, a, i; ld.global.u32 y, [a];
ld.param.u64 a, [pz]; add.u64 a, a, i; ld.global.u32 z, [a];
ld.param.u64 o, [po]; add.u64 o, o, i;
{body} ret; }}
"""
    out = np.zeros((len(made), COUNT), np.uint32)
    Program(ptx).run("k", pointers(x, y, z, out), COUNT)
    for (text, result), row in zip(made, out, strict=True):
        expected = result(x, y, z)
        bad = np.flatnonzero(row != expected)
        assert not len(bad), (text, [tuple(map(hex, (x[i], y[i], z[i], row[i], expected[i]))) for i in bad[:3]])
