# SPDX-License-Identifier: Apache-2.0
"""Instruction forms of video instructions, scalar and packed: every operation on every type. Selectors, masks,
saturation and second operations change from form to form, so not every combination is a form.

The scalar forms are only those for which ptxas makes code that agrees with the PTX manual. Newer GPUs have no scalar
video instructions, and the code of ptxas for sm_90 does not clamp unsigned results from above, compares wide
intermediate results in .min and .max, puts the wrong half into .h1, and multiplies unsigned operands as signed ones in
vmad with .sat or a shift. The emulator does as the manual says; tests/emu/translate/test_video.py compares with that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .forms import Form, form

TYPES = ("u32", "s32")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
PARTS = ("b0", "b2", "h1", "b3", "h0", "b1")
SCALAR = ("vadd", "vsub", "vabsdiff", "vmin", "vmax")
PACKED = ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax")
SELECTORS = {
    2: ((".h0", ".h01", ".h33"), (".h1", ".h20", ".h12")),
    4: ((".b210", ".b7531", ".b0246"), (".b3", ".b4444", ".b3012")),
}


def forms() -> Iterator[Form]:
    return (made for made in _all() if _translated_well(made.name.split()[0], made.body.split(" ", 1)[1]))


def _all() -> Iterator[Form]:
    turn = itertools.count()
    for names in itertools.product(SCALAR, TYPES, TYPES, TYPES):
        yield from _scalar(".".join(names), next(turn), saturates=True)
    for names in itertools.product(("vshl", "vshr"), TYPES, TYPES):
        for mode in ("clamp", "wrap"):
            yield from _shift(".".join(names) + ".u32", mode)
    for a, b, compare in itertools.product(TYPES, TYPES, COMPARISONS):
        yield from _scalar(f"vset.{a}.{b}.{compare}", next(turn), saturates=False)
    yield from _multiply_add()
    for lanes in (2, 4):
        for name, result, a, b in itertools.product(PACKED, TYPES, TYPES, TYPES):
            yield from _packed(f"{name}{lanes}.{result}.{a}.{b}", lanes, ("", ".sat", ".add"))
        for a, b, compare in itertools.product(TYPES, TYPES, COMPARISONS):
            yield from _packed(f"vset{lanes}.{a}.{b}.{compare}", lanes, ("", ".add"))


def _translated_well(opcode: str, body: str) -> bool:
    base, result, *modifiers = opcode.split(".")
    if base[-1] in "24":
        return True
    into, saturates = body.split(",")[0], "sat" in modifiers
    unsigned = result == "u32" or base in ("vset", "vshl")
    if base == "vmad":
        return not saturates and not {"shr7", "shr15"} & {*modifiers}
    if saturates and (unsigned or into != "r"):
        return False
    return into != "r.h1" and not (unsigned and {"min", "max"} & {*modifiers})


def _one(opcode: str, body: str, note: str = "") -> Form:
    return form(opcode, "i32 i32 i32", "i32", f"{opcode} {body};", note=note)


def _scalar(opcode: str, turn: int, saturates: bool) -> Iterator[Form]:
    second = ("add", "min", "max")[turn % 3]
    yield _one(opcode, "r, x, y")
    yield _one(f"{opcode}.{second}", "r, x.b3, y.h0, z", "of parts")
    part = PARTS[turn % 6]
    yield _one(opcode, f"r.{part}, x, y.b1, z", f"to {part}")
    if saturates:
        yield _one(f"{opcode}.sat", "r, x, y")
        yield _one(f"{opcode}.sat.{second}", "r, x.h1, y, z", "of parts")
        part = PARTS[(turn + 2) % 6]
        yield _one(f"{opcode}.sat", f"r.{part}, x.b2, y, z", f"to {part}")


def _shift(opcode: str, mode: str) -> Iterator[Form]:
    for sat in ("", ".sat"):
        yield _one(f"{opcode}{sat}.{mode}", "r, x, y")
        yield _one(f"{opcode}{sat}.{mode}.max", "r, x.h1, y.b2, z")
        yield _one(f"{opcode}{sat}.{mode}", "r.h1, x, y.b1, z", "to h1")


def _multiply_add() -> Iterator[Form]:
    for a, b in itertools.product(TYPES, TYPES):
        result = "u32" if a == b == "u32" else "s32"
        for scale, sat in itertools.product(("", ".shr7", ".shr15"), ("", ".sat")):
            yield _one(f"vmad.{result}.{a}.{b}{sat}{scale}", "r, x, y, z")
            yield _one(f"vmad.{result}.{a}.{b}{sat}{scale}", "r, x.h0, y.b3, z", "of parts")
            yield _one(f"vmad.{result}.{a}.{b}.po{sat}{scale}", "r, x, y.h1, z")
            yield _one(f"vmad.s32.{a}.{b}{sat}{scale}", "r, -x, y, z", "minus x")
            yield _one(f"vmad.s32.{a}.{b}{sat}{scale}", "r, x, y, -z", "minus z")


def _packed(opcode: str, lanes: int, tails: tuple[str, ...]) -> Iterator[Form]:
    for i, tail in enumerate(tails):
        mask, a, b = SELECTORS[lanes][i % 2] if i else ("", "", "")
        yield _one(opcode + tail, f"r{mask}, x{a}, y{b}, z", f"{mask} {a} {b}".strip())
