# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, atomics, calls, branches and suspends of translated PTX."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

pytest.importorskip("llvmlite")
from ptx_harness import Program, pointers  # noqa: E402

from drvfuse.emu import abi  # noqa: E402
from drvfuse.ptx.ir import PtxError  # noqa: E402

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
REGISTERS = ".reg .pred %p<4>; .reg .b16 %h<8>; .reg .b32 %r<12>; .reg .b64 %d<8>; .reg .f32 %f<8>; .reg .f64 %g<4>;"


def program(body: str, head: str = "", raw: bool = False) -> Program:
    """Translate and compile a kernel k(o, a) with this body, in which %d0 is o, %d1 is a and %r0 is %tid.x."""
    return Program(
        f"""{HEAD}{head}
.visible .entry k(.param .u64 o, .param .u64 a) {{ {REGISTERS}
ld.param.u64 %d0, [o]; ld.param.u64 %d1, [a]; mov.u32 %r0, %tid.x;
{body}
ret; }}""",
        raw,
    )


@pytest.mark.parametrize(
    ("load", "dtype"),
    [("u8", "u1"), ("s8", "i1"), ("b8", "u1"), ("u16", "u2"), ("s16", "i2"), ("u32", "u4"), ("s32", "i4")],
)
def test_a_narrow_load_extends_to_its_register(load, dtype, rng):
    a = rng.integers(0, 256, 64, dtype=np.uint8).view(dtype)
    out = np.zeros(1, np.int64)
    p = program(f"ld.global.{load} %d2, [%d1+{a.itemsize}]; st.global.b64 [%d0], %d2;")
    p.run("k", pointers(out, a))
    assert out[0] == a[1]


