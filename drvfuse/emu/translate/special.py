# SPDX-License-Identifier: Apache-2.0
"""Special registers (`%tid.x`, ...): fields of the thread, block and launch, and the runtime's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import abi
from .opcode import RefusedError

if TYPE_CHECKING:
    from .emitter import Emitter

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


def special(g: Emitter, name: str) -> tuple[str, int]:
    """(value, bits) of a special register."""
    if g.mode == "raw":
        raise RefusedError(f"special register {name} in a raw module")
    if name in _HEADER:
        return g.header(*_HEADER[name]), 32
    if name.startswith("%lanemask_"):
        lane = g.header("t", abi.T_LANE)
        bit = g.op(f"shl i32 1, {lane}")
        kind = name[10:]
        if kind == "eq":
            return bit, 32
        below = g.op(f"sub i32 {bit}, 1")
        if kind == "lt":
            return below, 32
        upto = g.op(f"or i32 {below}, {bit}")
        if kind == "le":
            return upto, 32
        return g.op(f"xor i32 {upto if kind == 'gt' else below}, -1"), 32
    if name in ("%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%clock", "%clock_hi", "%clock64"):
        kind_ = abi.Clock.GLOBALTIMER if "timer" in name else abi.Clock.CLOCK
        value = g.runtime("rt_clock", "%t", str(int(kind_)))
        assert value is not None
        if name in ("%globaltimer", "%clock64"):
            return value, 64
        if name.endswith("_hi"):
            value = g.op(f"lshr i64 {value}, 32")
        return g.op(f"trunc i64 {value} to i32"), 32
    if name == "%nwarpid":
        return "64", 32
    if name.startswith("%envreg") or name == "%gridid":
        return "0", 64 if name == "%gridid" else 32
    if name in ("%total_smem_size", "%aggr_smem_size"):
        a = g.header("launch", abi.L_SMEM_DYNAMIC)
        return g.op(f"add i32 {a}, {g.header('launch', abi.L_SHARED_STATIC)}"), 32
    return _cluster(g, name), 32


def _cluster(g: Emitter, name: str) -> str:
    packed = g.header("launch", abi.L_CLUSTER)
    if name == "%is_explicit_cluster":
        return g.op(f"zext i1 {g.op(f'icmp ne i32 {packed}, 0')} to i32")
    # No cluster is a cluster of one block.
    none = g.op(f"icmp eq i32 {packed}, 0")
    packed = g.op(f"select i1 {none}, i32 {0x010101}, i32 {packed}")
    dims = {}
    for axis, shift in (("x", 0), ("y", 8), ("z", 16)):
        dims[axis] = g.op(f"and i32 {g.op(f'lshr i32 {packed}, {shift}')}, 255")
    if name == "%cluster_nctarank":
        return g.op(f"mul i32 {g.op('mul i32 ' + dims['x'] + ', ' + dims['y'])}, {dims['z']}")
    word, _, axis = name.partition(".")
    at = {"x": 0, "y": 4, "z": 8}.get(axis)
    if at is None:
        raise RefusedError(f"unsupported special register {name}")
    if word == "%cluster_nctaid":
        return dims[axis]
    if word == "%nclusterid":
        return g.op(f"udiv i32 {g.header('launch', abi.L_NCTAID_X + at)}, {dims[axis]}")
    index = g.header("block", abi.B_CTAID_X + at)
    return g.op(f"{'udiv' if word == '%clusterid' else 'urem'} i32 {index}, {dims[axis]}")
