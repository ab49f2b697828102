# SPDX-License-Identifier: Apache-2.0
"""The PTX parser and what the translator refuses."""

from __future__ import annotations

import pytest

pytest.importorskip("llvmlite")
from drvfuse.emu.translate.module import translate  # noqa: E402
from drvfuse.ptx.ir import Addr, Imm, Instruction, PtxError, Reg, Sym  # noqa: E402
from drvfuse.ptx.parser import parse  # noqa: E402

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, params: str = ".param .u64 a", head: str = "") -> str:
    registers = ".reg .pred %p<4>; .reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .f32 %f<8>; .reg .f64 %g<4>;"
    return f"{HEAD}{head}\n.visible .entry k({params}) {{ {registers}\n{body}\nret; }}"


def test_an_instruction_keeps_its_line_guard_and_operands():
    module = parse(kernel("@!%p1 ld.global.v2.u32 {%r0, %r1}, [%d2+-8]; // comment"))
    ins = module.functions["k"].body[0]
    assert isinstance(ins, Instruction)
    assert (ins.opcode, ins.line) == ("ld.global.v2.u32", 6)
    assert ins.guard is not None and ins.guard[0].name == "%p1" and ins.guard[1]
    assert [r.name for r in ins.operands[0].items] == ["%r0", "%r1"]
    assert isinstance(ins.operands[1], Addr) and ins.operands[1].offset == -8


def test_each_scope_has_its_own_registers_and_labels():
    body = "mov.u32 t, 1;\n{ .reg .f32 t; mov.f32 t, 0f3F800000; bra L; L: }\n{ .reg .b64 t; mov.u64 t, 2; bra L; L: }"
    items = parse(kernel(".reg .b32 t;" + body)).functions["k"].body
    moves = [i.operands[0] for i in items if isinstance(i, Instruction) and i.base == "mov"]
    assert [r.type for r in moves] == ["b32", "f32", "b64"]
    labels = [i for i in items if isinstance(i, str)]
    targets = [i.operands[0].name for i in items if isinstance(i, Instruction) and i.base == "bra"]
    assert len(set(labels)) == 2 and targets == labels


def test_a_branch_out_of_a_scope_finds_the_outer_label():
    items = parse(kernel("{ bra OUT; }\nOUT:")).functions["k"].body
    assert items[0].operands[0].name == "OUT" and items[1] == "OUT"


def test_a_local_directive_is_not_taken_for_loc():
    module = parse(kernel(".local .align 8 .b8 depot[24];\n.loc 1 7 3\nmov.u64 %d0, depot;", head='.file 1 "k.cu"'))
    fn = module.functions["k"]
    assert [(v.name, v.size, v.align) for v in fn.variables] == [("depot", 24, 8)]
    assert module.locations[fn.body[0].loc].line == 7


def test_line_0_keeps_the_location_before_it():
    body = ".loc 1 0 3\nmov.u32 %r0, 1;\n.loc 1 7 3\nmov.u32 %r0, 2;\n.loc 1 0 3\nmov.u32 %r0, 3;"
    module = parse(kernel(body, head='.file 1 "k.cu"'))
    found = [module.locations[ins.loc] for ins in module.functions["k"].body[:3]]
    assert [(where.file, where.line) for where in found] == [("", 0), ("k.cu", 7), ("k.cu", 7)]


def test_inlined_at_gives_the_chain_of_calls():
    body = """.loc 1 30 1
.loc 1 20 2, function_name $L__info_string0, inlined_at 1 30 1
.loc 2 10 3, function_name $L__info_string1+4, inlined_at 1 20 2
add.u32 %r0, %r0, 1;"""
    module = parse(kernel(body, head='.file 1 "a.cu"') + '\n.file 2 "b.cuh"\n')
    where = module.locations[module.functions["k"].body[0].loc]
    assert (where.file, where.line, where.inlined) == ("b.cuh", 10, (("a.cu", 20), ("a.cu", 30)))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0f3FC00000", (0x3FC00000, "f32")),
        ("-0f3FC00000", (0xBFC00000, "f32")),
        ("0d3FF8000000000000", (0x3FF8 << 48, "f64")),
    ]
    + [("0x1F", (31, "int")), ("-17", (-17, "int")), ("017", (15, "int")), ("0b101", (5, "int")), ("7U", (7, "int"))]
    + [("1.5", (1.5, "dec"))],
)
def test_immediates_are_read_in_every_notation(text, value):
    ins = parse(kernel(f"mov.b32 %r0, {text};")).functions["k"].body[0]
    assert isinstance(ins.operands[1], Imm) and (ins.operands[1].value, ins.operands[1].kind) == value


