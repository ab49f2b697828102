# SPDX-License-Identifier: Apache-2.0
"""Operands of PTX instructions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .ir import SINK, Addr, Imm, Instruction, Negated, Not, Pair, Part, Reg, Special, Sym, Tuple, Unread, Var, Vec
from .text import NUMBER, integer

_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s](?:[^,]*[^,\s])?")
_OFFSET = re.compile(r"([\w$%.]+?)\s*([+-])\s*(-?\w+)\Z")
_PART = re.compile(r"(%?[\w$]+)\.([bh][0-7]+)\Z")
IDENTIFIER = re.compile(r"[A-Za-z_$%][\w$]*\Z")
SPECIALS = frozenset(
    {f"%{n}{d}.{a}" for n in ("", "n") for d in ("tid", "ctaid", "clusterid") for a in "xyz"}
    | {f"%cluster_{n}ctaid.{a}" for n in ("", "n") for a in "xyz"}
    | {f"%envreg{i}" for i in range(32)}
    | {f"%lanemask_{c}" for c in ("eq", "le", "lt", "ge", "gt")}
    | {f"%{n}" for n in ("laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid", "clock", "clock_hi", "clock64")}
    | {f"%globaltimer{part}" for part in ("", "_lo", "_hi")}
    | {f"%{n}" for n in ("dynamic_smem_size", "total_smem_size", "aggr_smem_size", "is_explicit_cluster")}
    | {"%cluster_ctarank", "%cluster_nctarank"}
)


class Operands:
    """Reads the operands of instructions. `lookup` gives the register or variable that has a name, or None."""

    def __init__(self, lookup: Callable[[str], Any]):
        self._lookup = lookup
        self._known: dict[str, Any] = {}  # operands that were read since the last change of a scope, by their text

    def forget(self) -> None:
        """Drop the operands that were read before. Called when the meaning of a name may have changed."""
        self._known = {}

    def read(self, text: str, ins: Instruction) -> tuple[Any, ...]:
        """The operands in `text`, the text of instruction `ins` after its opcode."""
        known = self._known
        operands = []
        for part in _OPERAND.findall(text):
            operand = known.get(part)
            if operand is None:
                operand = known[part] = self.operand(part, ins)
            operands.append(operand)
        return tuple(operands)

    def operand(self, text: str, ins: Instruction) -> Any:
        """Read `text`, one operand of `ins`."""
        text = text.strip()
        first = text[0] if text else ""
        if first == "{":
            return Vec(tuple(self.operand(t, ins) for t in text[1:-1].split(",")))
        if first == "[":
            return self._address(text[1:-1].strip(), ins)
        if first == "(":
            inner = text[1:-1].strip()
            return Tuple(tuple(self.operand(t, ins) for t in inner.split(",")) if inner else ())
        if first == "!":
            return Not(self.operand(text[1:], ins))
        if first == "-" and (IDENTIFIER.match(text[1:]) or _PART.match(text[1:])):
            return Negated(self.operand(text[1:], ins))
        if first.isdigit() or first in "-.":
            return self._number(text, ins)
        if "|" in text:
            a, b = text.split("|")
            return Pair(self.operand(a, ins), self.operand(b, ins))
        if text == "_":
            return SINK
        if text == "WARP_SZ":
            return Imm(32, "int")
        found = self._lookup(text)
        if isinstance(found, Reg):
            return found
        if isinstance(found, Var):
            return Sym(found.name, found)
        if text in SPECIALS:
            return Special(text)
        if IDENTIFIER.match(text):
            if first == "%":
                raise ins.error(f"unknown or unsupported register {text!r}")
            return Sym(text, None)
        m = _PART.match(text)
        if m:
            return Part(self.operand(m[1], ins), m[2])
        m = _OFFSET.match(text)
        if m:
            base = self.operand(m[1], ins)
            if isinstance(base, Sym):
                return Sym(base.name, base.var, base.offset + self._offset(m, ins))
        raise ins.error(f"unsupported operand {text!r}")

    def _offset(self, m: re.Match[str], ins: Instruction) -> int:
        number = self._number(m[3], ins)
        if number.kind != "int" or abs(number.value) >= 1 << 63:
            raise ins.error(f"the offset {m[3]} is no integer of 64 bits")
        return -int(number.value) if m[2] == "-" else int(number.value)

    def _address(self, text: str, ins: Instruction) -> Addr | Unread:
        m = _OFFSET.match(text)
        if m:
            return Addr(self.operand(m[1], ins), self._offset(m, ins))
        if "," in text or "{" in text:
            return Unread(text)
        base = self.operand(text, ins)
        if not isinstance(base, (Reg, Sym, Imm)):
            raise ins.error(f"unsupported address [{text}]")
        return Addr(base, 0)

    def _number(self, text: str, ins: Instruction) -> Imm:
        m = NUMBER.match(text)
        if m is None:
            try:
                return Imm(float(text), "dec")
            except ValueError:
                raise ins.error(f"unsupported operand {text!r}") from None
        if m[2]:
            return Imm(int(m[2], 16) ^ (0x8000_0000 if m[1] else 0), "f32")
        if m[3]:
            return Imm(int(m[3], 16) ^ ((1 << 63) if m[1] else 0), "f64")
        value = integer(m[4])
        return Imm(-value if m[1] else value, "int")
