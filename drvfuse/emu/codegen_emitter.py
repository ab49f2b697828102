# SPDX-License-Identifier: Apache-2.0
"""Emission of one function as LLVM IR: registers, suspends, checked accesses, addresses.

Inside a block a register is an SSA value, kept in its integer or its float form. It reaches other blocks through a stack slot
(which LLVM promotes) and the other side of a suspend through the thread's frame. The NaN of fp32 arithmetic is made canonical
only where its bits can be seen: in the integer form, in memory, in another block.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drvfuse.emu import abi
from drvfuse.emu.codegen_opcode import RefusedError, decode, width
from drvfuse.emu.floats import Helpers
from drvfuse.emu.flow import Block, Graph, Traits, bits
from drvfuse.emu.ptx import SINK, Addr, Function, Imm, Instruction, Not, PtxError, Reg, Special, Sym, Var

if TYPE_CHECKING:
    from drvfuse.emu.codegen import Unit

EXITED = -1  # status by which a device function says that its thread has exited

_HEADER = {
    "%tid.x": ("t", abi.T_TID_X),
    "%tid.y": ("t", abi.T_TID_Y),
    "%tid.z": ("t", abi.T_TID_Z),
    "%laneid": ("t", abi.T_LANE),
    "%warpid": ("t", abi.T_WARP),
    "%ntid.x": ("launch", abi.L_NTID_X),
    "%ntid.y": ("launch", abi.L_NTID_Y),
    "%ntid.z": ("launch", abi.L_NTID_Z),
    "%ctaid.x": ("block", abi.B_CTAID_X),
    "%ctaid.y": ("block", abi.B_CTAID_Y),
    "%ctaid.z": ("block", abi.B_CTAID_Z),
    "%nctaid.x": ("launch", abi.L_NCTAID_X),
    "%nctaid.y": ("launch", abi.L_NCTAID_Y),
    "%nctaid.z": ("launch", abi.L_NCTAID_Z),
    "%dynamic_smem_size": ("launch", abi.L_SMEM_DYNAMIC),
    "%smid": ("block", abi.B_SMID),
    "%nsmid": ("launch", abi.L_SM_COUNT),
    "%envreg1": ("launch", abi.L_ENVREG1),
    "%envreg2": ("launch", abi.L_ENVREG2),
    "%cluster_ctarank": ("block", abi.B_CLUSTER_RANK),
}


@dataclass(slots=True)
class _Value:
    integer: str | None
    real: str | None
    kind: str  # "f32"/"f64" of `real`
    dirty: bool
    raw_nan: bool  # `real` is an fp32 result whose NaN is not canonical yet


def storage(type_: str) -> str:
    """LLVM type of a register's slot."""
    return {"pred": "i1", "f32": "float", "f64": "double"}.get(type_) or f"i{width(type_)}"


def f32_constant(pattern: int) -> str:
    if (pattern >> 23) & 0xFF == 0xFF:
        return f"0x{(pattern >> 31) << 63 | 0x7FF << 52 | (pattern & 0x7FFFFF) << 29:016X}"
    return f"0x{struct.unpack('<Q', struct.pack('<d', struct.unpack('<f', struct.pack('<I', pattern))[0]))[0]:016X}"


def signed(value: int, bits_: int) -> int:
    value &= (1 << bits_) - 1
    return value - (1 << bits_) if value >> (bits_ - 1) and bits_ > 1 else value


