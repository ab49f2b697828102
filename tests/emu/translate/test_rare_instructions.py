# SPDX-License-Identifier: Apache-2.0
"""Rarely used instructions: fp64 rounded in a direction, modes of prmt, memory on the stack."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("llvmlite")
from ptx_harness import Program, pointers  # noqa: E402

COUNT = 96
OPERATIONS = {
    "mul": (2, lambda a, b: a * b),
    "div": (2, lambda a, b: a / b),
    "fma": (3, lambda a, b, c: a * b + c),
    "rcp": (1, lambda a: 1 / a),
    "sqrt": (1, None),
}


def encloses(exact: Fraction, low: Fraction, high: Fraction, squares: bool) -> bool:
    """Whether low < high and low <= exact <= high. With `squares`, `exact` is the square of an instruction's exact
    result, so the squares of `low` and `high` take their places.
    """
    if squares:
        low, high = low * low, high * high
    return low <= exact <= high and low < high


def test_directed_rounding_gives_the_next_number_in_its_direction(rng: np.random.Generator) -> None:
    x, y, z = (rng.standard_normal(COUNT) * 10.0 ** rng.integers(-150, 150, COUNT) for _ in "xyz")
    x[:8], y[:8], z[:8] = 3.0, 8.0, -24.0  # operands with exact results
    instructions = [(name, mode) for name in OPERATIONS for mode in ("rz", "rm", "rp", "rn")]
    body = "".join(
        f"{name}.{mode}.f64 r, {', '.join('xyz'[: OPERATIONS[name][0]])};"
        f" st.global.f64 [o], r; add.u64 o, o, {8 * COUNT};\n"
        for name, mode in instructions
    )
    loads = "".join(f"ld.param.u64 a, [p{v}]; add.u64 a, a, i; ld.global.f64 {v}, [a];\n" for v in "xyz")
    ptx = f""".version 8.8
.target sm_90
.address_size 64
.visible .entry k(.param .u64 px, .param .u64 py, .param .u64 pz, .param .u64 po) {{
.reg .b32 t; .reg .f64 r, x, y, z; .reg .b64 a, i, o;
mov.u32 t, %tid.x; mul.wide.u32 i, t, 8; ld.param.u64 o, [po]; add.u64 o, o, i;
{loads}{body} ret; }}
"""
    out = np.zeros((len(instructions), COUNT))
    Program(ptx).run("k", pointers(x, y, z, out), COUNT)
    nearest = {name: row for (name, mode), row in zip(instructions, out, strict=True) if mode == "rn"}
    for (name, mode), row in zip(instructions, out, strict=True):
        arity, exactly = OPERATIONS[name]
        for i in range(COUNT):
            if name == "sqrt" and x[i] < 0:
                assert math.isnan(row[i])
                continue
            operands = [Fraction(v[i]) for v in (x, y, z)[:arity]]
            exact = operands[0] if exactly is None else exactly(*operands)
            found, how = Fraction(row[i]), mode
            if (found * found if exactly is None else found) == exact:
                continue
            if mode == "rn":
                assert row[i] == nearest[name][i]
                continue
            if mode == "rz":
                how = "rm" if exact > 0 else "rp"
            other = Fraction(math.nextafter(row[i], math.inf if how == "rm" else -math.inf))
            low, high = (found, other) if how == "rm" else (other, found)
            assert encloses(exact, low, high, exactly is None), (name, mode, x[i], y[i], z[i], row[i])


MODES = {
    "f4e": lambda i: [i, i + 1, i + 2, i + 3],
    "b4e": lambda i: [i, (i - 1) % 8, (i - 2) % 8, (i - 3) % 8],
    "rc8": lambda i: [i] * 4,
    "ecl": lambda i: [max(i, k) for k in range(4)],
    "ecr": lambda i: [min(i, k) for k in range(4)],
    "rc16": lambda i: [i % 2 * 2, i % 2 * 2 + 1] * 2,
}


def test_the_modes_of_prmt_take_their_selector_from_a_register(rng: np.random.Generator) -> None:
    words = rng.integers(0, 256, 8, np.uint8)
    a, b = (int(v) for v in words.view(np.uint32))
    body = "".join(f"prmt.b32.{mode} r, {a}, {b}, t; st.global.b32 [o], r; add.u64 o, o, 32;\n" for mode in MODES)
    ptx = f""".version 8.8
