# SPDX-License-Identifier: Apache-2.0
"""Conversions of addresses between state spaces, and tests of the state space of an address."""

from __future__ import annotations

from ....ptx.ir import Instruction
from ..emitter import Emitter
from ..opcode import Action, Opcode, opcode
from .access import SPACES


def in_cluster(g: Emitter, address: str) -> str:
    """Emit the test whether a generic address is in the shared memory of any block of the thread's cluster. Returns an
    i1.
    """
    total = g.op(f"zext i32 {g.header('launch', 'cluster_window')} to i64")
    return g.op(f"icmp ult i64 {g.op(f'sub i64 {address}, %window')}, {total}")


def _in_shared(g: Emitter, address: str) -> str:
    """Emit the test whether a generic address is in the shared memory of the thread's block. Returns an i1."""
    static = g.header("launch", "shared_static")
    total = g.op(f"zext i32 {g.op(f'add i32 {static}, ' + g.header('launch', 'smem_dynamic'))} to i64")
    return g.op(f"icmp ult i64 {g.op(f'sub i64 {address}, %shared')}, {total}")


@opcode("cvta")
def cvta(op: Opcode) -> Action:
    """Convert between generic addresses and those of a state space. An address in .shared is an offset in the cluster's
    shared memory. An address in .local is an offset in the thread's local memory.
    """
    to_space = op.flag("to")
    space = op.pick(*SPACES).split("::")[0]
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
    space = op.pick(*SPACES)
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
            r = in_cluster(g, x)
        elif space == "local":
            r = inside("%local", str(g.local_bytes))
        elif space == "param":
            r = inside("%params", str(g.unit.param_bytes(g.fn)))
        elif space == "const":
            r = "false"
        else:
            either = g.op(f"or i1 {in_cluster(g, x)}, {inside('%local', str(g.local_bytes))}")
            r = g.op(f"xor i1 {either}, true")
        g.set_pred(d, r)

    return Action(emit)
