# SPDX-License-Identifier: Apache-2.0
"""Fences: memory barriers, fences of proxies, and the fence after the initialisation of mbarriers."""

from __future__ import annotations

from ....ptx.ir import Instruction
from ... import abi
from ..emitter import Emitter
from ..opcode import Action, Opcode, opcode
from .access import ORDERS, scope_flags


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
