# SPDX-License-Identifier: Apache-2.0
"""Translates a PTX module to LLVM IR text. Lays out parameters, variables and shared memory, emits the functions, and
gives numbers to the instructions that reports may name (sites).

Other packages use only the function `translate`. The modules in OPCODE_MODULES register the emitters of their opcodes
when they are imported; `emitter.Emitter` emits one function.
"""

from __future__ import annotations

import re

from ...ptx.ir import Function, Instruction, Location, Module, NotEmulated, PtxError, Sym, Var
from ...ptx.parser import parse
from ..abi import layout, structs
from . import indirect, stack
from .code import GlobalVar, KernelCode, Param, Site, Translated
from .emitter import EXITED, Emitter
from .helpers import Helpers
from .inline import Inliner, callee_of, variables_of
from .opcode import RefusedError, decode
from .opcodes import (
    addresses,
    approximate,
    atomics,
    bits,
    clusters,
    control,
    convert,
    copies,
    fences,
    floating,
    integer,
    matrix,
    matrix_memory,
    mbarrier,
    memory,
    multimem,
    select,
    video,
)
from .operands import Operands
from .raw import emit_module, symbol

OPCODE_MODULES = (
    *(addresses, approximate, atomics, bits, clusters, control, convert, copies, fences),
    *(floating, integer, matrix, matrix_memory, mbarrier, memory, multimem, select, video),
)


