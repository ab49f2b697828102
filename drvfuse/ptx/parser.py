# SPDX-License-Identifier: Apache-2.0
"""PTX text -> `ir.Module`.

The parser makes the names of `{ }` scopes unique (registers, labels, variables), so its users see one flat function. It
does not know what opcodes mean; the translator (`emu.translate`) refuses those that it does not know.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from bisect import bisect_right
from typing import Any

from .ir import (
    SINK,
    TYPE_BYTES,
    Addr,
    Function,
    Imm,
    Instruction,
    Location,
    Module,
    Negated,
    Not,
    Pair,
    Part,
    Prototype,
    PtxError,
    Reg,
    Special,
    Sym,
    Tuple,
    Unread,
    Var,
    Vec,
)

_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.S)
_HEAD = re.compile(
    r"(?:\s|//[^\n]*|/\*.*?\*/)*+\.(version|target|address_size)[ \t]+([\w.]+)(?:[ \t]*,[ \t]*\w+)*", re.S
)
_BODY = re.compile(
    r"\s*(?:(?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)|(?P<brace>[{}])|\.loc\b(?P<loc>[^\n]*)|(?P<stmt>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;))"
)
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([\w$%]+)\s+)?([a-zA-Z][\w.:]*)\s*(.*)", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s](?:[^,]*[^,\s])?")
_NUMBER = re.compile(r"(-?)(?:0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})|(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?)\Z")
_OFFSET = re.compile(r"([\w$%.]+?)\s*([+-])\s*(-?\w+)\Z")
_PART = re.compile(r"(%?[\w$]+)\.([bh][0-7]+)\Z")
_IDENT = re.compile(r"[A-Za-z_$%][\w$]*\Z")
_POINTEE = re.compile(r"\.ptr\b\s*(?:\.(?:global|const|shared|local)\s*)?(?:\.align\s+\d+\s*)?")
_VARIABLE = re.compile(
    r"(?P<mods>(?:\.(?:extern|visible|weak|common|global|const|shared|local|param)\s*)+)"
    r"(?:\.attribute\s*\([^)]*\)\s*)?(?:\.align\s+(?P<align>\d+)\s*)?(?:\.attribute\s*\([^)]*\)\s*)?"
    r"(?:\.(?P<vec>v[248])\s*)?\.(?P<type>\w+)\s*(?P<name>[\w$%]+)\s*(?P<dims>(?:\[\s*\w*\s*\])*)\s*"
    r"(?:=\s*(?P<init>.*))?\Z",
    re.S,
)
_WORD = re.compile(r"[^\s;]")
_DIRECTIVE = re.compile(r"\s*\.(\w+)([^.{;\n]*)")
_SKIMMED = ("call", "griddepcontrol")
_OPAQUE = dict.fromkeys(("texref", "samplerref", "surfref"), 8)  # only instructions that are refused use them
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


def _blank(match: re.Match[str]) -> str:
    text = match.group()
    return text if text[0] == '"' else " " + "\n" * text.count("\n")


def without_comments(ptx: str) -> str:
    """A PTX text without its comments, with the same line numbers."""
    return _COMMENT.sub(_blank, ptx.rstrip("\0"))


class _Scope:
    __slots__ = ("labels", "names", "pending", "tag")

    def __init__(self, tag: str):
        self.tag = tag
        self.names: dict[str, Any] = {}
        self.labels: dict[str, str] = {}
        self.pending: list[tuple[Instruction, int]] = []


class _Parser:
    def __init__(self, ptx: str, bodies: bool):
        self.bodies = bodies
        self.text = without_comments(ptx)
        self.pos = 0
        self.files: dict[int, str] = {}
        self.module = Module((0, 0), "")
        self.loc = 0
        self.loc_index: dict[str, int] = {}
        self.loc_chain: dict[tuple[int, int, int], Location] = {}
        self.scopes: list[_Scope] = []
        self.scope_count = 0

    @functools.cached_property
    def newlines(self) -> list[int]:
        return [m.start() for m in re.finditer("\n", self.text)]

    def line(self, pos: int) -> int:
        return bisect_right(self.newlines, pos - 1) + 1

    def error(self, pos: int, reason: str) -> PtxError:
        end = self.text.find("\n", pos)
        return PtxError(self.line(pos), self.text[pos : end if end >= 0 else None][:200], reason)

    def located(self, error: PtxError) -> PtxError:
        """The error with the source position of the line of PTX that was being read."""
        location = self.module.locations[self.loc]
        if self.loc and location.file != "?":
            error.source = (location.file, location.line)
        return error

    # Module level ---------------------------------------------------------------------------------------------------
    def parse(self) -> Module:
        text = self.text
        self.module.version, self.module.target, self.pos = _head(text)
        if not self.module.target:
            raise PtxError(1, text.strip()[:60], "not PTX: it has no .target directive")
        # Files may be declared after the functions that refer to them.
        if self.bodies:
            self.files = {int(m[1]): m[2] for m in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
        while True:
            found = _WORD.search(text, self.pos)
            if found is None:
                break
            start = self.pos = found.start()
            directive = re.compile(r"\.(\w+)").match(text, start)
            if directive is None:
                raise self.error(start, "a directive is expected here")
            word = directive[1]
            end_line = text.find("\n", start)
            end_line = len(text) if end_line < 0 else end_line
            if word in ("version", "target", "address_size", "file", "loc"):
                self.pos = end_line
            elif word == "section":
                self.pos = text.index("}", start) + 1
            elif word == "pragma":
                self.pos = text.index(";", start) + 1
            else:
                head = re.compile(r"(?:\.(?:visible|extern|weak|common)\s*)*\.(entry|func)\b").match(text, start)
                if head:
                    self.function(start, head)
                else:
                    end = self.statement_end(start)
                    if self.bodies:
                        var = self.variable(text[start:end], start)
                        if var.space not in ("global", "const", "shared"):
                            raise self.error(start, f"unsupported directive at module level: .{word}")
                        self.module.variables[var.name] = var
                    self.pos = end + 1
        return self.module

    def statement_end(self, start: int) -> int:
        end = self.text.find(";", start)
        if end < 0:
            raise self.error(start, "a ';' is missing")
        return end

    def function(self, start: int, head: re.Match[str]) -> None:
        text = self.text
        pos = head.end()
        returns: tuple[Var, ...] = ()
        m = re.compile(r"\s*\(([^()]*)\)").match(text, pos)
        if m:
            returns = self.parameters(m[1], start)
            pos = m.end()
        m = re.compile(r"\s*([\w$%]+)\s*(?:\(([^()]*)\))?").match(text, pos)
        if m is None:
            raise self.error(start, "a function name is expected")
        fn = Function(m[1], head[1] == "entry", ".visible" in head[0] or ".weak" in head[0], self.line(start), returns)
        fn.params = self.parameters(m[2] or "", start)
        pos = m.end()
        while True:
            m = re.compile(r"\s*([;{.])").match(text, pos)
            if m is None:
                raise self.error(pos, "a function body is expected")
            if m[1] != ".":
                break
            d = _DIRECTIVE.match(text, pos)
            if d is None:
                raise self.error(pos, "a directive is expected")
            if d[1] == "pragma":
                pos = text.index(";", pos) + 1
                continue
            fn.directives[d[1]] = tuple(int(x, 0) for x in re.findall(r"\d+", d[2]))
            pos = d.end()
        self.pos = m.end()
        self.loc = 0
        if m[1] == "{" and self.bodies:
            self.body(fn)
        elif m[1] == "{":
            self.skim(fn)
        known = self.module.functions.get(fn.name)
        if known is None or known.body is None:
            self.module.functions[fn.name] = fn

    def parameters(self, text: str, start: int) -> tuple[Var, ...]:
        parts = (re.sub(r"^\.reg", ".param", part.strip()) for part in text.split(","))
        return tuple(self.variable(part, start) for part in parts if part)

    def variable(self, text: str, start: int) -> Var:
        m = _VARIABLE.match(_POINTEE.sub("", text.strip()))
        if m is None or m["type"] not in TYPE_BYTES | _OPAQUE:
            raise self.error(start, "unsupported declaration")
        mods = m["mods"].replace(".", " ").split()
        spaces = [x for x in mods if x in ("global", "const", "shared", "local", "param")]
        element = (TYPE_BYTES | _OPAQUE)[m["type"]] * (int(m["vec"][1]) if m["vec"] else 1)
        dims = re.findall(r"\[\s*(\w*)\s*\]", m["dims"])
        count = math.prod(int(d, 0) if d else 0 for d in dims)
        align = int(m["align"] or element)
        var = Var(m["name"], spaces[0] if spaces else "param", m["type"], element * count, align)
        var.extern = "extern" in mods
        var.managed = re.match(r"[^=]*\.attribute\s*\(\s*\.managed\b", text) is not None
        var.array = bool(dims)
        var.line = self.line(start)
        if m["init"] and var.type not in _OPAQUE:
            data = bytearray()
            self.initial(m["init"].strip(), element, m["type"], data, var, start)
            if dims and not dims[0]:
                var.size = len(data)
            var.init = bytes(data)
        return var

    def initial(self, text: str, element: int, kind: str, data: bytearray, var: Var, start: int) -> None:
        for token in re.findall(r'"(?:\\.|[^"\\])*"|[^{},\s][^{},]*', text):
            token = token.strip()
            m = _NUMBER.match(token)
            if m:
                sign = -1 if m[1] else 1
                if m[2] or m[3]:
                    bits = int(m[2] or m[3], 16) ^ ((1 << (31 if m[2] else 63)) if m[1] else 0)
                    data += bits.to_bytes(element, "little")
                else:
                    data += ((sign * _integer(m[4])) & ((1 << (8 * element)) - 1)).to_bytes(element, "little")
                continue
            m = re.fullmatch(
                r"(?:(0[xX][fF0]+)\s*\(\s*)?(?:generic\s*\(\s*)?([A-Za-z_$%][\w$]*)\s*\)?(?:\s*\+\s*(\d+))?\s*\)?",
                token,
            )
            if m:
                # 0xFF00(sym): one byte of an address a line; the lowest byte carries the whole relocation.
                if m[1] is None or int(m[1], 16) == 0xFF:
                    var.relocations.append((len(data), m[2], int(m[3] or 0)))
                data += bytes(element)
                continue
            if kind in ("f32", "f64"):
                data += struct.pack("<f" if kind == "f32" else "<d", float(token))
                continue
            raise self.error(start, f"unsupported initial value {token!r}")

    # Function bodies ------------------------------------------------------------------------------------------------
    def body(self, fn: Function) -> None:
        text, match, newlines = self.text, _BODY.match, self.newlines
        body: list[Any] = []
        fn.body = body
        scope = _Scope("")
        for v in (*fn.returns, *fn.params):
            scope.names[v.name] = v
        self.scopes = [scope]
        self.operands: dict[str, Any] = {}
        self.fn = fn
        pos = self.pos
        while True:
            m = match(text, pos)
            if m is None:
                raise self.error(pos, "unreadable statement")
            pos = m.end()
            kind = m.lastgroup
            if kind == "stmt":
                start = m.start("stmt")
                stmt = text[start : pos - 1]
                if stmt.startswith("."):
                    self.directive(fn, stmt, start)
                elif stmt.strip():
                    body.append(self.instruction(stmt, bisect_right(newlines, start - 1) + 1, self.loc))
            elif kind == "loc":
                self.loc = self.location(m["loc"])
            elif kind == "label":
                name = m["label"]
                rest = re.compile(r"\s*\.(branchtargets|calltargets|callprototype)\b([^;]*);").match(text, pos)
                if rest:
                    pos = rest.end()
                    self.table(fn, name, rest[1], rest[2], m.start("label"))
                else:
                    unique = f"{name}{self.scopes[-1].tag}"
                    self.scopes[-1].labels[name] = unique
                    body.append(unique)
            elif m["brace"] == "{":
                self.scope_count += 1
                self.scopes.append(_Scope(f"@{self.scope_count}"))
            else:
                closed = self.scopes.pop()
                self.close(closed, fn)
                if not self.scopes:
                    break
                self.operands = {}
        self.pos = pos

    def skim(self, fn: Function) -> None:
        """Skip a body. Only the instructions of `_SKIMMED` are kept, with the names in them."""
        text, match, pos, depth = self.text, _BODY.match, self.pos, 1
        fn.body = []
        while depth:
            m = match(text, pos)
            if m is None:
                raise self.error(pos, "unreadable statement")
            pos = m.end()
            if m.lastgroup == "brace":
                depth += 1 if m["brace"] == "{" else -1
            elif m.lastgroup == "stmt" and any(word in m["stmt"] for word in _SKIMMED):
                found = _INSTRUCTION.match(m["stmt"])
                if found is not None and found[3].split(".", 1)[0] in _SKIMMED:
                    names = tuple(Sym(name, None) for name in re.findall(r"[A-Za-z_$%][\w$]*", found[4]))
                    fn.body.append(Instruction(found[3], names, None, self.line(m.start("stmt")), 0, m["stmt"]))
        self.pos = pos

    def close(self, scope: _Scope, fn: Function) -> None:
        for instruction, index in scope.pending:
            name = instruction.operands[index].name
            if name in scope.labels:
                ops = list(instruction.operands)
                ops[index] = Sym(scope.labels[name], None)
                instruction.operands = tuple(ops)
            elif self.scopes:
                self.scopes[-1].pending.append((instruction, index))
            elif name not in fn.tables:
                raise instruction.error(f"label {name!r} is not defined")
        for name, targets in fn.tables.items():
            fn.tables[name] = tuple(scope.labels.get(t, t) for t in targets)

    def table(self, fn: Function, name: str, kind: str, text: str, start: int) -> None:
        if kind in ("branchtargets", "calltargets"):
            fn.tables[name] = tuple(t.strip() for t in text.split(","))
        else:
            m = re.match(r"\s*(?:\(([^()]*)\))?\s*_\s*(?:\(([^()]*)\))?", text)
            if m is None:
                raise self.error(start, "unreadable .callprototype")
            fn.prototypes[name] = Prototype(self.parameters(m[1] or "", start), self.parameters(m[2] or "", start))

    def directive(self, fn: Function, text: str, start: int) -> None:
        scope = self.scopes[-1]
        word = re.match(r"\.(\w+)", text)[1]  # type: ignore[index]
        if word == "reg":
            m = re.match(r"\.reg\s*(?:\.(v[24])\s*)?\.(\w+)\s+(.*)", text, re.S)
            if m is None or m[1] or m[2] not in TYPE_BYTES:
                raise self.error(start, "unsupported register declaration")
            for name in m[3].split(","):
                name = name.strip()
                many = re.fullmatch(r"([\w$%]+)<(\d+)>", name)
                if many is None and not _IDENT.match(name):
                    raise self.error(start, "unsupported register declaration")
                names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
                for n in names:
                    reg = Reg(n + scope.tag, m[2], len(fn.registers))
                    fn.registers.append(reg)
                    scope.names[n] = reg
            if len(self.scopes) > 1:
                self.operands = {}
        elif word in ("local", "shared", "param", "global", "const"):
            var = self.variable(text, start)
            local_name, var.name = var.name, var.name + scope.tag
            scope.names[local_name] = var
            if var.space in ("local", "param"):
                fn.variables.append(var)
            else:
                self.module.variables[var.name] = var
            self.operands = {}
        elif word != "pragma":
            raise self.error(start, f"unsupported directive .{word}")

    def location(self, text: str) -> int:
        index = self.loc_index.get(text)
        m = re.match(r"\s*(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?", text)
        if m is None:
            return 0
        key = (int(m[1]), int(m[2]), int(m[3]))
        inlined: tuple[tuple[str, int], ...] = ()
        if m[4]:
            # inlined_at names an earlier .loc by its position; that one may be inlined itself.
            caller = self.loc_chain.get((int(m[4]), int(m[5]), int(m[6])))
            here = (self.files.get(int(m[4]), "?"), int(m[5]))
            inlined = (here, *(caller.inlined if caller and len(caller.inlined) < 16 else ()))
        location = Location(self.files.get(key[0], "?"), key[1], inlined)
        self.loc_chain[key] = location
        if index is None or self.module.locations[index] != location:
            index = len(self.module.locations)
            self.module.locations.append(location)
            self.loc_index[text] = index
        return index

    def instruction(self, text: str, line: int, loc: int) -> Instruction:
        m = _INSTRUCTION.match(text)
        if m is None:
            raise PtxError(line, text, "unreadable statement")
        ins = Instruction(m[3], (), None, line, loc, text)
        if m[2]:
            reg = self.operand(m[2], ins)
            if not isinstance(reg, Reg) or reg.type != "pred":
                raise ins.error(f"guard {m[2]!r} is not a predicate register")
            ins.guard = (reg, m[1] == "!")
        rest = m[4]
        if rest:
            cache = self.operands
            parts = _OPERAND.findall(rest)
            ops = []
            for part in parts:
                op = cache.get(part)
                if op is None:
                    op = self.operand(part, ins)
                    cache[part] = op
                ops.append(op)
            ins.operands = tuple(ops)
        if ins.base in ("bra", "brx"):
            self._pend(ins, int(ins.base == "brx"))
        return ins

    def _pend(self, ins: Instruction, index: int) -> None:
        if len(ins.operands) <= index or not isinstance(ins.operands[index], Sym):
            raise ins.error("a label is expected")
        self.scopes[-1].pending.append((ins, index))

    def lookup(self, name: str) -> Any:
        for scope in reversed(self.scopes):
            found = scope.names.get(name)
            if found is not None:
                return found
        return self.module.variables.get(name)

    def operand(self, text: str, ins: Instruction) -> Any:
        text = text.strip()
        first = text[0] if text else ""
        if first == "{":
            return Vec(tuple(self.operand(t, ins) for t in text[1:-1].split(",")))
        if first == "[":
            return self.address(text[1:-1].strip(), ins)
        if first == "(":
            inner = text[1:-1].strip()
            return Tuple(tuple(self.operand(t, ins) for t in inner.split(",")) if inner else ())
        if first == "!":
            return Not(self.operand(text[1:], ins))
        if first == "-" and (_IDENT.match(text[1:]) or _PART.match(text[1:])):
            return Negated(self.operand(text[1:], ins))
        if first.isdigit() or first in "-.":
            return self.number(text, ins)
        if "|" in text:
            a, b = text.split("|")
            return Pair(self.operand(a, ins), self.operand(b, ins))
        if text == "_":
            return SINK
        if text == "WARP_SZ":
            return Imm(32, "int")
        found = self.lookup(text)
        if isinstance(found, Reg):
            return found
        if isinstance(found, Var):
            return Sym(found.name, found)
        if text in SPECIALS:
            return Special(text)
        if _IDENT.match(text):
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
                return Sym(base.name, base.var, base.offset + self.offset(m, ins))
        raise ins.error(f"unsupported operand {text!r}")

    def offset(self, m: re.Match[str], ins: Instruction) -> int:
        value = self.number(m[3], ins).value
        return -value if m[2] == "-" else value

    def address(self, text: str, ins: Instruction) -> Addr | Unread:
        m = _OFFSET.match(text)
        if m:
            return Addr(self.operand(m[1], ins), self.offset(m, ins))
        if "," in text or "{" in text:
            return Unread(text)
        base = self.operand(text, ins)
        if not isinstance(base, (Reg, Sym, Imm)):
            raise ins.error(f"unsupported address [{text}]")
        return Addr(base, 0)

    def number(self, text: str, ins: Instruction) -> Imm:
        m = _NUMBER.match(text)
        if m is None:
            try:
                return Imm(float(text), "dec")
            except ValueError:
                raise ins.error(f"unsupported operand {text!r}") from None
        if m[2]:
            return Imm(int(m[2], 16) ^ (0x8000_0000 if m[1] else 0), "f32")
        if m[3]:
            return Imm(int(m[3], 16) ^ ((1 << 63) if m[1] else 0), "f64")
        value = _integer(m[4])
        return Imm(-value if m[1] else value, "int")


def _integer(text: str) -> int:
    if len(text) > 1 and text[0] == "0" and text[1].isdigit():
        return int(text, 8)
    return int(text, 0)


def _head(ptx: str) -> tuple[tuple[int, int], str, int]:
    """(.version, .target, the offset behind them) of a text; (0, 0) and "" where it does not begin with these."""
    version, target, end = (0, 0), "", 0
    while (found := _HEAD.match(ptx, end)) is not None:
        end = found.end()
        if found[1] == "target":
            target = found[2]
        elif found[1] == "version":
            major, _, minor = found[2].partition(".")
            version = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else version
    return version, target, end


def head(ptx: str) -> tuple[tuple[int, int], str]:
    """(.version, .target) of a PTX text, whose rest is not parsed; (0, 0) and "" where it does not begin with these."""
    return _head(ptx)[:2]


def parse(ptx: str, *, bodies: bool = True) -> Module:
    """Parse one PTX module. Raises `PtxError`.

    Without `bodies` it takes a tenth of the time: there are no variables and no registers, and of the instructions only
    calls and griddepcontrol, whose operands are the names in them. Any PTX is then read, also what is not emulated.
    """
    parser = _Parser(ptx, bodies)
    try:
        return parser.parse()
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise parser.located(parser.error(parser.pos, f"unreadable ({error})")) from error
    except PtxError as error:
        parser.located(error)
        raise
