# SPDX-License-Identifier: Apache-2.0
"""The registers of a function while the function is emitted.

Inside a basic block, a register is an SSA value, in its integer form, its float form or both. Other blocks load the
register from its place in memory, which is in the thread's frame if the register is live at a suspension point, and on
the stack otherwise. A register that a block changes is stored at the end of the block. A NaN that fp32 arithmetic gives
is made canonical only where its bits can be seen: in the integer form, in memory and in other blocks.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from ctypes import sizeof
from dataclasses import dataclass
from typing import Any

from ...ptx.ir import SINK, Function, Imm, Not, Reg
from ..abi import layout, structs
from .flow import bits
from .helpers import Helpers
from .opcode import RefusedError, width


@dataclass(slots=True)
class _Value:
    integer: str | None
    real: str | None
    kind: str  # "f32" or "f64": the type of `real`
    dirty: bool
    raw_nan: bool  # whether `real` is an fp32 result that, if it is a NaN, is not canonical yet


@functools.cache
def storage(type_: str) -> str:
    """The LLVM type of a register's place in memory."""
    return {"pred": "i1", "f32": "float", "f64": "double"}.get(type_) or f"i{width(type_)}"


def f32_constant(pattern: int) -> str:
    if (pattern >> 23) & 0xFF == 0xFF:
        return f"0x{(pattern >> 31) << 63 | 0x7FF << 52 | (pattern & 0x7FFFFF) << 29:016X}"
    return f"0x{struct.unpack('<Q', struct.pack('<d', struct.unpack('<f', struct.pack('<I', pattern))[0]))[0]:016X}"


def signed(value: int, bits_: int) -> int:
    value &= (1 << bits_) - 1
    return value - (1 << bits_) if value >> (bits_ - 1) and bits_ > 1 else value