def test_variables_have_bytes_and_relocations():
    head = """.global .align 4 .u32 n = 7;
.const .align 8 .b8 tab[6] = {1, 2, 255};
.global .align 4 .f32 fs[3] = {0f3F800000, 2.5};
.global .align 8 .u64 ptrs[2] = {generic(tab), fs+4};
.shared .align 16 .b8 sm[32];
.extern .shared .align 64 .b8 dyn[];"""
    code = translate(kernel("mov.u64 %d0, dyn; ld.shared.u32 %r0, [sm+4]; st.shared.u32 [%d0], %r0;", head=head))
    by_name = {v.name: v for v in code.globals}
    assert by_name["n"].init == b"\7\0\0\0" and by_name["tab"].init[:3] == b"\1\2\xff" and by_name["tab"].size == 6
    assert by_name["fs"].init == b"\0\0\x80?\0\0 @"
    assert by_name["ptrs"].relocations == ((0, by_name["tab"].offset), (8, by_name["fs"].offset + 4))
    assert all(v.offset % v.align == 0 for v in code.globals)
    assert code.kernels["k"].shared_static == 64  # the dynamic part follows at its own alignment


def test_parameters_are_laid_out_by_their_alignment():
    params = ".param .u8 a, .param .u64 .ptr .global .align 4 b, .param .align 16 .b8 c[20], .param .f32 d"
    code = translate(kernel("", params)).kernels["k"]
    assert [(p.name, p.type, p.size, p.offset) for p in code.params] == [
        ("a", "u8", 1, 0),
        ("b", "u64", 8, 8),
        ("c", "b8", 20, 16),
        ("d", "f32", 4, 36),
    ]
    assert code.param_bytes == 40


def test_launch_bounds_and_use_of_pdl_are_read():
    text = kernel("griddepcontrol.wait;").replace(") {", ")\n.maxntid 128, 2, 1\n.minnctapersm 2\n{", 1)
    code = translate(text).kernels["k"]
    assert (code.max_threads, code.reqntid, code.has_pdl_wait, code.has_pdl_trigger) == (256, None, True, False)


