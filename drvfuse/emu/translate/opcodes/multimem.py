# SPDX-License-Identifier: Apache-2.0
"""Instructions on multicast addresses. They call the runtime, which accesses the memory (`native/multimem.cuh`).

The forms are those that the assembler accepts: single integers, 32, 64 or 128 bits of fp16 or bf16 elements, `.f32`,
`.f64`, and the FP8 types, which need a target such as sm_100a.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ....ptx.ir import Instruction
from ... import abi
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, opcode, width
from .access import ORDERS, announce, elements, elements_flag, scope_flags, seen

_INTEGERS = {
    **dict.fromkeys(("b32", "b64"), ("and", "or", "xor")),
    **dict.fromkeys(("u32", "s32", "u64"), ("add", "min", "max")),
    "s64": ("min", "max"),
}
_HALVES = {"f16": ("v2", "v4", "v8"), "f16x2": ("", "v2", "v4"), "bf16": ("v2", "v4", "v8"), "bf16x2": ("", "v2", "v4")}
_REALS = {"f32": ("", "v2", "v4"), "f64": ("",)}
_FP8 = {
    f"{kind}{pack}": vectors
    for kind in ("e4m3", "e5m2")
    for pack, vectors in (("", ("v4", "v8")), ("x2", ("v2", "v4", "v8")), ("x4", ("", "v2", "v4")))
}
_VECTORS = {**dict.fromkeys(_INTEGERS, ("",)), **_HALVES, **_REALS, **_FP8}


def _operations(verb: str, type_: str, vector: str) -> tuple[str, ...]:
    """The operations that `multimem.red` or `multimem.ld_reduce` (`verb`) can do on elements of a type."""
    if type_ in _INTEGERS:
        return _INTEGERS[type_]
    if type_ in _HALVES and (verb == "ld_reduce" or vector):
        return "add", "min", "max"
    if type_ in _FP8:
        return ("add", "min", "max") if verb == "ld_reduce" else ()
    return ("add",)


def _accumulate(op: Opcode, verb: str, how: str, type_: str) -> abi.Accumulate:
    for name, types, precision in (("f32", _HALVES, abi.Accumulate.F32), ("f16", _FP8, abi.Accumulate.F16)):
        if op.flag(f"acc::{name}"):
            if verb != "ld_reduce" or how != "add" or type_ not in types:
                raise RefusedError(f".acc::{name} is not allowed for multimem.{verb}.{how}.{type_}")
            return precision
    return abi.Accumulate.ELEMENT


def _require_target(g: Emitter, type_: str) -> None:
    target = g.unit.module.target
    number = re.match(r"sm_(\d+)([af]?)", target)
    known = (int(number[1]), number[2]) if number else (0, "")
    if known[0] < 90:
        raise RefusedError(f"multimem needs the target sm_90 or above, and this is {target}")
    if type_ in _FP8 and (known[0] < 100 or not known[1]):
        raise RefusedError(f"multimem on .{type_} needs a target like sm_100a, and this is {target}")


def _order(op: Opcode, verb: str) -> tuple[int, bool]:
    """(flags of rt_multimem, whether the access is strong)."""
    flags = {
        "ld_reduce": 0,
        "st": abi.Access.WRITE,
        "red": abi.Access.WRITE | abi.Access.ATOMIC | abi.Access.REDUCTION,
    }[verb] | abi.Access.MULTIMEM
    orders = ("relaxed", "acquire") if verb == "ld_reduce" else ("relaxed", "release")
    order = op.pick(*orders, default="relaxed") if verb == "red" else op.pick(*orders, "weak", default="weak")
    if order == "weak":
        return flags, False
    flags |= abi.Access.STRONG | int(ORDERS[order]) << abi.ORDER_SHIFT
    return flags | scope_flags(op, "sys" if verb == "red" else None), True


def _words(g: Emitter, items: tuple[object, ...], n: int) -> list[str]:
    """The elements of a vector, of n bits each, as two i64."""
    words = ["0", "0"]
    for i, item in enumerate(items):
        word, (half, shift) = g.word(item, n), divmod(i * n, 64)
        if n < 64:
            word = g.op(f"zext i{n} {word} to i64")
        word = g.op(f"shl i64 {word}, {shift}") if shift else word
        words[half] = g.op(f"or i64 {words[half]}, {word}")
    return words


def _take(g: Emitter, items: tuple[object, ...], type_: str, n: int) -> None:
    """Write the result, which the runtime has stored in op_value and op_seen, to registers."""
    words = g.get("op_value", "i64"), g.get("op_seen", "i64")
    seen(g, words[0], 64)
    for i, item in enumerate(items):
        half, shift = divmod(i * n, 64)
        word = g.op(f"lshr i64 {words[half]}, {shift}") if shift else words[half]
        word = word if n == 64 else g.op(f"trunc i64 {word} to i{n}")
        if type_ in _REALS:
            ll = "float" if type_ == "f32" else "double"
            g.set_real(item, g.op(f"bitcast i{n} {word} to {ll}"), type_, arithmetic=False)
        else:
            g.set_int(item, word, n, type_[0] == "s")


@opcode("multimem.ld_reduce", "multimem.st", "multimem.red")
def multimem(op: Opcode) -> Action:
    verb = op.pick("ld_reduce", "st", "red")
    flags, strong = _order(op, verb)
    op.flag("global")
    vector = op.pick("v2", "v4", "v8", default="")
    how = "" if verb == "st" else op.pick("add", "min", "max", "and", "or", "xor")
    type_ = next((part for part in op.rest if part in _VECTORS), "")
    if not type_:
        raise RefusedError(f"multimem.{verb} has no form with this type")
    op.flag(type_)
    if vector not in _VECTORS[type_]:
        raise RefusedError(f"multimem.{verb} of .{type_} needs {_choices(_VECTORS[type_])}")
    if how and how not in _operations(verb, type_, vector):
        raise RefusedError(f"unsupported multimem.{verb}.{how}.{type_}")
    accumulate = _accumulate(op, verb, how, type_)
    count, n = int(vector[1:] or 1), width(type_)
    size = count * n // 8
    flags |= elements_flag(count, strong) | int(abi.Space.GLOBAL) << abi.SPACE_SHIFT
    reduce = _reduction(how, type_) | int(accumulate) << abi.ACCUMULATE_SHIFT
    return Action(
        _access(verb, type_, count, size, flags, reduce),
        before=announce("global", size) if strong and verb != "st" else None,
        rereads=True,
        pure=False,
    )


def _reduction(how: str, type_: str) -> int:
    """The operation `how` (a `Reduce`) and the element of `type_` (an `Element`), packed into one number."""
    element = re.sub(r"x[24]$", "", type_).upper()
    return int(abi.Reduce[how.upper() or "ADD"]) | int(abi.Element[element]) << abi.ELEMENT_SHIFT


def _access(
    verb: str, type_: str, count: int, size: int, flags: int, reduce: int
) -> Callable[[Emitter, Instruction], None]:
    loads, n = verb == "ld_reduce", size * 8 // count

    def emit(g: Emitter, ins: Instruction) -> None:
        _require_target(g, type_)
        value, place = ins.operands if loads else reversed(ins.operands)
        items = elements(value, count)
        words = ["0", "0"] if loads else _words(g, items, n)
        address = g.address(place, "global")
        site = str(g.site(ins))
        g.leave_if(g.runtime("rt_multimem", "%t", address, str(size), str(flags), str(reduce), *words, site))
        if loads:
            _take(g, items, type_, n)

    return emit


def _choices(vectors: tuple[str, ...]) -> str:
    return " or ".join(f".{vector}" if vector else "no vector" for vector in vectors)