def _up(value: int, align: int) -> int:
    return -(-value // align) * align


def _params(fn: Function) -> tuple[tuple[Param, ...], int]:
    offsets, size = fn.offsets()
    placed = zip(fn.params, offsets, strict=True)
    return tuple(Param(v.name, v.type, v.size, v.align, offset) for v, offset in placed), size


def _shape(fn: Function, directive: str) -> tuple[int, int, int] | None:
    """The three dimensions that a directive gives. Dimensions that it leaves out are 1."""
    given = fn.directives.get(directive)
    return (*given, 1, 1)[:3] if given else None  # type: ignore[return-value]


def _prologue() -> list[str]:
    """The lines at the entry of a kernel or a device function, which load the addresses that never change."""
    lines = []
    for name, type_, base, structure, member in (
        ("block", "ptr", "t", structs.Thread, "block"),
        ("launch", "ptr", "t", structs.Thread, "launch"),
        ("shared", "i64", "block", structs.Block, "shared_base"),
        # 32-bit addresses in shared memory are relative to %window.
        ("window", "i64", "block", structs.Block, "cluster_shared_base"),
        ("params", "i64", "launch", structs.Launch, "params"),
        ("globals", "i64", "launch", structs.Launch, "globals"),
        ("local", "i64", "t", structs.Thread, "local_base"),
    ):
        lines.append(f"%{name}.p = getelementptr i8, ptr %{base}, i64 {layout.offset(structure, member)}")
        lines.append(f"%{name} = load {type_}, ptr %{name}.p, !invariant.load !0")
    return lines


class Unit:
    """A module that is being translated, with all that its functions share."""

    def __init__(self, module: Module, raw: bool, prefix: str, functions: dict[str, int]):
        self.module, self.raw, self.prefix = module, raw, prefix
        self.functions = functions  # the addresses of the functions whose address is taken, by name
        self.helpers = Helpers()
        self.sites: list[Site] = []
        self._emitted = ""  # the function that is being emitted
        self._site_of: dict[int, int] = {}
        self._kept: list[Instruction] = []  # kept alive, so that the ids in _site_of stay unique
        self._shared: dict[str, dict[str, int]] = {}
        self._static: dict[str, int] = {}
        self._params: dict[str, dict[str, int]] = {}
        self._used_functions: list[str] = []
        self._refused: dict[str, NotEmulated] = {}
        # Only mapa gives a thread the address of another block's shared memory. Without it, no access to the state
        # space .shared has to be checked for such an address (`Emitter.check`).
        self.has_clusters = any(
            isinstance(item, Instruction) and item.base == "mapa"
            for fn in module.functions.values()
            for item in fn.body or ()
        )
        self.globals: dict[str, GlobalVar] = {}
        self.globals_bytes = 0
        self.text: list[str] = []
        self.libraries: set[str] = set()
        self._constants: dict[bytes, str] = {}
        self._layout_globals()

    def emitter(self, fn: Function, mode: str) -> Emitter:
        """An emitter for a function of the module."""
        return Emitter(self, fn, mode, self.helpers)

    # Layout ---------------------------------------------------------------------------------------------------------
    def _layout_globals(self) -> None:
        offset = 0
        variables = [v for v in self.module.variables.values() if v.space in ("global", "const") and not v.extern]
        offsets = {}
        for v in variables:
            offset = _up(offset, max(v.align, 1))
            offsets[v.name] = offset
            offset += v.size
        for v in variables:
            relocations = []
            init = bytearray(v.init)
            for at, name, addend in v.relocations:
                if name in offsets:
                    relocations.append((at, offsets[name] + addend))
                elif name in self.functions:
                    init[at : at + 8] = (self.functions[name] + addend).to_bytes(8, "little")
                else:
                    raise PtxError(v.line, v.name, f"{name!r}, whose address is an initial value, is not defined")
            self.globals[v.name] = GlobalVar(
                v.name, v.space, v.size, v.align, offsets[v.name], bytes(init), tuple(relocations), v.managed
            )
        self.globals_bytes = offset

    def _reached(self, fn: Function) -> list[Function]:
        """The functions that `fn` calls, directly or not."""
        seen: list[Function] = []
        stack = [fn]
        while stack:
            for item in stack.pop().body or ():
                callee = callee_of(self.module, item) if isinstance(item, Instruction) else None
                if callee is not None and callee not in seen:
                    seen.append(callee)
                    stack.append(callee)
        return seen

    def _layout_shared(self, fn: Function) -> None:
        """Lay out the shared variables of a kernel: the static ones first, then all dynamic ones at the same offset."""
        wanted = {}
        for item in fn.body or ():
            if isinstance(item, Instruction):
                for v in (v for o in item.operands for v in variables_of(o)):
                    if v.space == "shared":
                        wanted[v.name] = v
        offsets, offset = {}, 0
        dynamic = [v for v in wanted.values() if v.extern]
        for v in wanted.values():
            if not v.extern:
                offset = _up(offset, max(v.align, 1))
                offsets[v.name] = offset
                offset += v.size
        static = _up(offset, max([16, *(v.align for v in dynamic)])) if offset else 0
        for v in dynamic:
            offsets[v.name] = static
        self._shared[fn.name], self._static[fn.name] = offsets, static

    def shared_offset(self, var: Var, fn: Function) -> int:
        return self._shared[fn.name][var.name]

    def param_offset(self, fn: Function, var: Var) -> int:
        table = self._params.setdefault(fn.name, {p.name: p.offset for p in _params(fn)[0]})
        if var.name not in table:
            raise RefusedError(f"{var.name} is not a parameter of this function")
        return table[var.name]

    def param_bytes(self, fn: Function) -> int:
        return _params(fn)[1]

    def global_address(self, g: Operands, var: Var, offset: int) -> str:
        if var.extern:
            raise RefusedError(f"the variable {var.name} is .extern: link the module with one that defines it")
        if self.raw:
            return f'add (i64 ptrtoint (ptr @"{self.prefix}{var.name}" to i64), i64 {offset})'
        total = self.globals[var.name].offset + offset
        return g.op(f"add i64 %globals, {total}") if total else "%globals"

    def function_address(self, g: Operands, sym: Sym) -> str:
        if sym.name not in self.module.functions:
            raise RefusedError(f"{sym.name} is not defined")
        return f'ptrtoint (ptr @"{symbol(self, sym.name)}" to i64)' if self.raw else str(self.functions[sym.name])

    def site(self, ins: Instruction) -> int:
        index = self._site_of.get(id(ins))
        if index is None:
            index = self._site_of[id(ins)] = len(self.sites)
            self._kept.append(ins)
            where: Location = self.module.locations[ins.loc]
            named = re.search(r"\[(.*?)\]", ins.text)
            address = named[1] if named else ""
            self.sites.append(Site(ins.opcode, ins.line, where.file, where.line, where.inlined, address, self._emitted))
        return index

    def has_body(self, name: str) -> bool:
        fn = self.module.functions.get(name)
        return fn is not None and fn.body is not None

    def constant(self, data: bytes) -> str:
        """A pointer to constant memory with these bytes."""
        name = self._constants.get(data)
        if name is None:
            name = self._constants[data] = f'@"{self.prefix}constant.{len(self._constants)}"'
            text = "".join(f"\\{byte:02X}" for byte in data)
            self.text.append(f'{name} = private constant [{len(data)} x i8] c"{text}", align 8')
        return name

    # Functions called by kernels ------------------------------------------------------------------------------------
    def device_function(self, name: str) -> str:
        fn = self.module.functions.get(name)
        if fn is None or fn.body is None:
            raise RefusedError(f"the function {name!r} is not defined in this module")
        if name not in self._used_functions:
            self._used_functions.append(name)
        return f'@"{self.prefix}.{name}"'

    def kernels(self) -> dict[str, KernelCode]:
        kernels = [fn for fn in self.module.functions.values() if fn.kernel and fn.body is not None]
        emitted: dict[str, Emitter] = {}
        inliner = Inliner(self.module, lambda ins: decode(ins).before is not None)
        for fn in kernels:
            try:
                inliner.expand(fn)
                self._layout_shared(fn)
                self._emitted = fn.name
                g = self.emitter(fn, "kernel")
                self.text.append(g.function(f'define i32 @"{self.prefix}{fn.name}"(ptr %t)', _prologue()))
                emitted[fn.name] = g
            except NotEmulated as error:
                self._refused[fn.name] = error
        # The list may grow in this loop: when a function is emitted, the functions that it calls are appended.
        device: dict[str, Emitter] = {}
        for name in self._used_functions:
            try:
                device[name] = self._device(self.module.functions[name])
            except NotEmulated as error:
                self._refused[name] = error
                self.text.append(f"{self._device_signature(self.module.functions[name])} {{ ret i32 {EXITED} }}")
        sites = tuple(self.sites)
        return {fn.name: self._kernel(fn, emitted.get(fn.name), device, sites) for fn in kernels}

    def _kernel(
        self, fn: Function, g: Emitter | None, device: dict[str, Emitter], sites: tuple[Site, ...]
    ) -> KernelCode:
        params, size = _params(fn)
        reached = [fn, *self._reached(fn)]
        error = next((self._refused[f.name] for f in reached if f.name in self._refused), None)
        parts = [g, *(device[f.name] for f in reached if f.name in device)] if g is not None else []
        return KernelCode(
            fn.name,
            self.prefix + fn.name,
            g.frame_bytes if g is not None else 0,
            params,
            size,
            self._static.get(fn.name, 0),
            g.local_bytes if g is not None else 0,
            fn.thread_limit() or 0,
            _shape(fn, "reqntid"),
            sites,
            any(e.waits for e in parts),
            any(e.triggers for e in parts),
            any(e.copies for e in parts),
            _shape(fn, "reqnctapercluster"),
            fn.directives.get("maxclusterrank", (0,))[0],
            "explicitcluster" in fn.directives,
            None if error is None else (str(error), *(self.module.source(error.line) or (None, error.line))),
        )

    def _device(self, fn: Function) -> Emitter:
        self._emitted = fn.name
        if fn.body and fn in self._reached(fn):
            first = next(item for item in fn.body if isinstance(item, Instruction))
            fn.body = [Instruction(control.DEPTH, (), None, first.line, first.loc, first.text), *fn.body]
        g = self.emitter(fn, "device")
        for i, v in enumerate((*fn.returns, *fn.params)):
            g.param_pointers[id(v)] = f"%a{i}"
        self.text.append(g.function(self._device_signature(fn), _prologue()))
        return g

    def _device_signature(self, fn: Function) -> str:
        names = [f"ptr %a{i}" for i in range(len(fn.returns) + len(fn.params))]
        return f'define internal i32 @"{self.prefix}.{fn.name}"({", ".join(["ptr %t", *names])})'


def translate(ptx: str, *, raw: bool = False, prefix: str = "") -> Translated:
    """Translate one PTX module to LLVM IR text (opaque pointers, no target triple).

    With `raw`, each `.func` becomes a plain C function, exported if it is `.visible`, without access checks and
    suspension points; the module must not have kernels. Every symbol that the IR defines begins with `prefix`. Raises
    PtxError, with the line of the PTX, for an instruction that cannot be translated. Without `raw`, an opcode that
    `refused` lists does not raise; the kernels that use it have no code (`KernelCode.refused`).
    """
    module = parse(ptx)
    try:
        functions = {}
        if not raw:
            functions = indirect.addresses(module, ptx)
            indirect.lower(module, functions)
            stack.lower(module)
        unit = Unit(module, raw, prefix, functions)
        kernels: dict[str, KernelCode] = {}
        if raw:
            emit_module(unit)
        else:
            kernels = unit.kernels()
    except PtxError as error:
        error.source = module.source(error.line)
        raise
    metadata = '!0 = !{}\n!1 = !{!"branch_weights", i32 1048576, i32 1}\n'
    ir = "\n".join([unit.helpers.text(), *unit.text, metadata])
    variables = () if raw else tuple(unit.globals.values())
    return Translated(
        ir, kernels, variables, 0 if raw else unit.globals_bytes, module.target, tuple(sorted(unit.libraries))
    )
