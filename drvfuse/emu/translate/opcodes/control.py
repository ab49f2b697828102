# SPDX-License-Identifier: Apache-2.0
"""Control flow, calls, barriers and warp-wide operations."""

from __future__ import annotations

from typing import Any

from ....ptx.ir import Instruction, Pair, Reg, Sym, Tuple
from ... import abi
from .. import raw
from ..emitter import EXITED, Emitter
from ..indirect import NO_FUNCTION
from ..opcode import Action, Opcode, RefusedError, opcode


@opcode("bra", "brx")
def branch(op: Opcode) -> Action:
    op.flag("uni", "idx")
    return Action(lambda g, ins: None, pure=False)


@opcode("ret")
def ret(op: Opcode) -> Action:
    op.flag("uni")
    return Action(lambda g, ins: g.finish(), pure=False)


@opcode("exit")
def exit_(op: Opcode) -> Action:
    def emit(g: Emitter, ins: Instruction) -> None:
        if g.mode == "raw":
            raise RefusedError("exit is not available with raw=True")
        g.do(f"ret i32 {int(abi.Status.EXIT) if g.mode == 'kernel' else EXITED}")

    return Action(emit, pure=False)


@opcode("trap", "brkpt")
def trap(op: Opcode) -> Action:
    kind = abi.Trap.TRAP if op.base == "trap" else abi.Trap.BREAKPOINT

    def emit(g: Emitter, ins: Instruction) -> None:
        if g.mode == "raw":
            g.helpers.declare("llvm.trap", "void")
            g.do("call void @llvm.trap()")
            if kind == abi.Trap.TRAP:
                g.do("unreachable")
            return
        g.do(f"ret i32 {g.suspend(ins, abi.Status.TRAP, kind)}")
        if kind != abi.Trap.TRAP:
            g.start(g.label())

    return Action(emit, pure=False)


@opcode(NO_FUNCTION)
def no_function(op: Opcode) -> Action:
    """Emit the fault of an indirect call to an address that is no function of the module."""

    def emit(g: Emitter, ins: Instruction) -> None:
        g.put("op_addr", f"i64 {g.word(ins.operands[0], 64)}")
        g.leave(g.suspend(ins, abi.Status.TRAP, abi.Trap.NO_FUNCTION))

    return Action(emit, pure=False)


DEPTH = "@depth"  # an opcode that the translator itself puts at the start of recursive functions


@opcode(DEPTH)
def depth(op: Opcode) -> Action:
    return Action(lambda g, ins: g.leave_if(g.runtime("rt_depth", "%t", str(g.site(ins)))), pure=False)


@opcode("pmevent", "setmaxnreg")
def nothing(op: Opcode) -> Action:
    op.flag("mask", "inc", "dec", "sync", "aligned", "u32")
    return Action(lambda g, ins: None)


# Calls --------------------------------------------------------------------------------------------------------------
@opcode("call")
def call(op: Opcode) -> Action:
    op.flag("uni")

    def emit(g: Emitter, ins: Instruction) -> None:
        operands = list(ins.operands)
        returns: tuple[Any, ...] = ()
        if isinstance(operands[0], Tuple):
            returns = operands.pop(0).items
        callee = operands.pop(0)
        arguments: tuple[Any, ...] = operands.pop(0).items if operands and isinstance(operands[0], Tuple) else ()
        prototype = operands[0].name if operands else None
        if g.mode == "raw":
            pointers = [argument_pointer(g, a) for a in arguments]
            raw.emit_call(g, callee, [argument_pointer(g, r) for r in returns], pointers, prototype)
        elif isinstance(callee, Sym) and callee.name in _SYSTEM_CALLS and not g.unit.has_body(callee.name):
            _SYSTEM_CALLS[callee.name](g, ins, returns, [argument_pointer(g, a) for a in arguments])
        else:
            _device_call(g, callee, returns, arguments)

    return Action(emit, pure=False)


def argument_pointer(g: Emitter, operand: Any) -> str:
    """A pointer to the bytes of an argument."""
    if isinstance(operand, Sym) and operand.var is not None and operand.var.space == "param":
        pointer = g.param_pointers.get(id(operand.var))
        if pointer is None:
            raise RefusedError(f"{operand.name} is not a parameter variable of this function")
        return pointer
    slot = f"%v{len(g.allocas)}"
    g.allocas.append(f"{slot} = alloca i64, align 8")
    if isinstance(operand, Reg):
        n = {"f32": 32, "f64": 64}.get(operand.type) or int(operand.type[1:])
        g.do(f"store i{n} {g.word(operand, n)}, ptr {slot}")
    else:
        g.do(f"store i64 {g.word(operand, 64)}, ptr {slot}")
    return slot


