# SPDX-License-Identifier: Apache-2.0
"""Every arithmetic opcode against an exact reference in Python, on edge values and random ones.

All cases are kernels of one module, so LLVM runs once.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("llvmlite")
from conversion_cases import conversion_cases  # noqa: E402
from exact_numbers import is_nan  # noqa: E402
from float_cases import float_cases  # noqa: E402
from integer_cases import integer_cases  # noqa: E402
from opcode_case import Case, bytes_of, corners, samples  # noqa: E402
from ptx_harness import Program, pointers  # noqa: E402

CASES: list[Case] = []
for add_cases in (integer_cases, conversion_cases, float_cases):
    add_cases(lambda *case: CASES.append(Case(*case)))


@pytest.fixture(scope="module")
def program() -> Program:
    head = ".version 8.8\n.target sm_90a\n.address_size 64\n"
    return Program(head + "\n".join(c.ptx(f"k{i}") for i, c in enumerate(CASES)))


@pytest.mark.parametrize("base", sorted({c.name.split(".")[0] for c in CASES}))
def test_opcode_matches_the_exact_reference(program: Program, base: str) -> None:
    for index, c in enumerate(CASES):
        if c.name.split(".")[0] != base:
            continue
        inputs = [samples(kind, 1000 * index + i) for i, kind in enumerate(c.sources)]
        if len(inputs) == 2:
            crossed = np.array(list(itertools.product(*(corners(kind) for kind in c.sources))), np.uint64)
            inputs = [np.concatenate([x, crossed[:, i].astype(x.dtype)]) for i, x in enumerate(inputs)]
        count = len(inputs[0])
        out = np.zeros(count, f"u{bytes_of(c.result)}")
        program.run(f"k{index}", pointers(out, *inputs).ljust(32, b"\0"), count)
        for i in range(count):
            v = [int(x[i]) for x in inputs]
            expected, got = int(c.reference(*v)), int(out[i])
            if expected == -1 and is_nan(got, "f64"):
                continue
            assert got == expected, f"{c.body} {[hex(x) for x in v]}: {got:#x}, not {expected:#x}"


@pytest.mark.parametrize(
    ("opcode", "function"), [("ex2", np.exp2), ("lg2", np.log2), ("sin", np.sin), ("cos", np.cos), ("tanh", np.tanh)]
)
def test_approximate_functions_differ_from_the_rounded_double_result_by_one_ulp_at_most(
    opcode: str, function: Callable
) -> None:
    program = Program(
        f""".version 8.8\n.target sm_90a\n.address_size 64
.visible .entry k(.param .u64 o, .param .u64 a) {{ .reg .b64 %d<4>; .reg .b32 %r<2>; .reg .f32 %f<2>;
mov.u32 %r0, %tid.x; mul.wide.u32 %d0, %r0, 4; ld.param.u64 %d1, [a]; add.s64 %d1, %d1, %d0;
ld.global.f32 %f0, [%d1]; {opcode}.approx.f32 %f1, %f0; ld.param.u64 %d2, [o]; add.s64 %d2, %d2, %d0;
st.global.f32 [%d2], %f1; ret; }}"""
    )
    x = np.random.default_rng(7).normal(0, 4, 64).astype(np.float32)
    x = np.abs(x) if opcode == "lg2" else x
    out = np.zeros_like(x)
    program.run("k", pointers(out, x), len(x))
    expected = function(x.astype(np.float64)).astype(np.float32)
    assert np.abs(out.view(np.int32) - expected.view(np.int32)).max() <= 1


def test_float_immediates_have_the_written_bits() -> None:
    program = Program(
        """.version 8.8\n.target sm_90a\n.address_size 64
.visible .entry k(.param .u64 o) { .reg .b64 %d<2>; .reg .f32 %f<4>; .reg .f64 %g;
ld.param.u64 %d0, [o]; mov.f32 %f0, 0f7FC12345; mov.f32 %f1, 1.5;
mov.f32 %f2, 0fFF800000; mov.f64 %g, 0d400921FB54442D18;
st.global.v2.f32 [%d0], {%f0, %f1}; st.global.f32 [%d0+8], %f2; st.global.f64 [%d0+16], %g; ret; }"""
    )
    out = np.zeros(6, np.uint32)
    program.run("k", pointers(out))
    assert [hex(x) for x in out] == [
        hex(x) for x in (0x7FC12345, 0x3FC00000, 0xFF800000, 0, *struct.unpack("<II", struct.pack("<d", math.pi)))
    ]