def test_sites_name_their_source_line():
    body = ".loc 1 5 1\nld.param.u64 %d0, [a];\nld.global.u32 %r0, [%d0];\n.loc 1 9 1\nst.global.u32 [%d0], %r0;"
    code = translate(kernel(body, head='.file 1 "x.cu"')).kernels["k"]
    assert [(s.opcode, s.ptx_line, s.file, s.line) for s in code.sites] == [
        ("ld.global.u32", 8, "x.cu", 5),
        ("st.global.u32", 10, "x.cu", 9),
    ]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("frobnicate.sync.aligned;", "unsupported opcode"),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s64 [%d0], [%r0], 16;",
            "reduction .add.s64 in global",
        ),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%d0], [%r0], 16;",
            "reduction .add.f16 in global",
        ),
        (
            "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.min.u64 [%r0], [%r1], 16,"
            " [%r2];",
            "reduction .min.u64 in shared",
        ),
        (
            "cp.reduce.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.add.u32 [%r0], [%d0], 16, [%r2];",
            "cta",
        ),
        (
            "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.f32 [%r0], %r1, [%r2];",
            ".add.f32",
        ),
        (
            "red.async.relaxed.gpu.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r0], %r1, [%r2];",
            ".cluster is",
        ),
        ("cp.async.bulk.shared::cta.global.bulk_group [%r0], [%d0], 16;", "from .shared::cta to .global"),
        ("cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%d0], [%r0], 16, %r1;", "unsupported modifier .cp_mask"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r0];", "unsupported operands"),
        ("cp.async.bulk.wait_group.read %r0;", "a constant number of groups"),
        ("cp.async.bulk.shared::cta.shared::cta.mbarrier::complete_tx::bytes [%r0], [%r1], 16, [%r2];", ".global"),
        (
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster [%r0], [%r1],"
            " 16, [%r2], %h0;",
            "unsupported modifier .multicast::cluster",
        ),
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r0], [%d1], 16,"
            " [%r2];",
            "a mask of blocks",
        ),
        ("st.async.shared::cta.mbarrier::complete_tx::bytes.b32 [%r0], %r1, [%r2];", ".shared::cluster is expected"),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b16 [%r0], %h1, [%r2];", "is expected"),
        (
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b64 [%r0], {%d0, %d1, %d2, %d3}, [%r2];",
            "too wide",
        ),
        (
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r0], %r1, [%r2];",
            "of 2 element(s) is expected",
        ),
        ("st.async.release.global.b32 [%d0], %r1;", ".shared::cluster is expected"),
        ("mapa.shared::cta.u32 %r0, %r1, 0;", "unsupported modifier .shared::cta"),
        ("mapa.shared::cluster.b32 %r0, %r1, 0;", ".u32 .u64 is expected"),
        ("mapa.shared::cluster.u32 %r0, %r1, 0, 0;", "at most 3 operand(s)"),
        ("getctarank.shared::cluster.u32 %r0, %r1, %r2;", "at most 2 operand(s)"),
        ("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r0], [%d0], 16;", "unsupported operands"),
        ("cp.async.bulk.prefetch.L2.global [%d0];", "2 operands are expected"),
        ("mbarrier.arrive.noComplete.shared.b64 %d0, [%r0];", "expect_tx and .noComplete need one"),
        ("mbarrier.arrive.expect_tx.noComplete.shared.b64 %d0, [%r0], 1;", "unsupported modifier .noComplete"),
        ("mbarrier.arrive.release.cluster.shared::cluster.b64 %d0, [%r0];", "has no result"),
        ("mbarrier.test_wait.parity.shared::cluster.b64 %p0, [%r0], %r1;", "modifier .shared::cluster"),
        ("mbarrier.init.shared::cluster.b64 [%r0], 1;", "unsupported modifier .shared::cluster"),
        ("mbarrier.arrive_drop.noComplete.shared.b64 %d0, [%r0], 1;", "unsupported modifier .noComplete"),
        ("mbarrier.pending_count.shared.b64 %r0, %d0;", "unsupported modifier .shared"),
        ("mbarrier.arrive.expect_tx.shared.b64 %d0, [%r0];", "expect_tx and .noComplete need one"),
        ("mbarrier.test_wait.parity.shared.b64 %p0, [%r0], %r1, %r2;", "too many operands"),
        ("mbarrier.init.shared.b64 [%r0];", "only init takes a count"),
        ("cp.async.mbarrier.arrive.shared::cluster.b64 [%r0];", "unsupported modifier .shared::cluster"),
        ("vadd.u32.u32 %r0, %r1, %r2;", "the type .u32 or .s32"),
        ("vadd.u32.u32.u32 %r0.b0, %r1, %r2;", "a fourth operand"),
        ("vadd.u32.u32.u32.min %r0.b0, %r1, %r2, %r3;", "a second operation (.min) is not allowed"),
        ("vadd.u32.u32.u32 %r0, %r1.b4, %r2;", "unsupported selector .b4"),
        ("vmad.s32.s32.s32 %r0, -%r1, %r2, -%r3;", "the product or c, not both"),
        ("vadd2.s32.s32.s32 %r0, %r1.h40, %r2, %r3;", "unsupported selector .h40"),
        ("vadd4.s32.s32.s32.sat.add %r0, %r1, %r2, %r3;", "unsupported modifier .sat"),
        ("vset4.s32.s32.sat.lt %r0, %r1, %r2, %r3;", "unsupported modifier .sat"),
        ("cp.async.ca.shared.global [%r0], [%d0], 2;", "the size must be 4 or 8 or 16"),
        ("cp.async.cg.shared.global [%r0], [%d0], 8;", "the size must be 16"),
        ("cp.async.cg.shared.global [%r0], [%d0], %r1;", "the size must be 16"),
        ("cp.async.ca.shared.global [%r0], [%d0], 4, %r1, %r2;", "at most one operand"),
        ("cp.async.ca.global.shared [%d0], [%r0], 4, %p0, %p1;", "at most one operand"),
        ("cp.async.ca.shared::cluster.global [%r0], [%d0], 4;", "expected"),
        ("cp.async.cs.shared.global [%r0], [%d0], 4;", "expected"),
        ("cp.async.ca.shared.global [%r0], %d0, 4;", "an address is expected"),
        ("cp.async.wait_group %r0;", "a constant number of groups"),
        ("cp.async.wait_group;", "unsupported operands"),
        ("add.frobnicate.u32 %r0, %r1, %r2;", "unsupported modifier .frobnicate"),
        ("add.u32 %r0, %d1, %nope;", "unknown or unsupported register"),
        ("add.u64 %d0, %r1, %d2;", "narrower"),
        ("add.f32 %r0, %f0;", "unsupported operands"),
        ("ld.tensor.u32 %r0, [%d0];", "unsupported modifier .tensor"),
        ("ld.relaxed.u32 %r0, [%d0];", "expected"),
        ("mul.ftz.f64 %g0, %g1, %g2;", "unsupported modifier"),
        ("setp.lo.s32 %p0, %r0, %r1;", "unsupported comparison"),
        ("cvt.rn.satfinite.e4m3x2.f32 %r0, %f0;", "unsupported operands"),
        ("bra NOWHERE;", "label 'NOWHERE' is not defined"),
        ("call undefined_function;", "not defined"),
        ("mov.u32 %r0, %pm0;", "unknown or unsupported register"),
        ("barrier.cluster.sync;", ".arrive .wait is expected"),
        ("barrier.cluster.arrive.acquire;", "unsupported modifier .acquire"),
        ("barrier.cluster.wait.relaxed;", "unsupported modifier .relaxed"),
        ("barrier.cluster.arrive 0;", "at most 0 operand(s)"),
        ("addc.u32 %r0, %r1, %r2;", "the carry is not set"),
        ("atom.global.add.f16 %h0, [%d0], %h1;", ".noftz"),
        ("atom.local.add.u32 %r0, [%d0], 1;", "unsupported atomic"),
        ("red.acquire.gpu.global.add.u32 [%d0], 1;", "unsupported modifier .acquire"),
        ("ret %r0;", "at most 0 operand(s)"),
        ("ld.global.u32 %r0, [%d0], %r1;", "at most 2 operand(s)"),
        ("red.global.add.u32 [%d0], %r0, %r1;", "at most 2 operand(s)"),
        ("fma.rn.f32 %f0, %f1, %f2, %f3, %f4;", "at most 4 operand(s)"),
    ],
)
def test_unknown_ptx_is_refused_with_its_line(body, reason):
    with pytest.raises(PtxError) as caught:
        translate(kernel("mov.u32 %r7, 0;\n" + body))
    assert caught.value.line == 7 and reason in caught.value.reason
    assert caught.value.text == body.rstrip(";")


