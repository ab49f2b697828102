# SPDX-License-Identifier: Apache-2.0
"""Modules linked into one: which definition stays, whose name changes, what does not fit."""

from __future__ import annotations

import pytest

from drvfuse.ptx.ir import PtxError
from drvfuse.ptx.linker import LinkError, Unit, link
from drvfuse.ptx.parser import parse

HEAD = ".version 7.8\n.target sm_80\n.address_size 64\n"


def unit(name: str, body: str, head: str = HEAD) -> Unit:
    return Unit.of(name, head + body)


def linked(*bodies: str) -> str:
    return link([unit(f"unit{i}", body) for i, body in enumerate(bodies)])


def function(name: str, value: int, linkage: str = ".visible ") -> str:
    body = f"{{ .reg .b32 %a; mov.u32 %a, {value}; st.param.b32 [r], %a; ret; }}"
    return f"{linkage}.func (.param .b32 r) {name}() {body}\n"


CALL = ".extern .func (.param .b32 r) value();\n.visible .entry k() { call (_), value, (); ret; }\n"


def test_a_call_of_a_function_in_another_module_is_resolved() -> None:
    for text in (linked(CALL, function("value", 7)), linked(function("value", 7), CALL)):
        assert ".extern" not in text and "mov.u32 %a, 7" in text
        module = parse(text)
        assert set(module.functions) == {"k", "value"} and module.functions["value"].body


def test_undefined_and_doubly_defined_symbols_are_named() -> None:
    with pytest.raises(LinkError, match="Undefined reference to 'value' in 'unit0'"):
        linked(CALL, function("other", 7))
    with pytest.raises(LinkError, match="Multiple definition of 'value' in 'unit2', first defined in 'unit1'"):
        linked(CALL, function("value", 7), function("value", 8))
    with pytest.raises(LinkError, match="Undefined reference to 'a' in 'unit0'\nUndefined reference to 'b' in 'unit1'"):
        linked(".extern .global .u32 a;", ".extern .global .u32 b;")
    with pytest.raises(LinkError, match="'value' is a function in one module and a variable in 'unit1'"):
        linked(function("value", 7), ".extern .global .u32 value;")
    with pytest.raises(LinkError, match="Undefined reference to 'value'"):
        linked(CALL, function("value", 7, ""))


def test_a_strong_definition_replaces_a_weak_one() -> None:
    weak = function("value", 1, ".weak ")
    for bodies in ((CALL, weak, function("value", 7)), (CALL, function("value", 7), weak)):
        text = linked(*bodies)
        assert "mov.u32 %a, 7" in text and "mov.u32 %a, 1" not in text
    text = linked(CALL, weak, function("value", 2, ".weak "))
    assert "mov.u32 %a, 1" in text and "mov.u32 %a, 2" not in text


def test_the_largest_common_variable_is_kept() -> None:
    text = linked(".common .global .b8 c[4];", ".extern .global .b8 c[];", ".common .global .b8 c[16];")
    assert parse(text).variables["c"].size == 16


def test_private_names_of_two_modules_do_not_clash() -> None:
    body = """.global .u32 x = %d;
.func (.param .b32 r) f() { .reg .b32 %%a; .reg .b64 %%p; mov.u64 %%p, x; ld.global.u32 %%a, [%%p];
  st.param.b32 [r], %%a; ret; }
.visible .entry k%d() { .reg .b32 %%x; call (%%x), f, (); bra x; x: ret; }
"""
    text = linked(body % (1, 0), body % (2, 1), ".visible .global .u32 x$2 = 3;\n.visible .global .u32 f = 4;\n")
    module = parse(text)
    assert {v.name: v.init[0] for v in module.variables.values()} == {"x": 1, "x$3": 2, "x$2": 3, "f": 4}
    assert set(module.functions) == {"f$2", "f$3", "k0", "k1"}
    for kernel, callee in (("k0", "f$2"), ("k1", "f$3")):
        (call,) = [i for i in module.functions[kernel].body if getattr(i, "base", "") == "call"]
        assert callee in call.text


def test_variables_come_before_the_functions_that_use_them() -> None:
    use = """.extern .const .align 4 .b8 table[];
.extern .shared .align 16 .b8 dynamic[];
.visible .entry k() { .reg .b64 %p; .reg .b32 %a; mov.u64 %p, table; ld.const.u32 %a, [%p]; ret; }
"""
    table = ".visible .const .align 4 .b8 table[8] = {1, 0, 0, 0, 2};\n.extern .shared .align 16 .b8 dynamic[];"
    module = parse(linked(use, table))
    assert module.variables["table"].size == 8 and module.variables["dynamic"].extern
    (move,) = [i for i in module.functions["k"].body if i.base == "mov"]
    assert move.operands[1].var is module.variables["table"]


def test_builtin_functions_are_declared_once() -> None:
    declared = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n"
    assert linked(declared, declared).count("vprintf") == 1


def test_source_positions_keep_their_own_files() -> None:
    body = '.visible .entry k%d() {\n.loc 1 %d 0\nret;\n}\n.file 1 "%s.cu"\n.file 2 "common.h"\n'
    module = parse(linked(body % (0, 5, "a"), body % (1, 6, "b")))
    places = {
        name: (module.locations[f.body[-1].loc].file, module.locations[f.body[-1].loc].line)
        for name, f in module.functions.items()
    }
    assert places == {"k0": ("a.cu", 5), "k1": ("b.cu", 6)}


def test_the_linked_module_has_the_highest_version_and_target_of_its_parts() -> None:
    heads = [".version 7.0\n.target sm_75\n", ".version 8.3\n.target sm_90a, debug\n", ".version 8.0\n.target sm_90\n"]
    text = link([unit(f"u{i}", f".visible .entry k{i}() {{ ret; }}", head) for i, head in enumerate(heads)])
    module = parse(text)
    assert (module.version, module.target) == ((8, 3), "sm_90a")


def test_comments_sections_and_declarations_are_left_out() -> None:
    text = linked(
        "// .visible .entry no() { ret; }\n.visible .func g();\n.visible .func g() { ret; }\n"
        '.section .debug_str { $L__info: .b8 1\n.b8 2\n}\n.pragma "nounroll";\n'
    )
    assert set(parse(text).functions) == {"g"} and "debug" not in text


@pytest.mark.parametrize("body", ["nonsense", ".visible .entry k() {", ".global .u32 x", ".func ;"])
def test_unreadable_ptx_is_an_error_with_its_line(body: str) -> None:
    with pytest.raises(PtxError) as caught:
        unit("bad", body)
    assert caught.value.line == 4


def test_a_shared_variable_and_dynamic_shared_memory_of_one_name_stay_apart() -> None:
    own = ".shared .align 4 .b8 room[4];\n.visible .entry a() { .reg .b32 %a; mov.u32 %a, room; ret; }\n"
    launch = ".extern .shared .align 16 .b8 room[];\n.visible .entry b() { .reg .b32 %a; mov.u32 %a, room; ret; }\n"
    for texts in ((own, launch), (launch, own)):
        text = linked(*texts)
        assert ".b8 room$2[4]" in text and "mov.u32 %a, room$2;" in text and "mov.u32 %a, room;" in text
