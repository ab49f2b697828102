# SPDX-License-Identifier: Apache-2.0
"""Facts about kernels, which are the same whether the bodies of functions are parsed or not."""

from __future__ import annotations

import pytest

from drvfuse.compiler.nvrtc import compile_source
from drvfuse.ptx.facts import KernelInfo, Param, kernels
from drvfuse.ptx.ir import PtxError
from drvfuse.ptx.parser import parse
from drvfuse.ptx.text import head

HEAD = ".version 8.8\n.target sm_90a, debug\n.address_size 64\n"

PTX = """
.version 8.8
.target sm_90
.func (.param .b32 out) helper(.param .b64 p);
.func (.param .b32 out) helper(.param .b64 p)
{
    griddepcontrol.wait;
    ret;
}
.visible .entry _Z1kPf(
    .param .u64 .ptr .global .align 16 _Z1kPf_param_0, // a { brace
    .param .align 64 .b8 _Z1kPf_param_1[128],
    .param .f64 _Z1kPf_param_2
)
.reqntid 32, 2, 1
{
    { call.uni (out), helper, (p); }
    griddepcontrol.launch_dependents;
}
.visible .entry empty()
{ ret; }
"""


def test_facts_of_a_kernel_are_read_from_its_ptx() -> None:
    found = kernels(parse(PTX), {"k(float*)": "_Z1kPf"})
    assert found == kernels(parse(PTX, bodies=False), {"k(float*)": "_Z1kPf"})
    assert set(found) == {"_Z1kPf", "k(float*)", "empty"}
    info = found["k(float*)"]
    assert info.params == (Param("int", 8, 0), Param("bytes", 128, 64), Param("float", 8, 192))
    assert info.param_bytes == 200 and info.max_threads == 64
    assert info.has_pdl_wait and info.has_pdl_trigger
    empty = found["empty"]
    assert empty.params == () and not empty.has_pdl_wait and empty.max_threads is None


def both(ptx: str) -> dict[str, KernelInfo]:
    found = kernels(parse(ptx), {})
    assert found == kernels(parse(ptx, bodies=False), {})
    return found


def test_pdl_instructions_count_if_the_kernel_reaches_them() -> None:
    """Instructions count in nested calls, scopes and under predicates, but not in comments, names or other kernels."""
    functions = """
.func inner() { .reg .pred %p<2>; { @%p1 griddepcontrol.wait; } ret; }
.func recursive() { call.uni recursive, (); call inner, (); ret; }
"""
    entries = {
        "calls": "call.uni recursive, ();",
        "triggers": "griddepcontrol.launch_dependents; /* griddepcontrol.wait; */",
        "neither": "/* griddepcontrol.wait; */ .reg .b32 griddepcontrol; mov.u32 griddepcontrol, 1;",
    }
    found = both(
        HEAD + functions + "".join(f".visible .entry {n}() {{ {body} ret; }}\n" for n, body in entries.items())
    )
    assert {name: (k.has_pdl_wait, k.has_pdl_trigger) for name, k in found.items()} == {
        "calls": (True, False),
        "triggers": (False, True),
        "neither": (False, False),
    }


def test_a_declaration_without_a_body_is_not_a_kernel() -> None:
    assert set(both(HEAD + ".extern .entry far(.param .u64 p);\n.visible .entry near() { ret; }")) == {"near"}


def test_facts_of_compiled_code_need_no_bodies() -> None:
    source = """
struct Pair { int a; double b; };
__device__ __noinline__ void wait() { asm volatile("griddepcontrol.wait;"); }
template <class T> __global__ void __launch_bounds__(96, 2) k(T* p, Pair pair, half_t h) { wait(); *p = pair.b; }
extern "C" __global__ void plain(float x, float* p) { *p = x; }
"""
    image = compile_source(source.replace("half_t", "short"), name="k.cu", arch="sm_90", names=["k<int>"], cubin=False)
    found = both(image.ptx)
    assert found["plain"].params == (Param("float", 4, 0), Param("int", 8, 8)) and found["plain"].max_threads is None
    (other,) = (info for name, info in found.items() if name != "plain")
    assert other.params == (Param("int", 8, 0), Param("bytes", 16, 8), Param("int", 2, 24))
    assert other.max_threads == 96 and other.has_pdl_wait and not other.has_pdl_trigger


def test_without_bodies_ptx_that_cannot_be_emulated_is_read() -> None:
    text = HEAD + ".global .texref t;\n.visible .entry k(.param .u64 p) { .reg .v2 .f32 %v; frob [%v+]; ret; }"
    with pytest.raises(PtxError):
        parse(text)
    assert kernels(parse(text, bodies=False), {})["k"].params == (Param("int", 8, 0),)


@pytest.mark.parametrize(
    "text", ["hello", "", ".version 8.0\n.entry k() {}", HEAD + ".entry k(", HEAD + ".entry k() { "]
)
def test_without_bodies_text_that_is_not_ptx_is_refused(text: str) -> None:
    with pytest.raises(PtxError):
        parse(text, bodies=False)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (HEAD, ((8, 8), "sm_90a")),
        ("// a comment\n/* .version 1.0\n */ .version 7.0\n// .target sm_10\n.target sm_80", ((7, 0), "sm_80")),
        (".target sm_90\n.version 8.1\n.entry k() { ret; }", ((8, 1), "sm_90")),
        (".target sm_90\n", ((0, 0), "sm_90")),
        ("some text\n.version 8.0\n.target sm_90", ((0, 0), "")),
        ("", ((0, 0), "")),
        ("/* " + "// " * 10_000, ((0, 0), "")),
    ],
)
def test_the_head_of_a_text_is_its_version_and_target(text: str, found: object) -> None:
    assert head(text) == found


def test_an_error_names_the_source_of_its_line() -> None:
    text = (
        HEAD
        + """.file 1 "a.cu"
.visible .entry k() {
.loc 1 30 1
bar.sync 0;
.loc 1 31 1
%d1 nonsense;
ret; }"""
    )
    with pytest.raises(PtxError) as caught:
        parse(text)
    assert caught.value.line == 9 and caught.value.source == ("a.cu", 31)
    with pytest.raises(PtxError) as caught:
        parse(HEAD + ".visible .entry k() { %d1 nonsense; }")
    assert caught.value.source is None
