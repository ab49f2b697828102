# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, atomics, fences and conversions of addresses.

The runtime checks every access before it is made. A thread suspends before each strong load and atomic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....ptx.ir import SINK, Addr, Instruction, Reg, Vec
from ... import abi
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, is_signed, opcode, width
from . import floating as real

_SPACES = {
    "global": abi.Space.GLOBAL,
    "shared": abi.Space.SHARED,
    "shared::cta": abi.Space.SHARED,
    "shared::cluster": abi.Space.CLUSTER,
    "local": abi.Space.LOCAL,
    "const": abi.Space.CONST,
    "param": abi.Space.PARAM,
    "param::entry": abi.Space.PARAM,
    "param::func": abi.Space.PARAM,
}
SCOPES = {scope.name.lower(): scope for scope in abi.Scope}
ORDERS = {order.name.lower(): order for order in abi.Order}
_TYPES_OF_ATOMICS = {
    "cas": ("b16", "b32", "b64", "b128", "u32", "u64", "s32", "s64"),
    "exch": ("b32", "b64", "b128", "u32", "u64", "s32", "s64"),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
    **dict.fromkeys(("add", "min", "max"), ("u32", "s32", "u64", "s64")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
}


def state_space(op: Opcode) -> tuple[str, int]:
    """(name, flag bits) of the state space of an opcode. The name "" is generic."""
    name = op.pick(*_SPACES, default="")
    flags = int(_SPACES[name]) << abi.SPACE_SHIFT if name else 0
    return name.split("::")[0], flags


def drop_hints(op: Opcode) -> None:
    """Consume the cache hints of an opcode, which have no effect."""
    op.flag("ca", "cg", "cs", "lu", "cv", "wb", "wt")
    op.rest = [p for p in op.rest if not p.startswith(("L1::", "L2::"))]


def scope_flags(op: Opcode, default: str | None = None) -> int:
    return int(SCOPES[op.pick(*SCOPES, default=default)]) << abi.SCOPE_SHIFT


def _access(op: Opcode, *orders: str) -> tuple[str, int, bool]:
    """(space, rt_access flags, strong) of a load or store."""
    if op.flag("volatile"):
        flags = abi.Access.STRONG | abi.Access.VOLATILE | int(abi.Scope.SYS) << abi.SCOPE_SHIFT
    elif op.flag("mmio"):
        op.pick("relaxed")
        op.pick("sys")
        flags = abi.Access.STRONG | int(abi.Scope.SYS) << abi.SCOPE_SHIFT
    else:
        order = op.pick(*orders, "weak", default="weak")
        flags = 0
        if order != "weak":
            flags = abi.Access.STRONG | int(ORDERS[order]) << abi.ORDER_SHIFT | scope_flags(op)
    if op.flag("nc"):
        flags |= abi.Access.NC
    drop_hints(op)
    space, bits = state_space(op)
    return space, flags | bits, bool(flags & abi.Access.STRONG)


def announce(space: str, size: int) -> Callable[[Emitter, Instruction], int]:
    """A function that emits the part before a strong access: it stores address and size, and suspends with YIELD."""

    def before(g: Emitter, ins: Instruction) -> int:
        operand = next((o for o in ins.operands if isinstance(o, Addr)), None)
        if operand is None:
            raise RefusedError("an address in brackets is expected")
        g.put("op_addr", f"i64 {g.address(operand, space)}")
        g.put("op_size", f"i32 {size}")
        return g.suspend(ins, abi.Status.YIELD)

    return before


def seen(g: Emitter, value: str, n: int) -> None:
    if g.mode == "raw":
        return
    if n != 64:
        value = g.op(f"{'trunc' if n > 64 else 'zext'} i{n} {value} to i64")
    g.put("op_seen", f"i64 {value}")


def _compared(g: Emitter, value: str, n: int) -> None:
    """Emit stores, for the runtime, of the value with which a compare-and-swap compares."""
    if g.mode == "raw":
        return
    if n == 128:
        high = g.op(f"lshr i128 {value}, 64")
        g.put("op_seen", f"i64 {g.op(f'trunc i128 {high} to i64')}")
    low = value if n == 64 else g.op(f"{'trunc' if n > 64 else 'zext'} i{n} {value} to i64")
    g.put("op_value", f"i64 {low}")


def _pointer(g: Emitter, address: str, offset: int = 0) -> str:
    if offset:
        address = g.op(f"add i64 {address}, {offset}")
    return g.op(f"inttoptr i64 {address} to ptr")


def _element_type(op: Opcode) -> tuple[str, int]:
    """(type, number of elements) of a load or store."""
    count = int(op.pick("v2", "v4", "v8", default="v1")[1:])
    t = op.type()
    if t == "pred" or t in ("f16x2", "bf16x2", "e4m3", "e5m2", "e4m3x2", "e5m2x2", "tf32"):
        raise RefusedError(f"unsupported type .{t}")
    if width(t) * count > 256:
        raise RefusedError("the vector is too wide")
    return t, count


def elements_flag(count: int, strong: bool) -> int:
    return (count.bit_length() - 1) << abi.ELEMENTS_SHIFT if strong else 0


def elements(operand: Any, count: int) -> tuple[Any, ...]:
    items = operand.items if isinstance(operand, Vec) else (operand,)
    if len(items) != count:
        raise RefusedError(f"{count} element(s) expected")
    return tuple(items)


def _place(g: Emitter, operand: Any, space: str, size: int, flags: int, ins: Instruction) -> Callable[[int], str]:
    """Emit the check of an access. Returns a function from the byte offset of an element to its pointer."""
    pointer = g.parameter(operand) if space == "param" else None
    if pointer is not None:
        return lambda offset: g.op(f"getelementptr i8, ptr {pointer}, i64 {offset}") if offset else pointer
    address = g.address(operand, space)
    if space != "param" or isinstance(operand.base, Reg):
        g.check(address, size, flags, ins)
    return lambda offset: _pointer(g, address, offset)


@opcode("ld", "ldu")
def ld(op: Opcode) -> Action:
    space, flags, strong = _access(op, "relaxed", "acquire")
    t, count = _element_type(op)
    n = width(t)
    flags |= elements_flag(count, strong)

    def after(g: Emitter, ins: Instruction) -> None:
        items = elements(ins.operands[0], count)
        unread = 0 if strong or count == 1 else g.unread(items)
        how = flags | (unread << abi.UNREAD_SHIFT | elements_flag(count, True) if unread else 0)
        at = _place(g, ins.operands[1], space, n // 8 * count, how, ins)
        ll = {"f32": "float", "f64": "double"}.get(t, f"i{n}")
        loaded = [g.op(f"load {ll}, ptr {at(i * n // 8)}, align {min(n // 8, 16)}") for i in range(count)]
        if strong:
            first = loaded[0] if ll[0] == "i" else g.op(f"bitcast {ll} {loaded[0]} to i{n}")
            seen(g, first, n)
        for item, value in zip(items, loaded, strict=True):
            if ll[0] == "i":
                g.set_int(item, value, n, is_signed(t))
            else:
                g.set_real(item, value, t, arithmetic=False)

    if strong:
        return Action(after, before=announce(space, n // 8 * count), rereads=True, pure=False)
    return Action(after, pure=False)


@opcode("st")
def st(op: Opcode) -> Action:
    space, flags, strong = _access(op, "relaxed", "release")
    t, count = _element_type(op)
    n = width(t)
    flags |= elements_flag(count, strong)

    def after(g: Emitter, ins: Instruction) -> None:
        items = elements(ins.operands[1], count)
        values = [g.word(item, n) for item in items]
        at = _place(g, ins.operands[0], space, n // 8 * count, flags | abi.Access.WRITE, ins)
        for i, value in enumerate(values):
            g.do(f"store i{n} {value}, ptr {at(i * n // 8)}, align {min(n // 8, 16)}")

    return Action(after, pure=False)


# Atomics ------------------------------------------------------------------------------------------------------------
def _add_f32(g: Emitter, old: str, value: str, flushing: str) -> str:
    """The bits of an fp32 sum. With `flushing` (an i1, true in global memory), subnormal operands and results are
    flushed to zero.
    """

    def maybe_flushed(x: str) -> str:
        return g.op(f"select i1 {flushing}, float {real.flush(g, x)}, float {x}")

    x, y = (maybe_flushed(g.op(f"bitcast i32 {bits} to float")) for bits in (old, value))
    total = maybe_flushed(g.op(f"fadd float {x}, {y}"))
    return g.op(
        f"select i1 {g.op(f'fcmp uno float {total}, 0.0')}, i32 2147483647, i32 {g.op(f'bitcast float {total} to i32')}"
    )


def _in_cluster(g: Emitter, address: str) -> str:
    """Whether a generic address is in the shared memory of a block of the cluster."""
    total = g.op(f"zext i32 {g.header('launch', 'cluster_window')} to i64")
    return g.op(f"icmp ult i64 {g.op(f'sub i64 {address}, %window')}, {total}")


def _in_shared(g: Emitter, address: str) -> str:
    """Whether a generic address is in the shared memory of this block."""
    static = g.header("launch", "shared_static")
    total = g.op(f"zext i32 {g.op(f'add i32 {static}, ' + g.header('launch', 'smem_dynamic'))} to i64")
    return g.op(f"icmp ult i64 {g.op(f'sub i64 {address}, %shared')}, {total}")


def _update(op: Opcode, verb: str, t: str) -> Callable[[Emitter, str, list[str]], str]:
    """A function that emits the new bits of a word from its old bits and the operands of an atomic."""
    n = width(t)
    ll = f"i{n}"
    noftz = op.flag("noftz")
    if t in real.KINDS:
        if verb not in ("add", "min", "max") or (verb != "add" and t in ("f32", "f64")):
            raise RefusedError(f"unsupported atomic .{verb}.{t}")
        if (t in real.HALVES) != noftz:
            raise RefusedError(
                "the modifier .noftz is expected for half types" if not noftz else "unsupported modifier .noftz"
            )

        def real_update(g: Emitter, old: str, v: list[str]) -> str:
            if t == "f32":
                return _add_f32(g, old, *v)
            if t == "f64":
                x, y = (g.op(f"bitcast i64 {bits} to double") for bits in (old, v[0]))
                return g.op(f"bitcast double {g.op(f'fadd double {x}, {y}')} to i64")
            compute = real.half_operation(t, verb)
            if n == 16:
                return compute(g, [old, v[0]])
            parts = []
            for shift in (0, 16):
                pair = [g.op(f"trunc i32 {g.op(f'lshr i32 {x}, {shift}')} to i16") for x in (old, v[0])]
                parts.append(g.op(f"zext i16 {compute(g, pair)} to i32"))
            return g.op(f"or i32 {g.op(f'shl i32 {parts[1]}, 16')}, {parts[0]}")

        return real_update
    s = "s" if is_signed(t) else "u"
    if t not in _TYPES_OF_ATOMICS[verb] or noftz:
        raise RefusedError(f"unsupported atomic .{verb}.{t}")

    def update(g: Emitter, old: str, v: list[str]) -> str:
        if verb == "cas":
            return g.op(f"select i1 {g.op(f'icmp eq {ll} {old}, {v[0]}')}, {ll} {v[1]}, {ll} {old}")
        if verb == "exch":
            return v[0]
        if verb in ("and", "or", "xor", "add"):
            return g.op(f"{verb} {ll} {old}, {v[0]}")
        if verb in ("min", "max"):
            return g.intrinsic(f"llvm.{s}{verb}", ll, old, v[0])
        if verb == "inc":
            return g.op(f"select i1 {g.op(f'icmp uge i32 {old}, {v[0]}')}, i32 0, i32 {g.op(f'add i32 {old}, 1')}")
        zero = g.op(f"icmp eq i32 {old}, 0")
        wrap = g.op(f"or i1 {zero}, {g.op(f'icmp ugt i32 {old}, {v[0]}')}")
        return g.op(f"select i1 {wrap}, i32 {v[0]}, i32 {g.op(f'sub i32 {old}, 1')}")

    return update


@opcode("atom", "red")
def atom(op: Opcode) -> Action:
    returns = op.base == "atom"
    order = op.pick(*(ORDERS if returns else ("relaxed", "release")), default="relaxed")
    flags = abi.Access.WRITE | abi.Access.ATOMIC | abi.Access.STRONG | int(ORDERS[order]) << abi.ORDER_SHIFT
    flags |= 0 if returns else abi.Access.REDUCTION
    flags |= scope_flags(op, "gpu")
    drop_hints(op)
    space, bits = state_space(op)
    flags |= bits
    verb = op.pick("and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max")
    count = int(op.pick("v2", "v4", "v8", default="v1")[1:])
    t = op.type()
    n = width(t)
    flags |= elements_flag(count, True) | (abi.Access.SWAP if verb == "cas" else 0)
    update = _update(op, verb, t)
    if space not in ("", "global", "shared") or not returns and verb in ("cas", "exch"):
        raise RefusedError("unsupported atomic")

    def after(g: Emitter, ins: Instruction) -> None:
        dst = elements(ins.operands[0], count) if returns else (SINK,) * count
        address, *sources = ins.operands[1 if returns else 0 :]
        columns = [[g.word(x, n) for x in elements(s, count)] for s in sources[: 2 if verb == "cas" else 1]]
        if verb == "cas":
            _compared(g, columns[0][0], n)
        at = _place(g, address, space, n // 8 * count, flags, ins)
        olds = []
        extra = []
        if t == "f32" and verb == "add":
            if space:
                extra = ["true" if space == "global" else "false"]
            else:
                extra = [g.op(f"xor i1 {_in_cluster(g, g.op(f'ptrtoint ptr {at(0)} to i64'))}, true")]
        for i in range(count):
            pointer = at(i * n // 8)
            old = g.op(f"load i{n}, ptr {pointer}, align {min(n // 8, 16)}")
            new = update(g, old, [*(c[i] for c in columns), *extra])
            g.do(f"store i{n} {new}, ptr {pointer}, align {min(n // 8, 16)}")
            olds.append(old)
        seen(g, olds[0], n)
        for item, old in zip(dst, olds, strict=True):
            g.set_int(item, old, n)

    return Action(after, before=announce(space, n // 8 * count), rereads=True, pure=False)


# Fences -------------------------------------------------------------------------------------------------------------
@opcode("fence", "membar")
def fence(op: Opcode) -> Action:
    if op.flag("mbarrier_init"):
        op.pick("release")
        op.pick("cluster")
        flags = int(abi.Scope.CLUSTER) << abi.SCOPE_SHIFT | int(ORDERS["release"]) << abi.ORDER_SHIFT | abi.Fence.INIT
    elif op.flag("proxy"):
        kind = op.pick("alias", "async")
        only_global = op.flag("global")
        op.flag("shared::cta", "shared::cluster")
        flags = abi.Fence.PROXY | (abi.Fence.ALIAS if kind == "alias" else 0 if only_global else abi.Fence.ASYNC)
    elif op.base == "membar":
        scope = {"cta": abi.Scope.CTA, "gl": abi.Scope.GPU, "sys": abi.Scope.SYS}[op.pick("cta", "gl", "sys")]
        flags = abi.Fence.SC | int(scope) << abi.SCOPE_SHIFT
    else:
        order = op.pick("sc", "acq_rel", "acquire", "release", default="acq_rel")
        flags = scope_flags(op) | (abi.Fence.SC if order == "sc" else 0)
        flags |= int(ORDERS["acq_rel" if order == "sc" else order]) << abi.ORDER_SHIFT

    def emit(g: Emitter, ins: Instruction) -> None:
        if g.mode != "raw":
            g.runtime("rt_fence", "%t", str(flags), str(g.site(ins)))

    return Action(emit, pure=False)


# Addresses ----------------------------------------------------------------------------------------------------------
@opcode("cvta")
def cvta(op: Opcode) -> Action:
    """An address in the space .shared is an offset in the cluster's shared memory, an address in .local one in the
    thread's local memory.
    """
    to_space = op.flag("to")
    space = op.pick(*_SPACES).split("::")[0]
    op.pick("u64")

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a = ins.operands
        x = g.word(a, 64)
        own = {"shared": "%window", "local": "%local" if g.mode != "raw" else ""}.get(space)
        if own:
            x = g.op(f"{'sub' if to_space else 'add'} i64 {x}, {own}")
        g.set_int(d, x, 64)

    return Action(emit)


@opcode("isspacep")
def isspacep(op: Opcode) -> Action:
    space = op.pick(*_SPACES)
    space = space if space == "shared::cluster" else space.split("::")[0]

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a = ins.operands
        x = g.word(a, 64)
        if g.mode == "raw":
            g.set_pred(d, "true" if space == "global" else "false")
            return

        def inside(base: str, size: str) -> str:
            return g.op(f"icmp ult i64 {g.op(f'sub i64 {x}, {base}')}, {size}")

        if space == "shared":
            r = _in_shared(g, x)
        elif space == "shared::cluster":
            r = _in_cluster(g, x)
        elif space == "local":
            r = inside("%local", str(g.local_bytes))
        elif space == "param":
            r = inside("%params", str(g.unit.param_bytes(g.fn)))
        elif space == "const":
            r = "false"
        else:
            either = g.op(f"or i1 {_in_cluster(g, x)}, {inside('%local', str(g.local_bytes))}")
            r = g.op(f"xor i1 {either}, true")
        g.set_pred(d, r)

    return Action(emit)


@opcode("prefetch", "prefetchu", "applypriority", "discard")
def hint(op: Opcode) -> Action:
    op.flag("global", "local", "L1", "L2", "tensormap")
    drop_hints(op)
    return Action(lambda g, ins: None)


@opcode("createpolicy")
def createpolicy(op: Opcode) -> Action:
    op.flag("fractional", "range", "global")
    drop_hints(op)
    op.pick("b64")
    return Action(lambda g, ins: g.set_int(ins.operands[0], "0", 64))
