# SPDX-License-Identifier: Apache-2.0
"""Thread block clusters: addresses in the shared memory of other blocks, asynchronous stores, the cluster's barrier.

A 32-bit shared-memory address is the rank of the block in its cluster, shifted by `abi.CLUSTER_SHIFT`, plus the offset
in the block (`native/cluster.cuh`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....ptx.ir import Instruction, Sym, Vec
from ... import abi
from ..emitter import Emitter
from ..opcode import Action, Opcode, RefusedError, opcode, width
from .reductions import reduction

_OFFSET = (1 << abi.CLUSTER_SHIFT) - 1


def _shared(op: Opcode) -> tuple[bool, int, Callable[[Emitter, Any], str]]:
    """Consume the state space and the type of an address. Returns (whether the address is generic, its width in bits, a
    function that emits the offset of the address in the cluster's shared memory as an i64).
    """
    generic = not op.flag("shared::cluster")
    n = width(op.pick("u32", "u64"))

    def offset(g: Emitter, operand: Any) -> str:
        # The value of a shared variable is its address in the space .shared, even if the instruction takes generic
        # addresses. That is the offset already.
        if isinstance(operand, Sym):
            return g.word(operand, 64)
        value = g.word(operand, n)
        value = g.op(f"zext i32 {value} to i64") if n == 32 else value
        return g.op(f"sub i64 {value}, %window") if generic else value

    return generic, n, offset


@opcode("mapa")
def mapa(op: Opcode) -> Action:
    generic, n, offset = _shared(op)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a, rank = ins.operands
        base = g.op(f"shl i64 {g.op(f'zext i32 {g.word(rank, 32)} to i64')}, {abi.CLUSTER_SHIFT}")
        value = g.op(f"add i64 {g.op(f'and i64 {offset(g, a)}, {_OFFSET}')}, {base}")
        value = g.op(f"add i64 {value}, %window") if generic else value
        g.set_int(d, value if n == 64 else g.op(f"trunc i64 {value} to i32"), n)

    return Action(emit)


@opcode("getctarank")
def getctarank(op: Opcode) -> Action:
    *_, offset = _shared(op)

    def emit(g: Emitter, ins: Instruction) -> None:
        d, a = ins.operands
        rank = g.op(f"lshr i64 {offset(g, a)}, {abi.CLUSTER_SHIFT}")
        g.set_int(d, g.op(f"trunc i64 {rank} to i32"), 32)

    return Action(emit)


@opcode("st.async")
def store_async(op: Opcode) -> Action:
    op.pick("async")
    op.flag("weak")
    op.pick("shared::cluster")
    op.pick("mbarrier::complete_tx::bytes")
    count = int(op.pick("v2", "v4", default="v1")[1:])
    n = width(op.pick(*(f"{kind}{n}" for kind in "busf" for n in (32, 64))))
    if n * count > 128:
        raise RefusedError(f"the vector is too wide: {n * count} bits, at most 128 are allowed")

    def emit(g: Emitter, ins: Instruction) -> None:
        target, value, barrier = ins.operands
        items = value.items if isinstance(value, Vec) else (value,)
        if len(items) != count:
            raise RefusedError(f"an operand of {count} element(s) is expected, not of {len(items)}")
        words = ["0", "0"]
        for i, item in enumerate(items):
            word, (half, shift) = g.word(item, n), divmod(i * n, 64)
            if n == 32:
                word = g.op(f"shl i64 {g.op(f'zext i32 {word} to i64')}, {shift}")
            words[half] = g.op(f"or i64 {words[half]}, {word}")
        where = g.address(target, "shared"), *words, str(n // 8 * count), g.address(barrier, "shared")
        g.copying("rt_st_async", *where, "0", str(g.site(ins)))

    return Action(emit, pure=False)


@opcode("red.async")
def reduce_async(op: Opcode) -> Action:
    op.pick("async")
    op.pick("relaxed")
    op.pick("cluster")
    op.pick("shared::cluster")
    op.pick("mbarrier::complete_tx::bytes")
    n = 64 if {"u64", "s64"} & {*op.rest} else 32
    how = reduction(op, "shared", "s64")

    def emit(g: Emitter, ins: Instruction) -> None:
        target, value, barrier = ins.operands
        word = g.word(value, n)
        word = word if n == 64 else g.op(f"zext i32 {word} to i64")
        where = g.address(target, "shared"), word, "0", str(n // 8), g.address(barrier, "shared")
        g.copying("rt_st_async", *where, str(how), str(g.site(ins)))

    return Action(emit, pure=False)


@opcode("barrier.cluster")
def cluster_barrier(op: Opcode) -> Action:
    op.pick("cluster")
    verb = op.pick("arrive", "wait")
    kind = abi.ClusterBarrier[verb.upper()] | (0 if op.flag("aligned") else abi.ClusterBarrier.UNALIGNED)
    if verb == "wait":
        op.flag("acquire")
    elif op.pick("release", "relaxed", default="release") == "relaxed":
        kind |= abi.ClusterBarrier.RELAXED

    def before(g: Emitter, ins: Instruction) -> int:
        g.put("op_a", f"i32 {abi.BARRIERS}")
        return g.suspend(ins, abi.Status.CLUSTER, kind)

    return Action(lambda g, ins: None, before=before, pure=False)
