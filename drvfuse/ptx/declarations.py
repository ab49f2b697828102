# SPDX-License-Identifier: Apache-2.0
"""Declarations in PTX: variables and parameters."""

from __future__ import annotations

import math
import re
import struct

from .ir import TYPE_BYTES, Var
from .text import NUMBER, Source, integer

_MOST_ALIGNMENT = 1 << 16
_MOST_BYTES = 1 << 62  # of a variable; what fits is for the memory to say
_MOST_PARAMETER_BYTES = 1 << 16
_POINTEE = re.compile(r"\.ptr\b\s*(?:\.(?:global|const|shared|local)\s*)?(?:\.align\s+\d+\s*)?")
_VARIABLE = re.compile(
    r"(?P<mods>(?:\.(?:extern|visible|weak|common|global|const|shared|local|param)\s*)+)"
    r"(?:\.attribute\s*\([^)]*\)\s*)?(?:\.align\s+(?P<align>\d+)\s*)?(?:\.attribute\s*\([^)]*\)\s*)?"
    r"(?:\.(?P<vec>v[248])\s*)?\.(?P<type>\w+)\s*(?P<name>[\w$%]+)\s*(?P<dims>(?:\[\s*\w*\s*\])*)\s*"
    r"(?:=\s*(?P<init>.*))?\Z",
    re.S,
)
# Types of references to textures and surfaces, and their size in bytes. Variables of these types may be declared, but
# all instructions that use them are refused.
_OPAQUE = dict.fromkeys(("texref", "samplerref", "surfref"), 8)


def parameters(source: Source, text: str, start: int) -> tuple[Var, ...]:
    parts = (re.sub(r"^\.reg", ".param", part.strip()) for part in text.split(","))
    return tuple(variable(source, part, start) for part in parts if part)


def variable(source: Source, text: str, start: int) -> Var:
    m = _VARIABLE.match(_POINTEE.sub("", text.strip()))
    if m is None or m["type"] not in TYPE_BYTES | _OPAQUE:
        raise source.error(start, "unsupported declaration")
    mods = m["mods"].replace(".", " ").split()
    spaces = [x for x in mods if x in ("global", "const", "shared", "local", "param")]
    element = (TYPE_BYTES | _OPAQUE)[m["type"]] * (int(m["vec"][1]) if m["vec"] else 1)
    dims = re.findall(r"\[\s*(\w*)\s*\]", m["dims"])
    count = math.prod(int(d, 0) if d else 0 for d in dims)
    align = int(m["align"] or element)
    if not 1 <= align <= _MOST_ALIGNMENT or align & (align - 1):
        raise source.error(start, f"an alignment of {align}, which is no power of two up to {_MOST_ALIGNMENT}")
    most = _MOST_PARAMETER_BYTES if not spaces or spaces[0] == "param" else _MOST_BYTES
    if element * count > most:
        raise source.error(start, f"a variable of {element * count} bytes, above the limit {most}")
    var = Var(m["name"], spaces[0] if spaces else "param", m["type"], element * count, align)
    var.extern = "extern" in mods
    var.managed = re.match(r"[^=]*\.attribute\s*\(\s*\.managed\b", text) is not None
    var.array = bool(dims)
    var.line = source.line(start)
    if m["init"] and var.type not in _OPAQUE:
        data = bytearray()
        _initial(source, m["init"].strip(), element, m["type"], data, var, start)
        if dims and not dims[0]:
            var.size = len(data)
        var.init = bytes(data)
    return var


def _initial(source: Source, text: str, element: int, kind: str, data: bytearray, var: Var, start: int) -> None:
    for token in re.findall(r'"(?:\\.|[^"\\])*"|[^{},\s][^{},]*', text):
        token = token.strip()
        m = NUMBER.match(token)
        if m:
            sign = -1 if m[1] else 1
            if m[2] or m[3]:
                bits = int(m[2] or m[3], 16) ^ ((1 << (31 if m[2] else 63)) if m[1] else 0)
                data += bits.to_bytes(element, "little")
            else:
                data += ((sign * integer(m[4])) & ((1 << (8 * element)) - 1)).to_bytes(element, "little")
            continue
        m = re.fullmatch(
            r"(?:(0[xX][fF0]+)\s*\(\s*)?(?:generic\s*\(\s*)?([A-Za-z_$%][\w$]*)\s*\)?(?:\s*\+\s*(\d+))?\s*\)?",
            token,
        )
        if m:
            # 0xFF(sym), 0xFF00(sym), ... are the single bytes of an address, beginning with the lowest. Only the lowest
            # gets a relocation, which fills in the whole address.
            if m[1] is None or int(m[1], 16) == 0xFF:
                var.relocations.append((len(data), m[2], int(m[3] or 0)))
            data += bytes(element)
            continue
        if kind in ("f32", "f64"):
            data += struct.pack("<f" if kind == "f32" else "<d", float(token))
            continue
        raise source.error(start, f"unsupported initial value {token!r}")