class Registers:
    """The text that is being emitted for `fn`, and the values of its registers at the end of that text."""

    def __init__(self, fn: Function, helpers: Helpers):
        self.fn, self.helpers = fn, helpers
        self.out: list[str] = []
        self.counter = 0
        self.values: dict[int, _Value] = {}
        self.guard: str | None = None
        self.carry: str | None = None
        self.slots_used: set[int] = set()
        self.slots = self.frame_bytes = sizeof(structs.Thread)
        self.frame_place: dict[int, int] = {}  # register -> offset in the frame

    # Text -----------------------------------------------------------------------------------------------------------
    def op(self, text: str) -> str:
        """Emit an instruction with a result, and return the name of the result."""
        self.counter += 1
        name = f"%x{self.counter}"
        self.out.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        self.out.append("  " + text)

    def label(self) -> str:
        self.counter += 1
        return f"L{self.counter}"

    def start(self, label: str) -> None:
        self.out.append(f"{label}:")

    def call(self, name: str, result: str, *typed: str) -> str:
        """Emit the call of a declared function. Each argument of `typed` is "type value"."""
        return self.op(f"call {result} {name}({', '.join(typed)})")

    def intrinsic(self, name: str, type_: str, *args: str) -> str:
        """Emit the call of an LLVM intrinsic on one type, such as "llvm.umin" on "i32"."""
        suffix = {"float": "f32", "double": "f64"}.get(type_, type_)
        full = self.helpers.declare(f"{name}.{suffix}", type_, *([type_] * len(args)))
        return self.op(f"call {type_} {full}({', '.join(f'{type_} {a}' for a in args)})")

    # Registers ------------------------------------------------------------------------------------------------------
    def _entry(self, reg: Reg) -> _Value:
        value = self.values.get(reg.index)
        if value is None:
            t = storage(reg.type)
            name = self.op(f"load {t}, ptr {self._place(reg.index)}")
            if t in ("float", "double"):
                value = _Value(None, name, "f32" if t == "float" else "f64", False, False)
            else:
                value = _Value(name, None, "", False, False)
            self.values[reg.index] = value
        return value

    def _place(self, index: int) -> str:
        """A pointer to the place of a register in memory."""
        offset = self.frame_place.get(index)
        if offset is not None:
            return self._in_frame(offset)
        self.slots_used.add(index)
        return f"%r{index}"

    def _canonical(self, value: _Value) -> str:
        if value.raw_nan:
            # The select is on integers, as LLVM removes a select between two NaNs.
            nan = self.op(f"fcmp uno float {value.real}, 0.0")
            bits_ = self.op(f"bitcast float {value.real} to i32")
            value.integer = self.op(f"select i1 {nan}, i32 2147483647, i32 {bits_}")
            value.real = self.op(f"bitcast i32 {value.integer} to float")
            value.raw_nan = False
        assert value.real is not None
        return value.real

    def _integer(self, value: _Value) -> str:
        if value.raw_nan:
            self._canonical(value)
        if value.integer is None:
            real = value.real
            types = ("float", "i32") if value.kind == "f32" else ("double", "i64")
            value.integer = self.op(f"bitcast {types[0]} {real} to {types[1]}")
        return value.integer

    def word(self, operand: Any, n: int) -> str:
        """The value of an operand as an `i<n>`. A wider register is truncated."""
        if isinstance(operand, Reg):
            w = width(operand.type)
            if operand.type == "pred":
                raise RefusedError(f"{operand.name} is a predicate, and a register of {n} bits is needed")
            v = self._integer(self._entry(operand))
            if w == n:
                return v
            if w > n:
                return self.op(f"trunc i{w} {v} to i{n}")
            raise RefusedError(f"{operand.name} is narrower than {n} bits")
        if isinstance(operand, Imm):
            if operand.kind == "int":
                return str(signed(operand.value, n))
            if operand.kind == "dec":
                packed = struct.pack("<f" if n == 32 else "<d", operand.value) if n in (32, 64) else None
                if packed is None:
                    raise RefusedError("unsupported floating-point immediate")
                return str(signed(int.from_bytes(packed, "little"), n))
            if n == 64 and operand.kind == "f32":
                real = struct.unpack("<f", struct.pack("<I", operand.value))[0]
                return str(signed(int.from_bytes(struct.pack("<d", real), "little"), 64))
            return str(signed(operand.value, n))
        raise RefusedError("a register or an immediate is expected")

    def real(self, operand: Any, kind: str) -> str:
        """The value of an operand as a float ("f32") or double ("f64")."""
        n = 32 if kind == "f32" else 64
        ll = "float" if kind == "f32" else "double"
        if isinstance(operand, Reg):
            if width(operand.type) != n:
                raise RefusedError(f"{operand.name} is not {n} bits wide")
            value = self._entry(operand)
            if value.real is None:
                value.real = self.op(f"bitcast i{n} {value.integer} to {ll}")
                value.kind = kind
            return value.real
        if isinstance(operand, Imm) and operand.kind != "int":
            pattern = int(self.word(operand, n)) & ((1 << n) - 1)
            return f32_constant(pattern) if kind == "f32" else f"0x{pattern:016X}"
        return self.op(f"bitcast i{n} {self.word(operand, n)} to {ll}")

    def raw_nan(self, operand: Any) -> bool:
        """Whether the float form of an operand may be a NaN that is not canonical yet."""
        return isinstance(operand, Reg) and operand.index in self.values and self.values[operand.index].raw_nan

    def carry_in(self) -> str:
        if self.carry is None:
            raise RefusedError("the carry is not set in this basic block")
        return self.carry

    def pred(self, operand: Any) -> str:
        if isinstance(operand, Not):
            return self.op(f"xor i1 {self.pred(operand.reg)}, true")
        if isinstance(operand, Imm) and operand.kind == "int":
            return "true" if operand.value else "false"
        if isinstance(operand, Reg) and operand.type == "pred":
            return self._entry(operand).integer or "false"
        raise RefusedError("a predicate is expected")

    def set_int(self, dst: Any, value: str, n: int, sign: bool = False) -> None:
        """Write an `i<n>` to a register. For a wider register it is extended."""
        if dst is SINK:
            return
        if not isinstance(dst, Reg):
            raise RefusedError("a destination register is expected")
        w = width(dst.type)
        if w < n or dst.type == "pred":
            raise RefusedError(f"{dst.name} cannot hold {n} bits")
        if w > n:
            value = self.op(f"{'sext' if sign else 'zext'} i{n} {value} to i{w}")
        if self.guard:
            value = self.op(f"select i1 {self.guard}, i{w} {value}, i{w} {self._integer(self._entry(dst))}")
        self.values[dst.index] = _Value(value, None, "", True, False)

    def set_real(self, dst: Any, value: str, kind: str, arithmetic: bool = True) -> None:
        """Write a float or double to a register. With `arithmetic`, an fp32 NaN becomes canonical."""
        if dst is SINK:
            return
        ll = "float" if kind == "f32" else "double"
        if not isinstance(dst, Reg) or width(dst.type) != (32 if kind == "f32" else 64):
            raise RefusedError("a destination register of the operation's width is expected")
        raw = arithmetic and kind == "f32"
        if self.guard:
            new = _Value(None, value, kind, True, raw)
            value = self._canonical(new)
            raw = False
            if self._entry(dst).raw_nan:
                self._canonical(self._entry(dst))
            value = self.op(f"select i1 {self.guard}, {ll} {value}, {ll} {self.real(dst, kind)}")
        self.values[dst.index] = _Value(None, value, kind, True, raw)

    def set_pred(self, dst: Any, value: str) -> None:
        if dst is SINK:
            return
        if not isinstance(dst, Reg) or dst.type != "pred":
            raise RefusedError("a destination predicate is expected")
        if self.guard:
            value = self.op(f"select i1 {self.guard}, i1 {value}, i1 {self.pred(dst)}")
        self.values[dst.index] = _Value(value, None, "", True, False)

    def copy(self, dst: Any, src: Any, n: int) -> None:
        """Move n bits of an operand to a register unchanged. A move between registers of n bits, without a guard, keeps
        the forms of the value: integer, float or both.
        """
        if isinstance(src, Reg) and isinstance(dst, Reg) and not self.guard and width(src.type) == width(dst.type) == n:
            e = self._entry(src)
            self.values[dst.index] = _Value(e.integer, e.real, e.kind, True, e.raw_nan)
        else:
            self.set_int(dst, self.word(src, n), n)

    def _stored(self, reg: Reg) -> tuple[str, str]:
        """(LLVM type, value) of a register in the form that is stored in memory."""
        t = storage(reg.type)
        value = self._entry(reg)
        if t == "float" or t == "double":
            if value.real is None:
                value.real = self.op(f"bitcast i{width(reg.type)} {value.integer} to {t}")
                value.kind = reg.type
            return t, self._canonical(value)
        return t, self._integer(value) if t != "i1" else (value.integer or "false")

    def flush(self, live: int) -> None:
        """Emit, at the end of a block, the stores of the registers `live` that the block has changed."""
        for index, value in list(self.values.items()):
            if value.dirty and live >> index & 1:
                t, v = self._stored(self.fn.registers[index])
                self.do(f"store {t} {v}, ptr {self._place(index)}")

    def clear(self, live: int) -> None:
        """Emit the stores of zeros to the registers `live`, which may be read before they are written."""
        for index in bits(live):
            self.do(f"store {storage(self.fn.registers[index].type)} zeroinitializer, ptr {self._place(index)}")

    # Frame ----------------------------------------------------------------------------------------------------------
    def put(self, place: str | int, typed: str) -> None:
        """Emit a store of "type value" to a member of the frame's header, or to an offset in the frame."""
        self.do(f"store {typed}, ptr {self._in_frame(place)}")

    def get(self, place: str | int, type_: str) -> str:
        """Emit the load of a value that `put` has stored."""
        return self.op(f"load {type_}, ptr {self._in_frame(place)}")

    def _in_frame(self, place: str | int) -> str:
        offset = layout.offset(structs.Thread, place) if isinstance(place, str) else place
        return self.op(f"getelementptr i8, ptr %t, i64 {offset}")

    def place(self, together: Iterable[int]) -> None:
        """Give registers places in the frame. Each element of `together` is a set of registers, as a mask (bit i:
        register i). Registers of a set hold values at the same time, and so need different places.
        """
        sets: dict[int, int] = {}  # register -> mask of the sets that contain the register
        for number, registers in enumerate(together):
            for index in bits(registers):
                sets[index] = sets.get(index, 0) | 1 << number
        places: list[tuple[int, int]] = []  # (offset of a place, mask of the sets that have a register there)
        # The widest registers come first, so that a later register fits into the place of any earlier one.
        for index in sorted(sets, key=lambda i: (-width(self.fn.registers[i].type), i)):
            free = (k for k, (_, taken) in enumerate(places) if not taken & sets[index])
            k = next(free, len(places))
            if k == len(places):
                places.append((self.frame_bytes, 0))
                self.frame_bytes += max(1, width(self.fn.registers[index].type) // 8)
            offset, taken = places[k]
            places[k] = offset, taken | sets[index]
            self.frame_place[index] = offset
        self.frame_bytes = -(-self.frame_bytes // 16) * 16
