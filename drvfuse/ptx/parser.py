# SPDX-License-Identifier: Apache-2.0
"""The parser of PTX: from text to `ir.Module`.

It makes the names in `{ }` scopes unique (registers, labels, variables), so that a function has one list of names. It
does not interpret opcodes; the translator (`emu.translate`) refuses opcodes that it does not support.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from typing import Any

from .declarations import parameters, variable
from .ir import TYPE_BYTES, Function, Instruction, Module, Prototype, PtxError, Reg, Sym, Var
from .locations import Locations
from .operands import IDENTIFIER, Operands
from .text import Source, skip_head

_BODY = re.compile(
    r"\s*(?:(?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)|(?P<brace>[{}])|\.loc\b(?P<loc>[^\n]*)|(?P<stmt>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;))"
)
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([\w$%]+)\s+)?([a-zA-Z][\w.:]*)\s*(.*)", re.S)
_WORD = re.compile(r"[^\s;]")
_DIRECTIVE = re.compile(r"\s*\.(\w+)([^.{;\n]*)")
_SKIMMED = ("call", "griddepcontrol")
_MOST_REGISTERS = 1 << 18  # of a function, far above what compilers declare; each takes memory and time
_MOST_SCOPES = 1000  # of braces inside one another
_MOST_THREADS = 1024
_MOST_KERNEL_BYTES = 32764  # of the parameters of a kernel


class _Scope:
    """The names that are declared between braces. `tag` is appended to the names of an inner scope."""

    __slots__ = ("labels", "names", "pending", "tag")

    def __init__(self, tag: str):
        self.tag = tag
        self.names: dict[str, Any] = {}
        self.labels: dict[str, str] = {}
        self.pending: list[tuple[Instruction, int]] = []


class _Parser:
    """One pass over a module; `pos` is the position in the text."""

    def __init__(self, source: Source, bodies: bool):
        self.bodies = bodies
        self.source, self.text = source, source.text
        self.error, self.line = source.error, source.line
        self.pos = 0
        self.module = Module((0, 0), "")
        self.locations = Locations(self.module.locations)
        self.operands = Operands(self.lookup)
        self.scopes: list[_Scope] = []
        self.scope_count = 0

    # Module level ---------------------------------------------------------------------------------------------------
    def parse(self) -> Module:
        text = self.text
        self.module.version, self.module.target, self.pos = skip_head(text)
        if not self.module.target:
            raise PtxError(1, text.strip()[:60], "not PTX: it has no .target directive")
        if self.bodies:
            self.locations.read_files(text)  # first, since functions may refer to files that are declared after them
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
                        var = variable(self.source, text[start:end], start)
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
            returns = parameters(self.source, m[1], start)
            pos = m.end()
        m = re.compile(r"\s*([\w$%]+)\s*(?:\(([^()]*)\))?").match(text, pos)
        if m is None:
            raise self.error(start, "a function name is expected")
        fn = Function(m[1], head[1] == "entry", ".visible" in head[0] or ".weak" in head[0], self.line(start), returns)
        fn.params = parameters(self.source, m[2] or "", start)
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
            fn.directives[d[1]] = tuple(int(x) for x in re.findall(r"\d+", d[2]))
            if max(fn.directives[d[1]], default=0) >= 1 << 31:
                raise self.error(pos, f"a number in .{d[1]} is above 2147483647")
            pos = d.end()
        self.check_limits(fn, start)
        self.pos = m.end()
        self.locations.current = 0
        if m[1] == "{" and self.bodies:
            self.body(fn)
        elif m[1] == "{":
            self.skim(fn)
        known = self.module.functions.get(fn.name)
        if known is None or known.body is None:
            self.module.functions[fn.name] = fn

    def check_limits(self, fn: Function, start: int) -> None:
        """Raise PtxError if the parameters or the blocks of a kernel are larger than a kernel's can be."""
        size = fn.offsets()[1]
        if fn.kernel and size > _MOST_KERNEL_BYTES:
            raise self.error(start, f"the parameters have {size} bytes, above the limit {_MOST_KERNEL_BYTES}")
        for name in ("maxntid", "reqntid"):
            given = fn.directives.get(name, (1,))
            if not given or len(given) > 3 or not 1 <= math.prod(given) <= _MOST_THREADS:
                text = ", ".join(map(str, given))
                raise self.error(start, f".{name} {text} is no number of threads from 1 to {_MOST_THREADS}")

    # Function bodies ------------------------------------------------------------------------------------------------
    def body(self, fn: Function) -> None:
        text, match, newlines, locations = self.text, _BODY.match, self.source.newlines, self.locations
        body: list[Any] = []
        fn.body = body
        scope = _Scope("")
        for v in (*fn.returns, *fn.params):
            scope.names[v.name] = v
        self.scopes = [scope]
        self.operands.forget()
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
                    body.append(self.instruction(stmt, bisect_right(newlines, start - 1) + 1, locations.current))
            elif kind == "loc":
                locations.enter(m["loc"])
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
                if len(self.scopes) > _MOST_SCOPES:
                    raise self.error(pos, f"more than {_MOST_SCOPES} scopes inside one another")
                self.scopes.append(_Scope(f"@{self.scope_count}"))
            else:
                closed = self.scopes.pop()
                self.close(closed, fn)
                if not self.scopes:
                    break
                self.operands.forget()
        self.pos = pos

    def skim(self, fn: Function) -> None:
        """Skip a body. Only the instructions of `_SKIMMED` are kept, with the names in their text as operands."""
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
            fn.prototypes[name] = Prototype(
                parameters(self.source, m[1] or "", start), parameters(self.source, m[2] or "", start)
            )

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
                if many is None and not IDENTIFIER.match(name):
                    raise self.error(start, "unsupported register declaration")
                count = int(many[2]) if many else 1
                if len(fn.registers) + count > _MOST_REGISTERS:
                    raise self.error(start, f"the function has more than {_MOST_REGISTERS} registers")
                names = [f"{many[1]}{i}" for i in range(count)] if many else [name]
                for n in names:
                    reg = Reg(n + scope.tag, m[2], len(fn.registers))
                    fn.registers.append(reg)
                    scope.names[n] = reg
            if len(self.scopes) > 1:
                self.operands.forget()
        elif word in ("local", "shared", "param", "global", "const"):
            var = variable(self.source, text, start)
            local_name, var.name = var.name, var.name + scope.tag
            scope.names[local_name] = var
            if var.space in ("local", "param"):
                fn.variables.append(var)
            else:
                self.module.variables[var.name] = var
            self.operands.forget()
        elif word != "pragma":
            raise self.error(start, f"unsupported directive .{word}")

    def instruction(self, text: str, line: int, loc: int) -> Instruction:
        m = _INSTRUCTION.match(text)
        if m is None:
            raise PtxError(line, text, "unreadable statement")
        ins = Instruction(m[3], (), None, line, loc, text)
        if m[2]:
            reg = self.operands.operand(m[2], ins)
            if not isinstance(reg, Reg) or reg.type != "pred":
                raise ins.error(f"guard {m[2]!r} is not a predicate register")
            ins.guard = (reg, m[1] == "!")
        if m[4]:
            ins.operands = self.operands.read(m[4], ins)
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


def parse(ptx: str, *, bodies: bool = True) -> Module:
    """Parse one PTX module. Raises `PtxError`.

    Without `bodies` parsing takes a tenth of the time. The result then has no variables and no registers, and of the
    instructions only call and griddepcontrol; their operands are the names in their text. Without bodies any PTX can be
    parsed, also with instructions that are not emulated.
    """
    parser = _Parser(Source(ptx), bodies)
    try:
        return parser.parse()
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise parser.locations.add_to(parser.error(parser.pos, f"unreadable ({error})")) from error
    except PtxError as error:
        parser.locations.add_to(error)
        raise