.target sm_90
.address_size 64
.visible .entry k(.param .u64 po) {{
.reg .b32 t, r; .reg .b64 o, i;
mov.u32 t, %tid.x; mul.wide.u32 i, t, 4; ld.param.u64 o, [po]; add.u64 o, o, i;
{body} ret; }}
"""
    out = np.zeros((len(MODES), 8, 4), np.uint8)
    Program(ptx).run("k", pointers(out), 8)
    for picks, rows in zip(MODES.values(), out, strict=True):
        for t, row in enumerate(rows):
            assert row.tolist() == [int(words[k]) for k in picks(t & 3)]


STACK = """.version 8.8
.target sm_90
.address_size 64
.func (.param .b32 o) sum (.param .b32 n) {
    .reg .b32 n0, i, v, s; .reg .b64 a, at, size; .reg .pred p;
    ld.param.b32 n0, [n];
    mul.wide.u32 size, n0, 4;
    alloca.u64 a, size, 16;
    mov.b32 i, 0; mov.b32 s, 0;
FILL:
    mul.wide.u32 at, i, 4; add.u64 at, at, a; mul.lo.u32 v, i, i; st.local.b32 [at], v;
    add.u32 i, i, 1; setp.lt.u32 p, i, n0; @p bra FILL;
    mov.b32 i, 0;
READ:
    mul.wide.u32 at, i, 4; add.u64 at, at, a; ld.local.b32 v, [at]; add.u32 s, s, v;
    add.u32 i, i, 1; setp.lt.u32 p, i, n0; @p bra READ;
    st.param.b32 [o], s; ret;
}
.visible .entry k(.param .u64 po) {
    .reg .b32 t, r; .reg .b64 o, i, a, b, c, d, kept; .reg .pred p;
    mov.u32 t, %tid.x; mul.wide.u32 i, t, 32; ld.param.u64 o, [po]; add.u64 o, o, i;
    alloca.u64 a, 20; stacksave.u64 kept; alloca.u64 b, 1; stackrestore.u64 kept; alloca.u64 c, 8;
    sub.u64 d, b, a; st.global.u64 [o], d; sub.u64 d, c, b; st.global.u64 [o+8], d;
    and.b64 d, c, 15; st.global.u64 [o+16], d;
    mov.b32 r, 0;
AGAIN:
    { .param .b32 x; .param .b32 y; st.param.b32 [y], 300; call (x), sum, (y); ld.param.b32 t, [x]; }
    add.u32 r, r, 1; setp.lt.u32 p, r, 20; @p bra AGAIN;  // 20 times 1200 bytes
    st.global.u32 [o+24], t;
    ret;
}
"""


def test_stack_allocations_are_separate_and_end_with_their_function() -> None:
    out = np.zeros((3, 4), np.uint64)
    Program(STACK).run("k", pointers(out), 3)
    for row in out:
        assert row.tolist() == [32, 0, 0, sum(i * i for i in range(300))]


SHORT = """.version 8.8
.target sm_90
.address_size 64
.visible .entry k(.param .u64 po) {
    .local .align 8 .b8 a[16]; .local .align 8 .b8 b[16];
    .reg .b32 t, v, p, q; .reg .b64 o, g, i; .reg .pred r;
    mov.u32 t, %tid.x; ld.param.u64 o, [po]; mul.wide.u32 i, t, 16; add.u64 o, o, i;
    mov.b32 p, b; add.u32 p, p, 4; st.local.b32 [p+4], t;
    mov.b32 q, a; st.local.v2.b32 [q], {t, p}; st.local.b32 [a+8], 7;
    cvt.u64.u32 g, p; cvta.local.u64 g, g; ld.b32 v, [g+4]; st.global.b32 [o], v;
    isspacep.local r, g; selp.b32 v, 1, 0, r; st.global.b32 [o+4], v;
    cvta.to.local.u64 g, g; cvt.u32.u64 v, g; sub.u32 v, v, p; st.global.b32 [o+8], v;
    ld.local.b32 v, [q+8]; st.global.b32 [o+12], v;
    ret;
}
"""


def test_addresses_in_local_memory_fit_into_32_bits() -> None:
    out = np.zeros((3, 4), np.uint32)
    Program(SHORT).run("k", pointers(out), 3)
    assert out.tolist() == [[t, 1, 0, 7] for t in range(3)]