@pytest.mark.parametrize("type_", ["b8", "b16", "b32", "b64", "f32", "f64"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_vectors_move_every_element(type_, count, rng):
    size = int(type_[1:]) // 8
    if size * count > 32:
        pytest.skip("wider than a vector may be")
    kind = {"f32": "%f", "f64": "%g"}.get(type_) or {1: "%h", 2: "%h", 4: "%r", 8: "%d"}[size]
    base = 4 if kind not in ("%g",) else 0
    names = [f"{kind}{base + i}" for i in range(count)]
    vector = f".v{count}" if count > 1 else ""
    values = "{" + ", ".join(names) + "}" if count > 1 else names[0]
    p = program(f"ld.global{vector}.{type_} {values}, [%d1+32]; st.global{vector}.{type_} [%d0], {values};")
    a, out = rng.integers(0, 256, 128, dtype=np.uint8), np.zeros(64, np.uint8)
    p.run("k", pointers(out, a))
    n = size * count
    assert (out[:n] == a[32 : 32 + n]).all() and not out[n:].any()


def test_a_load_may_overwrite_its_own_address():
    a = np.array([11, 22, 33, 44], np.uint64)
    out = np.zeros(2, np.uint64)
    program("ld.global.v2.b64 {%d1, %d2}, [%d1+8]; st.global.v2.b64 [%d0], {%d1, %d2};").run("k", pointers(out, a))
    assert out.tolist() == [22, 33]


def test_shared_and_local_addresses_convert_to_generic_ones():
    p = program(
        """mov.u64 %d2, sm; add.u64 %d2, %d2, 8; mov.u32 %r1, 77; st.shared.u32 [%d2], %r1;
cvta.shared.u64 %d3, %d2; ld.u32 %r2, [%d3]; cvta.to.shared.u64 %d4, %d3; cvt.u32.u64 %r3, %d4;
ld.shared.u32 %r4, [%r3];
.local .align 8 .b8 lo[8]; mov.u64 %d5, lo; cvta.local.u64 %d6, %d5; st.u32 [%d6+4], %r1; ld.local.u32 %r5, [lo+4];
isspacep.shared %p0, %d3; isspacep.local %p1, %d6; isspacep.global %p2, %d1; selp.u32 %r6, 1, 0, %p0;
@%p1 add.u32 %r6, %r6, 2; @%p2 add.u32 %r6, %r6, 4;
st.global.v4.b32 [%d0], {%r2, %r4, %r5, %r6}; st.global.b32 [%d0+16], %r3;""",
        ".shared .align 8 .b8 pad[24]; .shared .align 16 .b8 sm[32];",
    )
    p2 = p.code.kernels["k"]
    assert p2.shared_static == 32  # only the memory that the kernel names
    out = np.zeros(5, np.uint32)
    p.run("k", pointers(out, out))
    assert out.tolist() == [77, 77, 77, 7, 8]


ATOMICS = {
    "and.b32": ("u4", lambda o, v, w: o & v),
    "or.b64": ("u8", lambda o, v, w: o | v),
    "xor.b32": ("u4", lambda o, v, w: o ^ v),
    "add.u32": ("u4", lambda o, v, w: o + v),
    "add.u64": ("u8", lambda o, v, w: o + v),
    "add.s32": ("i4", lambda o, v, w: o + v),
    "min.s32": ("i4", lambda o, v, w: min(o, v)),
    "max.s64": ("i8", lambda o, v, w: max(o, v)),
    "min.u32": ("u4", lambda o, v, w: min(o, v)),
    "max.u64": ("u8", lambda o, v, w: max(o, v)),
    "inc.u32": ("u4", lambda o, v, w: 0 if o >= v else o + 1),
    "dec.u32": ("u4", lambda o, v, w: v if o == 0 or o > v else o - 1),
    "exch.b32": ("u4", lambda o, v, w: v),
    "exch.b64": ("u8", lambda o, v, w: v),
    "cas.b16": ("u2", lambda o, v, w: w if o == v else o),
    "cas.b32": ("u4", lambda o, v, w: w if o == v else o),
    "cas.b64": ("u8", lambda o, v, w: w if o == v else o),
    "add.f32": ("f4", lambda o, v, w: o + v),
    "add.f64": ("f8", lambda o, v, w: o + v),
    "add.noftz.f16": ("f2", lambda o, v, w: o + v),
}


@pytest.mark.parametrize("space", [".global", ""])
@pytest.mark.parametrize("sign", [1, -1])
def test_atomic_float_additions_in_global_memory_flush_subnormals(space, sign):
    p = program(
        f"ld.global.f32 %f1, [%d1]; atom{space}.add.f32 %f0, [%d0], %f1; st.global.f32 [%d0+4], %f0;"
        f"ld.global.f32 %f1, [%d1+4]; atom{space}.add.f32 %f0, [%d0+8], %f1;"
    )
    tiny, normal = np.float32(sign * 1e-40), np.float32(sign * 1.5)
    out = np.array([tiny, 0, normal], np.float32)
    p.run("k", pointers(out, np.array([tiny, tiny], np.float32)))
    assert out.view(np.uint32).tolist() == np.array([sign * 0.0, tiny, normal], np.float32).view(np.uint32).tolist()


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("modifiers", [".global", "", ".acq_rel.sys.global", ".global.relaxed.gpu"])
def test_an_atomic_returns_the_old_value_and_stores_the_new(name, modifiers, rng):
    dtype, function = ATOMICS[name]
    verb = name.split(".")[0]
    kind = {"f4": "%f", "f8": "%g", "f2": "%h"}.get(dtype) or {"2": "%h", "4": "%r", "8": "%d"}[dtype[1]]
    t = {"f4": "f32", "f8": "f64"}.get(dtype, f"b{8 * int(dtype[1])}")
    k = [f"{kind}{i}" for i in (0, 1, 2, 3)] if kind in ("%f", "%g", "%h") else [f"{kind}{i}" for i in (4, 5, 6, 7)]
    size = int(dtype[1])
    third = f", {k[2]}" if verb == "cas" else ""
    p = program(
        f"ld.global.{t} {k[1]}, [%d1]; ld.global.{t} {k[2]}, [%d1+{size}];"
        f"atom{modifiers}.{name} {k[0]}, [%d0], {k[1]}{third}; st.global.{t} [%d0+{size}], {k[0]};"
    )
    for seed in range(4):
        values = rng.integers(0, 5, 4) if dtype[0] == "u" else rng.integers(-5, 5, 4)
        old, v, w = (np.dtype(dtype).type(x) for x in values[:3])
        if seed == 3 and verb == "cas":
            v = old
        out, a = np.array([old, 0], dtype), np.array([v, w], dtype)
        p.run("k", pointers(out, a))
        assert out[1] == old
        with np.errstate(over="ignore"):
            assert out[0] == np.dtype(dtype).type(function(old, v, w))


def test_vector_and_packed_reductions_round_each_element():
    import ml_dtypes

    p = program(
        """ld.global.v2.f32 {%f0, %f1}, [%d1]; red.global.v2.f32.add [%d0], {%f0, %f1};
ld.global.b32 %r1, [%d1+8]; red.relaxed.sys.global.add.noftz.bf16x2 [%d0+8], %r1;"""
    )
    a = np.zeros(12, np.uint8)
    a[:8].view("f4")[:] = [1.5, -2.25]
    a[8:].view(ml_dtypes.bfloat16)[:] = [3.0, 0.0078125]
    out = np.zeros(12, np.uint8)
    out[:8].view("f4")[:] = [10, 20]
    out[8:].view(ml_dtypes.bfloat16)[:] = [1.0, 4.0]
    p.run("k", pointers(out, a))
    assert out[:8].view("f4").tolist() == [11.5, 17.75]
    assert out[8:].view(ml_dtypes.bfloat16).astype("f4").tolist() == [4.0, 4.0]


def test_a_strong_load_yields_before_it_reads():
    p = program("ld.acquire.sys.global.u32 %r1, [%d1+4]; st.global.u32 [%d0], %r1;")
    out, a = np.zeros(1, np.uint32), np.array([5, 6], np.uint32)
    t = p.thread("k", pointers(out, a))
    assert t.resume() == abi.Status.YIELD
    assert t.header.op_addr == a.ctypes.data + 4 and t.header.op_size == 4
    assert p.code.kernels["k"].sites[t.header.site].opcode == "ld.acquire.sys.global.u32"
    a[1] = 9  # the load happens only after the next resume
    assert t.resume() == abi.Status.EXIT
    assert out[0] == 9 and t.header.op_seen == 9


def test_registers_of_every_kind_survive_a_suspend():
    p = program(
        """ld.global.f32 %f1, [%d1]; ld.global.f64 %g1, [%d1+8]; ld.global.u16 %h1, [%d1+4];
setp.gt.f32 %p1, %f1, 0f00000000;
bar.sync 3, 64; mov.b64 %d5, 1; selp.u32 %r1, 1, 2, %p1;
shfl.sync.bfly.b32 %r2|%p2, %r1, 5, 31, -1; selp.u32 %r3, 1, 2, %p2;
st.global.f32 [%d0], %f1; st.global.u16 [%d0+4], %h1; st.global.f64 [%d0+8], %g1;
st.global.v4.u32 [%d0+16], {%r1, %r2, %r3, %r0};"""
    )
    a = np.zeros(16, np.uint8)
    a[:4].view("f4")[:], a[4:6].view("u2")[:], a[8:].view("f8")[:] = -1.5, 513, 2.75
    out = np.zeros(32, np.uint8)
    t = p.thread("k", pointers(out, a), tid=7)
    assert t.resume() == abi.Status.BARRIER
    assert (t.header.op_a, t.header.op_b, t.header.op_kind) == (3, 64, abi.Barrier.SYNC)
    assert t.resume() == abi.Status.WARPOP
    fields = [getattr(t.header, x) for x in ("op_kind", "op_mask", "op_a", "op_b", "op_c")]
    assert fields == [abi.WarpOp.SHFL_BFLY, 0xFFFFFFFF, 2, 5, 31]
    t.header.op_result = 1234
    t.header.op_pred = 1
    assert t.resume() == abi.Status.EXIT
    assert (out[:16] == a).all() and out[16:].view("u4").tolist() == [2, 1234, 1, 7]


@pytest.mark.parametrize(
    ("instruction", "status", "fields"),
    [
        ("bar.arrive 2, 96;", "BARRIER", {"OP_A": 2, "OP_B": 96, "OP_KIND": abi.Barrier.ARRIVE}),
        ("barrier.cta.sync.aligned 1;", "BARRIER", {"OP_A": 1, "OP_B": 0, "OP_KIND": abi.Barrier.SYNC}),
        ("bar.red.or.pred %p1, 4, %p0;", "BARRIER", {"OP_A": 4, "OP_C": 1, "OP_KIND": abi.Barrier.OR}),
        ("bar.red.and.pred %p1, 4, 64, !%p0;", "BARRIER", {"OP_B": 64, "OP_C": 0, "OP_KIND": abi.Barrier.AND}),
        ("bar.red.popc.u32 %r1, 0, %p0;", "BARRIER", {"OP_A": 0, "OP_C": 1, "OP_KIND": abi.Barrier.POPC}),
        ("bar.warp.sync 15;", "WARPOP", {"OP_KIND": abi.WarpOp.WARP_SYNC, "OP_MASK": 15}),
        ("vote.sync.ballot.b32 %r1, %p0, 7;", "WARPOP", {"OP_KIND": abi.WarpOp.VOTE_BALLOT, "OP_A": 1, "OP_MASK": 7}),
        ("vote.sync.all.pred %p1, !%p0, 7;", "WARPOP", {"OP_KIND": abi.WarpOp.VOTE_ALL, "OP_A": 0}),
        ("match.any.sync.b64 %r1, %d0, 7;", "WARPOP", {"OP_KIND": abi.WarpOp.MATCH_ANY}),
        ("redux.sync.min.s32 %r1, 9, 7;", "WARPOP", {"OP_KIND": abi.WarpOp.REDUX_MIN_S, "OP_A": 9}),
        ("elect.sync %r1|%p1, 255;", "WARPOP", {"OP_KIND": abi.WarpOp.ELECT, "OP_MASK": 255}),
        ("griddepcontrol.wait;", "GDC_WAIT", {}),
        ("nanosleep.u32 300;", "SLEEP", {"OP_A": 300}),
        ("red.global.add.u32 [%d0], 1;", "YIELD", {"OP_SIZE": 4}),
        ("ld.volatile.global.v2.u64 {%d2, %d3}, [%d1];", "YIELD", {"OP_SIZE": 16}),
        ("trap;", "TRAP", {"OP_KIND": abi.Trap.TRAP}),
    ],
)
def test_a_suspend_reports_its_operands_to_the_engine(instruction, status, fields):
    p = program("setp.eq.u32 %p0, %r0, 0;\n" + instruction)
    out = np.zeros(4, np.uint64)
    t = p.thread("k", pointers(out, out))
    assert t.resume() == abi.Status[status]
    assert {f: getattr(t.header, f.lower()) for f in fields} == {k: int(v) for k, v in fields.items()}
    assert p.code.kernels["k"].sites[t.header.site].ptx_line == 8


def test_guards_apply_to_memory_accesses_and_suspends():
    p = program(
        """mul.wide.u32 %d2, %r0, 4; add.s64 %d2, %d2, %d0; setp.lt.u32 %p0, %r0, 3; mov.u32 %r1, 50;
@%p0 ld.global.u32 %r1, [%d1]; @!%p0 st.global.u32 [%d0+64], %r1; @%p0 atom.global.add.u32 %r2, [%d1], 1;
st.global.u32 [%d2], %r1; @%p0 ret; st.global.u32 [%d2], 99;"""
    )
    out, a = np.zeros(32, np.uint32), np.array([7], np.uint32)
    p.run("k", pointers(out, a), threads=5)
    assert out[:6].tolist() == [7, 8, 9, 99, 99, 0] and out[16] == 50 and a[0] == 10


def test_a_false_guard_keeps_the_bits_of_a_float_register():
    p = program(
        """mul.wide.u32 %d2, %r0, 4; add.s64 %d2, %d2, %d0; setp.eq.u32 %p0, %r0, 0; mov.u32 %r1, 0xFFC12345;
mov.b32 %f0, %r1; mov.f32 %f1, 0f3F800000; @%p0 add.f32 %f0, %f1, %f1; st.global.f32 [%d2], %f0;"""
    )
    out = np.zeros(2, np.uint32)
    p.run("k", pointers(out, out), threads=2)
    assert out.tolist() == [0x40000000, 0xFFC12345]


def test_branch_tables_choose_by_index():
    p = program(
        """ts: .branchtargets A, B, C;
mul.wide.u32 %d2, %r0, 4; add.s64 %d2, %d2, %d0; brx.idx %r0, ts;
A: mov.u32 %r1, 10; bra.uni END; B: mov.u32 %r1, 20; C: add.u32 %r1, %r1, 1; END: st.global.u32 [%d2], %r1;"""
    )
    out = np.zeros(3, np.uint32)
    p.run("k", pointers(out, out), threads=3)
    assert out[:2].tolist() == [10, 21]
    beyond = p.thread("k", pointers(out, out), 3)
    assert beyond.resume() == abi.Status.TRAP


@pytest.mark.parametrize(
    "body",
    [
        "stacksave.u64 ;",
        "alloca.u64 %d2;",
        "alloca.u64 %d2, %d3, %d3;",
        "call;",
        "ts: .branchtargets A, B; brx.idx %p0, ts; A: B:",
        "mbarrier.try_wait.shared::cta.b64 %p0, %d2, %d3;",
    ],
)
def test_unsupported_operands_are_refused_with_their_line(body: str) -> None:
    with pytest.raises(PtxError, match="line"):
        program(body)


FUNCTIONS = """.func (.param .b32 r) twice(.param .b32 x) { .reg .b32 %a; ld.param.b32 %a, [x]; add.u32 %a, %a, %a;
 setp0: st.param.b32 [r+0], %a; ret; }
.func (.param .b32 r) fact(.param .b32 x) { .reg .b32 %a<3>; .reg .pred %p; ld.param.b32 %a0, [x];
setp.lt.u32 %p, %a0, 2;
 mov.u32 %a1, 1; @%p bra DONE; sub.u32 %a2, %a0, 1;
 { .param .b32 p0; .param .b32 r0; st.param.b32 [p0], %a2; call (r0), fact, (p0); ld.param.b32 %a1, [r0]; }
 mul.lo.u32 %a1, %a1, %a0; DONE: st.param.b32 [r+0], %a1; ret; }
.func (.param .b32 r) meet(.param .b32 x) { .reg .b32 %a<4>; .local .align 4 .b8 lo[8]; .reg .pred %p;
 ld.param.b32 %a0, [x]; setp.gt.u32 %p, %a0, 100; @%p bra BIG; st.local.u32 [lo+4], %a0; bar.sync 0;
ld.local.u32 %a1, [lo+4];
 { .param .b32 p0; .param .b32 r0; st.param.b32 [p0], %a1; call (r0), twice, (p0); ld.param.b32 %a1, [r0]; }
 st.param.b32 [r], %a1; ret; BIG: st.param.b32 [r], 5; ret; }
"""


def _call(name: str, argument: str, result: str) -> str:
    return (
        f"{{ .param .b32 p0; .param .b32 r0; st.param.b32 [p0+0], {argument}; call.uni (r0), {name}, (p0); "
        f"ld.param.b32 {result}, [r0+0]; }}"
    )


def test_functions_are_called_and_may_be_recursive():
    p = program(
        _call("twice", "21", "%r1") + _call("fact", "6", "%r2") + "st.global.v2.u32 [%d0], {%r1, %r2};", FUNCTIONS
    )
    out = np.zeros(2, np.uint32)
    p.run("k", pointers(out, out))
    assert out.tolist() == [42, 720]


def test_a_function_that_suspends_is_inlined():
    p = program(
        _call("meet", "33", "%r1") + _call("meet", "101", "%r2") + "st.global.v2.u32 [%d0], {%r1, %r2};", FUNCTIONS
    )
    out = np.zeros(2, np.uint32)
    t = p.thread("k", pointers(out, out))
    assert t.resume() == abi.Status.BARRIER
    assert t.resume() == abi.Status.EXIT
    assert out.tolist() == [66, 5]


@pytest.mark.parametrize("guard", ["@%p0", "@!%p0"])
def test_a_guard_applies_to_the_call_of_a_function_that_suspends(guard):
    call = _call("meet", "33", "%r1").replace("call.uni", f"{guard} call.uni")
    p = program("mov.u32 %r1, 7; setp.eq.u32 %p0, %r0, 0;" + call + "st.global.u32 [%d0], %r0;", FUNCTIONS)
    out = np.zeros(1, np.uint32)
    called = [p.thread("k", pointers(out, out), tid).resume() == abi.Status.BARRIER for tid in (0, 1)]
    assert called == [guard == "@%p0", guard != "@%p0"]


def test_a_recursive_function_that_suspends_is_refused():
    recursive = FUNCTIONS.replace("bar.sync 0;", "bar.sync 0;" + _call("meet", "1", "%a2"))
    with pytest.raises(PtxError, match="recursion"):
        program(_call("meet", "33", "%r1"), recursive)


def test_exit_in_a_function_ends_the_thread():
    p = program(
        _call("leave", "1", "%r1") + "st.global.u32 [%d0], 9;", ".func (.param .b32 r) leave(.param .b32 x) { exit; }"
    )
    out = np.zeros(1, np.uint32)
    p.run("k", pointers(out, out))
    assert out[0] == 0


def test_a_failed_assertion_traps_with_its_texts():
    head = """.extern .func __assertfail (.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, .param .b64 c);
.global .align 1 .b8 text[4] = {97, 98, 99, 0};"""
    body = """mov.u64 %d2, text; cvta.global.u64 %d3, %d2;
{ .param .b64 p0; st.param.b64 [p0+0], %d3; .param .b64 p1; st.param.b64 [p1+0], 11; .param .b32 p2;
st.param.b32 [p2+0], 42;
.param .b64 p3; st.param.b64 [p3+0], 13; .param .b64 p4; st.param.b64 [p4+0], 1;
call.uni __assertfail, (p0, p1, p2, p3, p4); }"""
    p = program(body, head)
    out = np.zeros(1, np.uint32)
    t = p.thread("k", pointers(out, out))
    assert t.resume() == abi.Status.TRAP
    assert t.header.op_kind == abi.Trap.ASSERT and t.header.op_a == 42
    assert ctypes.string_at(t.header.op_value) == b"abc" and t.header.op_addr == 11


def test_special_registers_have_their_values():
    names = ["tid.x", "ntid.x", "ctaid.x", "ctaid.y", "nctaid.x", "nctaid.y", "laneid", "lanemask_lt", "lanemask_ge"]
    names += ["clusterid.x", "cluster_nctaid.x", "is_explicit_cluster"]
    body = "".join(f"mov.u32 %r1, %{n}; st.global.u32 [%d0+{4 * i}], %r1;" for i, n in enumerate(names))
    out = np.zeros(12, np.uint32)
    p = program(body)
    t = p.thread("k", pointers(out, out), tid=37)
    assert t.resume() == abi.Status.EXIT
    assert out.tolist() == [37, 64, 2, 1, 3, 2, 5, 31, 0xFFFFFFE0, 2, 1, 0]


def test_functions_of_a_raw_module_are_c_functions():
    ptx = f"""{HEAD}
.global .align 4 .b8 table[8] = {{1, 0, 0, 0, 9}};
.extern .func (.param .b64 r) given(.param .b64 x, .param .b32 y);
.func (.param .align 8 .b8 r[24]) pair(.param .align 8 .b8 x[24]) {{ .reg .b64 %a<3>;
ld.param.v2.u64 {{%a0, %a1}}, [x]; ld.param.u64 %a2, [x+16];
 st.param.v2.b64 [r], {{%a1, %a0}}; st.param.b64 [r+16], %a2; ret; }}
.visible .func (.param .b64 r) f(.param .b64 p, .param .b32 n, .param .b32 x) {{ {REGISTERS} .local .align 8 .b8 lo[16];
 ld.param.u64 %d0, [p]; ld.param.s32 %r0, [n]; ld.param.f32 %f0, [x]; add.f32 %f0, %f0, 0f3F800000; st.f32 [%d0], %f0;
 ld.global.u32 %r1, [table+4]; st.u32 [%d0+4], %r1; atom.add.u32 %r2, [%d0+4], 3;
 mov.u64 %d1, lo; cvta.local.u64 %d2, %d1; st.u64 [%d2+8], 5; ld.local.u64 %d3, [lo+8];
 {{ .param .align 8 .b8 q[24]; .param .align 8 .b8 s[24]; st.param.b64 [q], %d3; st.param.b64 [q+8], 7;
st.param.b64 [q+16], 8;
   call (s), pair, (q); ld.param.b64 %d4, [s]; ld.param.b64 %d5, [s+16]; }}
 mad.lo.u64 %d4, %d4, 100, %d5; cvt.s64.s32 %d6, %r0; add.u64 %d4, %d4, %d6; st.param.b64 [r+0], %d4; ret; }}
"""
    p = Program(ptx, raw=True)
    f = p.function("f", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32)
    out = np.zeros(2, np.uint32)
    x = struct.unpack("<I", struct.pack("<f", 1.5))[0]
    assert f(out.ctypes.data, -9, x) == 708 - 9
    assert out[:1].view("f4")[0] == 2.5 and out[1] == 12


def test_raw_indirect_calls_use_the_prototype():
    ptx = f"""{HEAD}
.visible .func (.param .b32 r) go(.param .b64 f, .param .b64 x) {{ .reg .b64 %d<2>; .reg .b32 %r0;
ld.param.u64 %d0, [f]; ld.param.u64 %d1, [x];
 {{ .param .b64 p0; st.param.b64 [p0], %d1; .param .b32 r0;
   proto: .callprototype (.param .b32 _) _ (.param .b64 _); call (r0), %d0, (p0), proto; ld.param.b32 %r0, [r0]; }}
 st.param.b32 [r], %r0; ret; }}"""
    p = Program(ptx, raw=True)
    callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64)(lambda x: int(x) * 3)
    go = p.function("go", ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64)
    assert go(ctypes.cast(callback, ctypes.c_void_p).value, 14) == 42
