# SPDX-License-Identifier: Apache-2.0
"""Which forms of multimem are translated: those that the assembler of CUDA 12.9 takes for sm_90a and sm_100a."""

from __future__ import annotations

import itertools

import pytest

from drvfuse.emu.translate.module import translate
from drvfuse.ptx.ir import PtxError

REGISTERS = {
    **dict.fromkeys(("b32", "u32", "s32", "f16x2", "bf16x2", "e4m3x4", "e5m2x4"), "b32"),
    **dict.fromkeys(("b64", "u64", "s64"), "b64"),
    **dict.fromkeys(("f16", "bf16", "e4m3x2", "e5m2x2"), "b16"),
    **dict.fromkeys(("e4m3", "e5m2"), "b8"),
    "f32": "f32",
    "f64": "f64",
}
OPERATIONS = ("add", "min", "max", "and", "or", "xor")
FP8 = ("e4m3", "e5m2")


def accepted(verb: str, how: str, precision: str, vector: str, type_: str, arch: str) -> bool:
    """Whether ptxas accepts a form of a multimem instruction."""
    base, pack = (type_[:-2], type_[-2:]) if type_[-2:] in ("x2", "x4") else (type_, "")
    least = "add", "min", "max"
    if type_[0] in "bus" and base != "bf16":
        hows = {"b32": OPERATIONS[3:], "b64": OPERATIONS[3:], "s64": least[1:]}.get(type_, least)
        return not vector and not precision and (verb == "st" or how in hows)
    if base in FP8:
        vectors = {"": ("v4", "v8"), "x2": ("v2", "v4", "v8"), "x4": ("", "v2", "v4")}[pack]
        if arch != "sm_100a" or vector not in vectors or verb == "red":
            return False
        return verb == "st" or (how in least and precision in ("", "acc::f16") and (how == "add" or not precision))
    if base in ("f16", "bf16"):
        if vector not in (("", "v2", "v4") if pack else ("v2", "v4", "v8")):
            return False
        if verb == "red":
            return how == "add" or (how in least and bool(vector))
        return verb == "st" or (how in least and precision in (("", "acc::f32") if how == "add" else ("",)))
    vectors = ("", "v2", "v4") if type_ == "f32" else ("",)
    return vector in vectors and not precision and (verb == "st" or how == "add")


def module(verb: str, parts: str, vector: str, type_: str, arch: str) -> str:
    count = int(vector[1:] or 1)
    value = ", ".join(f"%v{i}" for i in range(count))
    value = f"{{{value}}}" if vector else value
    operands = f"{value}, [%a]" if verb == "ld_reduce" else f"[%a], {value}"
    return f""".version 8.7
.target {arch}
.address_size 64
.visible .entry k(.param .u64 p) {{
  .reg .b64 %a;
  .reg .{REGISTERS[type_]} %v<8>;
  ld.param.u64 %a, [p];
  multimem.{verb}{parts} {operands};
  ret;
}}"""


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_multimem_is_translated_in_exactly_the_forms_that_ptxas_accepts(arch: str) -> None:
    count = 0
    for type_, vector, verb in itertools.product(REGISTERS, ("", "v2", "v4", "v8"), ("ld_reduce", "red", "st")):
        precisions = ("", "acc::f32", "acc::f16") if verb == "ld_reduce" else ("",)
        for how, precision in itertools.product(OPERATIONS if verb != "st" else ("",), precisions):
            parts = "".join(f".{part}" for part in (how, precision, vector, type_) if part)
            expected = accepted(verb, how, precision, vector, type_, arch)
            try:
                translate(module(verb, parts, vector, type_, arch))
                found = True
            except PtxError:
                found = False
            assert found == expected, f"multimem.{verb}{parts} for {arch}"
            count += found
    assert count == (144 if arch == "sm_90a" else 224)


@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu", "sys"])
@pytest.mark.parametrize(
    ("verb", "orders"),
    [("ld_reduce.add", ("relaxed", "acquire")), ("st", ("relaxed", "release")), ("red.add", ("relaxed", "release"))],
)
def test_every_order_and_scope_is_translated(verb: str, orders: tuple[str, ...], scope: str) -> None:
    name, _, how = verb.partition(".")
    for order in orders:
        for space in ("", ".global"):
            parts = f".{order}.{scope}{space}{f'.{how}' if how else ''}.u32"
            translate(module(name, parts, "", "u32", "sm_90a"))


@pytest.mark.parametrize(
    ("verb", "parts", "why"),
    [
        ("ld_reduce", ".release.sys.add.u32", "unsupported modifier .release"),
        ("st", ".acquire.sys.u32", "unsupported modifier .acquire"),
        ("red", ".weak.add.u32", "unsupported modifier .weak"),
        ("ld_reduce", ".weak.sys.add.u32", "unsupported modifier .sys"),
        ("ld_reduce", ".relaxed.add.u32", "one of .cta"),
        ("ld_reduce", ".shared.add.u32", "unsupported modifier .shared"),
        ("ld_reduce", ".u32", "one of .add"),
        ("ld_reduce", ".add.u16", "no form with this type"),
        ("ld_reduce", ".add.acc::f32.f32", "acc::f32 is not allowed for"),
        ("st", ".v2.u32", "needs no vector"),
    ],
)
def test_forms_that_do_not_exist_are_refused_with_the_reason(verb: str, parts: str, why: str) -> None:
    vector = "v2" if ".v2" in parts else ""
    with pytest.raises(PtxError, match=why):
        translate(module(verb, parts, vector, "f32" if parts.endswith("f32") else "u32", "sm_90a"))


def test_targets_that_lack_a_form_are_named() -> None:
    with pytest.raises(PtxError, match="sm_90 or above, and this is sm_80"):
        translate(module("st", ".u32", "", "u32", "sm_80"))
    for target in ("sm_90a", "sm_100"):
        with pytest.raises(PtxError, match=f"e4m3x4 needs a target like sm_100a, and this is {target}:"):
            translate(module("ld_reduce", ".add.acc::f16.e4m3x4", "", "e4m3x4", target))
    for target in ("sm_100f", "sm_120a"):
        translate(module("ld_reduce", ".add.acc::f16.e4m3x4", "", "e4m3x4", target))