class Emitter:
    """Emits `fn`. `mode`: "kernel" (resumable), "device" (called by kernels, checks, no suspends), "raw" (a plain C function)."""

    def __init__(self, unit: Unit, fn: Function, mode: str, helpers: Helpers):
        self.unit, self.fn, self.mode, self.helpers = unit, fn, mode, helpers
        self.out: list[str] = []
        self.counter = 0
        self.values: dict[int, _Value] = {}
        self.guard: str | None = None
        self.carry: str | None = None
        self.slots_used: set[int] = set()
        self.slots = self.frame_bytes = abi.T_SLOTS
        self.fault_used = False
        self.param_pointers: dict[int, str] = {}
        self.allocas: list[str] = []
        self.local_bytes = 0
        self.local_offset: dict[int, int] = {}
        self.current: Instruction | None = None
        self.waits = self.triggers = False

    # Text -----------------------------------------------------------------------------------------------------------
    def op(self, text: str) -> str:
        """Emit an instruction with a result; its name."""
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
        """Call a declared function: `typed` are "type value"."""
        return self.op(f"call {result} {name}({', '.join(typed)})")

    def intrinsic(self, name: str, type_: str, *args: str) -> str:
        """An LLVM intrinsic over one type: name "llvm.umin", type "i32"."""
        suffix = {"float": "f32", "double": "f64"}.get(type_, type_)
        full = self.helpers.declare(f"{name}.{suffix}", type_, *([type_] * len(args)))
        return self.op(f"call {type_} {full}({', '.join(f'{type_} {a}' for a in args)})")

    def runtime(self, name: str, *args: str) -> str | None:
        result, types = abi.RUNTIME_FUNCTIONS[name]
        if self.mode == "raw":
            raise RefusedError("not available in a raw module")
        self.helpers.declare(name, result, *types)
        text = f"call {result} @{name}({', '.join(f'{t} {a}' for t, a in zip(types, args, strict=True))})"
        if result == "void":
            self.do(text)
            return None
        return self.op(text)

    # Registers ------------------------------------------------------------------------------------------------------
    def _entry(self, reg: Reg) -> _Value:
        value = self.values.get(reg.index)
        if value is None:
            self.slots_used.add(reg.index)
            t = storage(reg.type)
            name = self.op(f"load {t}, ptr %r{reg.index}")
            if t in ("float", "double"):
                value = _Value(None, name, "f32" if t == "float" else "f64", False, False)
            else:
                value = _Value(name, None, "", False, False)
            self.values[reg.index] = value
        return value

    def _canonical(self, value: _Value) -> str:
        if value.raw_nan:
            # On integers: LLVM drops a select between NaNs.
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

    def int(self, operand: Any, n: int) -> str:
        """`operand` as an `i<n>`; a wider register is truncated."""
        if isinstance(operand, Reg):
            w = width(operand.type)
            if operand.type == "pred":
                raise RefusedError(f"{operand.name} is a predicate")
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
        if isinstance(operand, Sym):
            v = self.symbol_value(operand)
            return v if n == 64 else self.op(f"trunc i64 {v} to i{n}")
        if isinstance(operand, Special):
            v, w = self.special(operand.name)
            if w == n:
                return v
            return self.op(f"{'trunc' if w > n else 'zext'} i{w} {v} to i{n}")
        raise RefusedError("a register or an immediate is expected")

    def real(self, operand: Any, kind: str) -> str:
        """`operand` as float ("f32") or double ("f64")."""
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
            pattern = int(self.int(operand, n)) & ((1 << n) - 1)
            return f32_constant(pattern) if kind == "f32" else f"0x{pattern:016X}"
        return self.op(f"bitcast i{n} {self.int(operand, n)} to {ll}")

    def raw_nan(self, operand: Any) -> bool:
        """Does the operand's float form have a NaN that is not canonical yet?"""
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
        """Write an `i<n>` to a register; a wider one is extended."""
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
        """Write a float or double; `arithmetic`: a NaN becomes canonical (fp32)."""
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
            old = self._entry(dst)
            self._canonical(old)
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
        """Move without a change of bits, in whatever form `src` is."""
        if isinstance(src, Reg) and isinstance(dst, Reg) and not self.guard and width(src.type) == width(dst.type) == n:
            e = self._entry(src)
            self.values[dst.index] = _Value(e.integer, e.real, e.kind, True, e.raw_nan)
        else:
            self.set_int(dst, self.int(src, n), n)

    def _stored(self, reg: Reg) -> tuple[str, str]:
        """(LLVM type, value) of a register as its slot holds it."""
        t = storage(reg.type)
        value = self._entry(reg)
        if t == "float" or t == "double":
            if value.real is None:
                value.real = self.op(f"bitcast i{width(reg.type)} {value.integer} to {t}")
                value.kind = reg.type
            return t, self._canonical(value)
        return t, self._integer(value) if t != "i1" else (value.integer or "false")

    def flush(self, live: int) -> None:
        for index, value in list(self.values.items()):
            if value.dirty and live >> index & 1:
                self.slots_used.add(index)
                t, v = self._stored(self.fn.registers[index])
                self.do(f"store {t} {v}, ptr %r{index}")

    # Frame ----------------------------------------------------------------------------------------------------------
    def field(self, offset: int) -> str:
        return self.op(f"getelementptr i8, ptr %t, i64 {offset}")

    def put(self, offset: int, typed: str) -> None:
        """Store "type value" to the frame's header."""
        self.do(f"store {typed}, ptr {self.field(offset)}")

    def get(self, offset: int, type_: str) -> str:
        return self.op(f"load {type_}, ptr {self.field(offset)}")

    def _frame_layout(self, live: int) -> list[tuple[Reg, int]]:
        regs = [self.fn.registers[i] for i in bits(live)]
        regs.sort(key=lambda r: -width(r.type))
        offset, out = self.slots, []
        for reg in regs:
            out.append((reg, offset))
            offset += max(1, width(reg.type) // 8)
        self.frame_bytes = max(self.frame_bytes, -(-offset // 16) * 16)
        return out

    def save(self, live: int) -> None:
        for reg, offset in self._frame_layout(live):
            t, v = self._stored(reg)
            if t == "i1":
                t, v = "i8", self.op(f"zext i1 {v} to i8")
            self.do(f"store {t} {v}, ptr {self.field(offset)}")

    def restore(self, live: int) -> None:
        for reg, offset in self._frame_layout(live):
            t = storage(reg.type)
            if t == "i1":
                v = self.op(f"trunc i8 {self.get(offset, 'i8')} to i1")
            else:
                v = self.get(offset, t)
            if t in ("float", "double"):
                self.values[reg.index] = _Value(None, v, reg.type, True, False)
            else:
                self.values[reg.index] = _Value(v, None, "", True, False)

    # Checks ---------------------------------------------------------------------------------------------------------
    def site(self, ins: Instruction) -> int:
        return self.unit.site(ins)

    def check(self, address: str, size: int, flags: int, ins: Instruction) -> None:
        """Ask the runtime whether this thread may access; a refusal leaves with FAULT."""
        if self.mode == "raw":
            return
        plain = flags & ~(0xF << abi.ACC_SPACE_SHIFT | abi.ACC_NC)
        if size in (4, 8, 16) and plain in (0, abi.ACC_WRITE):
            name = f"rt_{'write' if plain else 'read'}{size}"
            bad = self.runtime(name, "%t", address, str(self.site(ins)))
        else:
            bad = self.runtime("rt_access", "%t", address, str(size), str(flags), str(self.site(ins)))
        ok, label = self.op(f"icmp eq i32 {bad}, 0"), self.label()
        self.fault_used = True
        self.do(f"br i1 {ok}, label %{label}, label %fault, !prof !1")
        self.start(label)

    def leave(self, status: int) -> None:
        """Return `status` from here; a new block follows."""
        self.do(f"ret i32 {status}")
        self.start(self.label())

    # Addresses ------------------------------------------------------------------------------------------------------
    def _variable(self, var: Var, offset: int) -> str:
        """Address (i64) of a variable in its own space."""
        if var.space in ("global", "const"):
            return self.unit.global_address(self, var, offset)
        if var.space == "shared":
            if self.mode == "raw":
                raise RefusedError("shared memory in a raw module")
            return str(self.unit.shared_offset(var, self.fn) + offset)
        if var.space == "local":
            if self.mode == "raw":
                return self._shift(self.op(f"ptrtoint ptr {self._stack(var)} to i64"), offset)
            if id(var) not in self.local_offset:
                raise RefusedError(f"{var.name} is not a variable of this function")
            return self._shift("%local", self.local_offset[id(var)] + offset)
        if id(var) in self.param_pointers:
            return self._shift(self.op(f"ptrtoint ptr {self.param_pointers[id(var)]} to i64"), offset)
        return self._shift("%params", self.unit.param_offset(self.fn, var) + offset)

    def _stack(self, var: Var) -> str:
        pointer = self.param_pointers.get(id(var))
        if pointer is None:
            pointer = f"%v{len(self.allocas)}"
            if id(var) in self.fn.persistent:
                self.allocas.append(f"{pointer} = getelementptr i8, ptr %t, i64 {self.slots}")
                self.slots += -(-var.size // 16) * 16
            else:
                self.allocas.append(f"{pointer} = alloca [{max(var.size, 1)} x i8], align {max(var.align, 8)}")
            self.param_pointers[id(var)] = pointer
        return pointer

    def _shift(self, base: str, offset: int) -> str:
        return base if offset == 0 else self.op(f"add i64 {base}, {offset}")

    def symbol_value(self, sym: Sym) -> str:
        """What `mov` of a symbol gives: an address in the symbol's space."""
        if sym.var is None:
            return self.unit.function_address(self, sym)
        return self._variable(sym.var, sym.offset)

    def address(self, operand: Any, space: str) -> str:
        """Absolute address (i64) of `[operand]` accessed in `space`."""
        if not isinstance(operand, Addr):
            raise RefusedError("an address is expected")
        base, offset = operand.base, operand.offset
        if isinstance(base, Sym):
            if base.var is None:
                raise RefusedError(f"{base.name} is not defined")
            if base.var.space == "shared":
                return self._shift("%shared", self.unit.shared_offset(base.var, self.fn) + base.offset + offset)
            return self._variable(base.var, base.offset + offset)
        if isinstance(base, Imm):
            value = str(signed(base.value + offset, 64))
        elif width(base.type) == 64:
            value = self._shift(self.int(base, 64), offset)
        else:
            # 32-bit addresses wrap in 32 bits.
            narrow = self.int(base, 32)
            if offset:
                narrow = self.op(f"add i32 {narrow}, {offset}")
            value = self.op(f"zext i32 {narrow} to i64")
        if space == "shared":
            value = self.op(f"add i64 %shared, {value}")
        return value

    def parameter(self, operand: Any) -> str | None:
        """A pointer to a `.param` variable that lives on the stack, or None: the operand is elsewhere."""
        base = operand.base if isinstance(operand, Addr) else None
        if isinstance(base, Sym) and base.var is not None and id(base.var) in self.param_pointers:
            offset = base.offset + operand.offset
            pointer = self.param_pointers[id(base.var)]
            return pointer if offset == 0 else self.op(f"getelementptr i8, ptr {pointer}, i64 {offset}")
        return None

    # Special registers ----------------------------------------------------------------------------------------------
    def header(self, base: str, offset: int, type_: str = "i32") -> str:
        """A field that does not change while the kernel runs."""
        pointer = self.op(f"getelementptr i8, ptr %{base}, i64 {offset}")
        return self.op(f"load {type_}, ptr {pointer}, !invariant.load !0")

    def special(self, name: str) -> tuple[str, int]:
        """(value, bits) of a special register."""
        if self.mode == "raw":
            raise RefusedError(f"special register {name} in a raw module")
        if name in _HEADER:
            return self.header(*_HEADER[name]), 32
        if name.startswith("%lanemask_"):
            lane = self.header("t", abi.T_LANE)
            bit = self.op(f"shl i32 1, {lane}")
            kind = name[10:]
            if kind == "eq":
                return bit, 32
            below = self.op(f"sub i32 {bit}, 1")
            if kind == "lt":
                return below, 32
            upto = self.op(f"or i32 {below}, {bit}")
            if kind == "le":
                return upto, 32
            return self.op(f"xor i32 {upto if kind == 'gt' else below}, -1"), 32
        if name in ("%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%clock", "%clock_hi", "%clock64"):
            kind_ = abi.Clock.GLOBALTIMER if "timer" in name else abi.Clock.CLOCK
            value = self.runtime("rt_clock", "%t", str(int(kind_)))
            assert value is not None
            if name in ("%globaltimer", "%clock64"):
                return value, 64
            if name.endswith("_hi"):
                value = self.op(f"lshr i64 {value}, 32")
            return self.op(f"trunc i64 {value} to i32"), 32
        if name == "%nwarpid":
            return "64", 32
        if name.startswith("%envreg") or name == "%gridid":
            return "0", 64 if name == "%gridid" else 32
        if name in ("%total_smem_size", "%aggr_smem_size"):
            a = self.header("launch", abi.L_SMEM_DYNAMIC)
            return self.op(f"add i32 {a}, {self.header('launch', abi.L_SHARED_STATIC)}"), 32
        return self._cluster(name), 32

    def _cluster(self, name: str) -> str:
        packed = self.header("launch", abi.L_CLUSTER)
        if name == "%is_explicit_cluster":
            return self.op(f"zext i1 {self.op(f'icmp ne i32 {packed}, 0')} to i32")
        # No cluster is a cluster of one block.
        none = self.op(f"icmp eq i32 {packed}, 0")
        packed = self.op(f"select i1 {none}, i32 {0x010101}, i32 {packed}")
        dims = {}
        for axis, shift in (("x", 0), ("y", 8), ("z", 16)):
            dims[axis] = self.op(f"and i32 {self.op(f'lshr i32 {packed}, {shift}')}, 255")
        if name == "%cluster_nctarank":
            return self.op(f"mul i32 {self.op('mul i32 ' + dims['x'] + ', ' + dims['y'])}, {dims['z']}")
        word, _, axis = name.partition(".")
        at = {"x": 0, "y": 4, "z": 8}.get(axis)
        if at is None:
            raise RefusedError(f"unsupported special register {name}")
        if word == "%cluster_nctaid":
            return dims[axis]
        if word == "%nclusterid":
            return self.op(f"udiv i32 {self.header('launch', abi.L_NCTAID_X + at)}, {dims[axis]}")
        index = self.header("block", abi.B_CTAID_X + at)
        return self.op(f"{'udiv' if word == '%clusterid' else 'urem'} i32 {index}, {dims[axis]}")

    # The whole function ---------------------------------------------------------------------------------------------
    def classify(self, ins: Instruction) -> Traits:
        action = decode(ins)
        suspends = action.before is not None
        if suspends and self.mode == "raw":
            if not action.rereads:
                raise ins.error("suspends, which a raw module cannot")
            suspends = False
        return Traits(suspends, action.rereads, action.pure and not suspends)

    def emit(self, ins: Instruction, step: str) -> int | None:
        """Emit one half of an instruction ("before" or "after")."""
        action = decode(ins)
        self.current = ins
        try:
            if step == "before":
                assert action.before is not None
                return action.before(self, ins)
            if ins.guard:
                reg, negated = ins.guard
                self.guard = self.pred(reg)
                if negated:
                    self.guard = self.op(f"xor i1 {self.guard}, true")
            action.after(self, ins)
        except RefusedError as e:
            raise ins.error(str(e)) from None
        except (IndexError, ValueError, AttributeError, AssertionError) as e:
            raise ins.error(f"unsupported operands ({e})") from e
        finally:
            self.guard = None
        return None

    def function(self, signature: str, prologue: list[str]) -> str:
        """The definition's text. `prologue` are entry lines after the allocas."""
        for var in self.fn.variables:
            if var.space == "param":
                self._stack(var)
            elif self.mode != "raw":
                self.local_bytes = -(-self.local_bytes // var.align) * var.align
                self.local_offset[id(var)] = self.local_bytes
                self.local_bytes += var.size
        self.frame_bytes = max(self.frame_bytes, self.slots)
        graph = Graph(self.fn, self.classify)
        resumes = [b for b in graph.blocks if b.resumed]
        number = {b.index: i + 1 for i, b in enumerate(resumes)}
        for block in graph.blocks:
            self._block(block, number)
        entry = [f"{signature} {{", "entry:"]
        entry += [f"  %r{i} = alloca {storage(self.fn.registers[i].type)}" for i in sorted(self.slots_used)]
        entry += ["  " + a for a in self.allocas]
        entry += ["  " + p for p in prologue]
        live = graph.blocks[0].live_in
        for i in sorted(self.slots_used):
            if live >> i & 1:  # read before it is written on some path
                entry.append(f"  store {storage(self.fn.registers[i].type)} zeroinitializer, ptr %r{i}")
        if resumes:
            entry.append("  %resume = load i32, ptr %t")
            cases = " ".join(f"i32 {number[b.index]}, label %B{b.index}" for b in resumes)
            entry.append(f"  switch i32 %resume, label %B{graph.blocks[0].index} [{cases}]")
        else:
            entry.append(f"  br label %B{graph.blocks[0].index}")
        if self.fault_used:
            self.out += ["fault:", f"  ret i32 {int(abi.Status.FAULT)}"]
        return "\n".join([*entry, *self.out, "}"])

    def _block(self, block: Block, number: dict[int, int]) -> None:
        self.values, self.carry = {}, None
        self.start(f"B{block.index}")
        if block.resumed:
            after = self._kept(block)
            self.restore(after)
            self.emit(block.resumed, "after")
        for ins in block.instructions:
            self.emit(ins, "after")
        if block.suspended:
            status = self.emit(block.suspended, "before")
            target = block.successors[0]
            self.save(self._kept(target))
            self.do(f"store i32 {number[target.index]}, ptr %t")
            self.do(f"ret i32 {int(status or 0)}")
            return
        condition = None
        if block.branch:
            condition = self.pred(block.branch[0])
            if block.branch[1]:
                condition = self.op(f"xor i1 {condition}, true")
        selector = self.int(block.jump.operands[0], 32) if block.jump else None
        self.flush(block.live_out)
        if selector is not None:
            cases = " ".join(f"i32 {i}, label %B{s.index}" for i, s in enumerate(block.successors))
            dead = self.label()
            self.do(f"switch i32 {selector}, label %{dead} [{cases}]")
            self.start(dead)
            self.do("unreachable")
        elif condition is not None:
            self.do(f"br i1 {condition}, label %B{block.successors[0].index}, label %B{block.successors[1].index}")
        elif block.successors:
            self.do(f"br label %B{block.successors[0].index}")
        elif not self._ended(block):
            self.finish()

    def _ended(self, block: Block) -> bool:
        return bool(block.instructions) and block.instructions[-1].base in ("ret", "exit", "trap")

    def _kept(self, block: Block) -> int:
        """Registers that the frame keeps for a resumed block: what it and its resumed instruction read."""
        return block.live_in

    def finish(self) -> None:
        """Return from the function as `ret` does."""
        if self.mode == "raw":
            self.unit.raw_return(self)
        else:
            self.do(f"ret i32 {int(abi.Status.EXIT)}")


__all__ = ["EXITED", "Emitter", "PtxError"]
