# SPDX-License-Identifier: Apache-2.0
"""The translation of matrix instructions: refused forms are named, and only modules that have
such instructions need the library.
"""

from __future__ import annotations

import pytest

pytest.importorskip("llvmlite")
from drvfuse.emu.translate.module import translate
from drvfuse.ptx.ir import PtxError

FRAME = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {{ .reg .b32 %r<16>; .reg .f32 %f<16>; .reg .b64 %q; .reg .f64 %d<8>;
ld.param.u64 %q, [p]; {} ret; }}"""
FOUR = "{%r0, %r1, %r2, %r3}"
FLOATS = "{%f0, %f1, %f2, %f3}"

REFUSED = [
    ("mma.sp.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r0, %r1}, {%r0, %r1}, {%r0, %r1}, {%r0, %r1}, %r0, 0x0;",
     "sparse operands"),
    ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d0, %d1}, {%d2}, {%d3}, {%d0, %d1};", "fp64 operands"),
    ("mma.sync.aligned.m16n8k32.row.col.s32.u4.u4.s32 {%r0, %r1, %r2, %r3}, {%r0, %r1}, {%r0}, {%r0, %r1, %r2, %r3};",
     "4-bit operands"),
    ("mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.xor.popc {%r0, %r1}, {%r0}, {%r0}, {%r0, %r1};",
     "1-bit operands"),
    ("wmma.load.a.sync.aligned.row.m8n8k32.global.s4 {%r0}, [%q], 32;", "4-bit operands"),
    ("wmma.load.a.sync.aligned.row.m8n8k4.global.f64 {%d0}, [%q], 4;", "fp64 operands"),
    (f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32 {FLOATS}, {FOUR}, {{%r0, %r1}}, {FLOATS};",
     "4-bit operands"),
]  # fmt: skip
WRONG = [
    (f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e3m2.e4m3.f32 {FLOATS}, {FOUR}, {{%r0, %r1}}, {FLOATS};",
     "mma with .kind::f8f6f4 (sm_120a) is not supported"),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [%r2];", "(sm_100a) is not supported"),
    # Combinations of types and shapes that PTX does not have.
    (f"mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {FLOATS}, {FOUR}, {{%r0, %r1}}, {FLOATS};", "no combination"),
    (f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f16 {FLOATS}, {FOUR}, {{%r0, %r1}}, {{%r0, %r1}};",
     "no combination"),
    (f"mma.sync.aligned.m16n8k16.col.col.f32.f16.f16.f32 {FLOATS}, {FOUR}, {{%r0, %r1}}, {FLOATS};", ".row.col"),
    (f"mma.sync.aligned.m16n8k4.row.col.f32.f16.f16.f32 {FLOATS}, {{%r0, %r1}}, {{%r0}}, {FLOATS};",
     "no operands of type"),
    (f"mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32 {FLOATS}, {FOUR}, {{%r0, %r1}}, {FLOATS};",
     "no combination"),
    (f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {FLOATS}, {{%r0, %r1}}, {{%r0, %r1}}, {FLOATS};",
     "a fragment of 4 register(s) is expected"),
    ("wmma.load.a.sync.aligned.row.m16n16k16.global.tf32 {%r0, %r1, %r2, %r3}, [%q], 16;", "no elements of type .tf32"),
    ("ldmatrix.sync.aligned.m8n8.x2.global.b16 {%r0, %r1}, [%q];", "needs an address in shared memory"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[text.split(" ")[0] for text, _ in REFUSED])
def test_a_refused_kernel_names_the_operands(text: str, words: str) -> None:
    refused = translate(FRAME.format(text)).kernels["k"].refused
    assert refused is not None and words in refused[0]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[text.split(" ")[0] for text, _ in WRONG])
def test_a_refusal_names_the_unsupported_form(text: str, words: str) -> None:
    with pytest.raises(PtxError) as refused:
        translate(FRAME.format(text))
    assert words in str(refused.value)


def test_only_a_module_with_a_matrix_instruction_needs_the_library() -> None:
    assert translate(FRAME.format("mov.b32 %r0, 1;")).libraries == ()
    assert translate(FRAME.format("movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r1;")).libraries == ("matrix",)


def test_a_module_has_one_table_per_matrix_shape() -> None:
    one = f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {FLOATS}, {FOUR}, {{%r4, %r5}}, {FLOATS};"
    assert translate(FRAME.format(3 * one)).ir.count("private constant") == 1