def test_text_that_is_not_ptx_is_refused():
    with pytest.raises(PtxError, match="directive"):
        translate("\x7fELF...")
    with pytest.raises(PtxError, match=r"\.target"):
        translate(".version 8.0\n")
    with pytest.raises(PtxError, match="unreadable|';'"):
        translate(HEAD + ".visible .entry k() { mov.u32 ")


@pytest.mark.parametrize(
    "text",
    [
        ".reg .b32 ;;",
        ".",
        "{ }}",
        ".section .debug_str {",
        ".visible .entry ()",
        "@%p0 ;",
        "[%r0;",
    ],
)
def test_arbitrary_text_is_refused_without_a_crash(text):
    with pytest.raises(PtxError):
        translate(HEAD + text)
    with pytest.raises(PtxError):
        translate(kernel(text))


def test_a_raw_module_neither_suspends_nor_has_kernels():
    function = HEAD + ".visible .func f() {{ {} ret; }}"
    for body in ("bar.sync 0;", ".reg .b32 r; mov.u32 r, %tid.x;", "exit;"):
        with pytest.raises(PtxError):
            translate(function.format(body), raw=True)
    with pytest.raises(PtxError, match="must have no kernels"):
        translate(kernel(""), raw=True)


def test_symbols_get_the_given_prefix():
    code = translate(kernel(""), prefix="m7_")
    assert code.kernels["k"].symbol == "m7_k" and 'define i32 @"m7_k"' in code.ir and code.target == "sm_90a"


def test_names_are_resolved_to_variables_and_registers():
    fn = parse(kernel("mov.u64 %d0, a; mov.u64 %d1, %d0;")).functions["k"]
    assert isinstance(fn.body[0].operands[1], Sym) and fn.body[0].operands[1].var is fn.params[0]
    assert isinstance(fn.body[1].operands[1], Reg)