def _device_call(g: Emitter, callee: Any, returns: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
    if not isinstance(callee, Sym):
        raise RefusedError("the name of a function is expected")
    name = g.unit.device_function(callee.name)
    if any(isinstance(r, Reg) for r in returns):
        raise RefusedError("a returned value must go to a .param variable")
    fn = g.unit.module.functions[callee.name]
    for what, formal, actual in (("results", fn.returns, returns), ("arguments", fn.params, arguments)):
        if len(formal) != len(actual):
            raise RefusedError(f"{callee.name} has {len(formal)} {what}, and the call has {len(actual)}")
        for var, operand in zip(formal, actual, strict=True):
            size = operand.var.size if isinstance(operand, Sym) and operand.var is not None else 8
            if size < var.size:
                raise RefusedError(f"{var.name} of {callee.name} has {var.size} bytes, and the call gives {size}")
    pointers = [f"ptr {argument_pointer(g, x)}" for x in (*returns, *arguments)]
    status = g.op(f"call i32 {name}({', '.join(['ptr %t', *pointers])})")
    back, out = g.label(), g.label()
    g.do(f"br i1 {g.op(f'icmp eq i32 {status}, 0')}, label %{back}, label %{out}")
    g.start(out)
    # If the callee has executed `exit`, it returns EXITED. A device function passes that on, a kernel returns EXIT.
    if g.mode == "kernel":
        status = g.op(f"select i1 {g.op(f'icmp eq i32 {status}, {EXITED}')}, i32 {int(abi.Status.EXIT)}, i32 {status}")
    g.do(f"ret i32 {status}")
    g.start(back)


def _give(g: Emitter, returns: tuple[Any, ...], typed: str) -> None:
    """Store the result of a system call, given as "type value"."""
    if returns:
        g.do(f"store {typed}, ptr {argument_pointer(g, returns[0])}")


def _vprintf(g: Emitter, ins: Instruction, returns: tuple[Any, ...], pointers: list[str]) -> None:
    fmt, args = (g.op(f"load i64, ptr {p}") for p in pointers)
    _give(g, returns, f"i32 {g.runtime('rt_vprintf', '%t', fmt, args)}")


def _assertfail(g: Emitter, ins: Instruction, returns: tuple[Any, ...], pointers: list[str]) -> None:
    message, file, line, function = pointers[:4]
    g.put("op_value", f"i64 {g.op(f'load i64, ptr {message}')}")
    g.put("op_addr", f"i64 {g.op(f'load i64, ptr {file}')}")
    g.put("op_a", f"i32 {g.op(f'load i32, ptr {line}')}")
    g.put("op_seen", f"i64 {g.op(f'load i64, ptr {function}')}")
    g.leave(g.suspend(ins, abi.Status.TRAP, abi.Trap.ASSERT))


def _malloc(g: Emitter, ins: Instruction, returns: tuple[Any, ...], pointers: list[str]) -> None:
    _give(g, returns, f"i64 {g.runtime('rt_malloc', '%t', g.op(f'load i64, ptr {pointers[0]}'))}")


def _free(g: Emitter, ins: Instruction, returns: tuple[Any, ...], pointers: list[str]) -> None:
    g.leave_if(g.runtime("rt_free", "%t", g.op(f"load i64, ptr {pointers[0]}"), str(g.site(ins))))


_SYSTEM_CALLS = {"vprintf": _vprintf, "__assertfail": _assertfail, "malloc": _malloc, "free": _free}
"""The functions that kernels may call without defining them."""


# Block barriers -----------------------------------------------------------------------------------------------------
@opcode("bar", "barrier")
def barrier(op: Opcode) -> Action:
    if op.flag("warp"):
        op.pick("sync")
        return _warp(abi.WarpOp.WARP_SYNC, 0, lambda g, ins: None)
    op.flag("cta")
    aligned = op.flag("aligned") or op.base == "bar"
    verb = op.pick("sync", "arrive", "red")
    which = op.pick("popc", "and", "or") if verb == "red" else verb
    if verb == "red":
        op.pick("u32" if which == "popc" else "pred")
    kind = abi.Barrier[which.upper()]

    def before(g: Emitter, ins: Instruction) -> int:
        operands = list(ins.operands)
        if verb == "red":
            g.put("op_c", f"i32 {g.op(f'zext i1 {g.pred(operands.pop())} to i32')}")
            operands.pop(0)
        g.put("op_a", f"i32 {g.word(operands[0], 32)}")
        g.put("op_b", f"i32 {g.word(operands[1], 32) if len(operands) > 1 else 0}")
        return g.suspend(ins, abi.Status.BARRIER, kind | (0 if aligned else abi.Barrier.UNALIGNED))

    def after(g: Emitter, ins: Instruction) -> None:
        if verb == "red":
            r = g.get("op_result", "i32")
            if kind == abi.Barrier.POPC:
                g.set_int(ins.operands[0], r, 32)
            else:
                g.set_pred(ins.operands[0], g.op(f"icmp ne i32 {r}, 0"))

    return Action(after, before=before, pure=False)


@opcode("griddepcontrol")
def griddepcontrol(op: Opcode) -> Action:
    if op.pick("wait", "launch_dependents") == "wait":

        def before(g: Emitter, ins: Instruction) -> int:
            g.waits = True
            return g.suspend(ins, abi.Status.GDC_WAIT)

        return Action(lambda g, ins: None, before=before, pure=False)

    def trigger(g: Emitter, ins: Instruction) -> None:
        g.triggers = True
        g.runtime("rt_trigger", "%t")

    return Action(trigger, pure=False)


@opcode("nanosleep")
def nanosleep(op: Opcode) -> Action:
    op.pick("u32")

    def before(g: Emitter, ins: Instruction) -> int:
        g.put("op_a", f"i32 {g.word(ins.operands[0], 32)}")
        return g.suspend(ins, abi.Status.SLEEP)

    return Action(lambda g, ins: None, before=before, pure=False)


# Warp-wide operations -----------------------------------------------------------------------------------------------
def _warp(kind: abi.WarpOp, mask_at: int, operands: Any, after: Any = None) -> Action:
    """How to emit a warp operation. `operands(g, ins)` stores the operands of the operation (op_a and so on) in the
    thread's frame, `mask_at` is the index of the operand that is the member mask, and `after` reads the results.
    """

    def before(g: Emitter, ins: Instruction) -> int:
        operands(g, ins)
        g.put("op_mask", f"i32 {g.word(ins.operands[mask_at], 32)}")
        return g.suspend(ins, abi.Status.WARPOP, kind)

    return Action(after or (lambda g, ins: None), before=before, pure=False)


def _result(g: Emitter, ins: Instruction) -> None:
    """Write op_result to the destination and, if that is `d|p`, op_pred to p."""
    d = ins.operands[0]
    value = g.get("op_result", "i32")
    if isinstance(d, Pair):
        p = g.get("op_pred", "i32")
        g.set_pred(d.second, g.op(f"icmp ne i32 {p}, 0"))
        d = d.first
    g.set_int(d, value, 32)


@opcode("shfl")
def shfl(op: Opcode) -> Action:
    if not op.flag("sync"):
        raise RefusedError("the modifier .sync is expected")
    kind = abi.WarpOp[f"SHFL_{op.pick('up', 'down', 'bfly', 'idx').upper()}"]
    op.pick("b32")

    def operands(g: Emitter, ins: Instruction) -> None:
        for member, operand in zip(("op_a", "op_b", "op_c"), ins.operands[1:4], strict=True):
            g.put(member, f"i32 {g.word(operand, 32)}")

    return _warp(kind, 4, operands, _result)


@opcode("vote")
def vote(op: Opcode) -> Action:
    if not op.flag("sync"):
        raise RefusedError("the modifier .sync is expected")
    verb = op.pick("all", "any", "uni", "ballot")
    op.pick("b32" if verb == "ballot" else "pred")
    kind = abi.WarpOp[f"VOTE_{verb.upper()}"]

    def operands(g: Emitter, ins: Instruction) -> None:
        g.put("op_a", f"i32 {g.op(f'zext i1 {g.pred(ins.operands[1])} to i32')}")

    def after(g: Emitter, ins: Instruction) -> None:
        if verb == "ballot":
            _result(g, ins)
        else:
            r = g.get("op_result", "i32")
            g.set_pred(ins.operands[0], g.op(f"icmp ne i32 {r}, 0"))

    return _warp(kind, 2, operands, after)


@opcode("match")
def match(op: Opcode) -> Action:
    op.pick("sync")
    verb = op.pick("any", "all")
    n = int(op.pick("b32", "b64")[1:])

    def operands(g: Emitter, ins: Instruction) -> None:
        x = g.word(ins.operands[1], n)
        g.put("op_value", f"i64 {x if n == 64 else g.op(f'zext i32 {x} to i64')}")

    return _warp(abi.WarpOp[f"MATCH_{verb.upper()}"], 2, operands, _result)


@opcode("redux")
def redux(op: Opcode) -> Action:
    op.pick("sync")
    verb = op.pick("add", "min", "max", "and", "or", "xor")
    t = op.pick("u32", "s32") if verb in ("add", "min", "max") else op.pick("b32")
    name = f"REDUX_{verb.upper()}" + (f"_{t[0].upper()}" if verb in ("min", "max") else "")

    def operands(g: Emitter, ins: Instruction) -> None:
        g.put("op_a", f"i32 {g.word(ins.operands[1], 32)}")

    return _warp(abi.WarpOp[name], 2, operands, _result)


@opcode("elect")
def elect(op: Opcode) -> Action:
    op.pick("sync")
    return _warp(abi.WarpOp.ELECT, 1, lambda g, ins: None, _result)


@opcode("activemask")
def activemask(op: Opcode) -> Action:
    op.pick("b32")
    return Action(_result, lambda g, ins: g.suspend(ins, abi.Status.WARPOP, abi.WarpOp.ACTIVEMASK), pure=False)
