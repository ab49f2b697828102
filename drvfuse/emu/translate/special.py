# SPDX-License-Identifier: Apache-2.0
"""The values of special registers such as `%tid.x`, most of which are members of the thread, block or launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import abi
from .opcode import RefusedError

if TYPE_CHECKING:
    from .operands import Operands

_HEADER = {
    "%laneid": ("t", "lane"),
    "%warpid": ("t", "warp"),
    "%dynamic_smem_size": ("launch", "smem_dynamic"),
    "%smid": ("block", "smid"),
    "%nsmid": ("launch", "sm_count"),
    "%envreg1": ("launch", "envreg1"),
    "%envreg2": ("launch", "envreg2"),
    "%cluster_ctarank": ("block", "cluster_rank"),
}
_INDICES = {"%tid": "t", "%ntid": "launch", "%ctaid": "block", "%nctaid": "launch"}
_AXES = ("x", "y", "z")


def special(g: Operands, name: str) -> tuple[str, int]:
    """(value, bits) of a special register."""
    if g.mode == "raw":
        raise RefusedError(f"the special register {name} is not available with raw=True")
    if name in _HEADER:
        return g.header(*_HEADER[name]), 32
    word, _, axis = name.partition(".")
    if word in _INDICES and axis in _AXES:
        return g.header(_INDICES[word], word[1:], _AXES.index(axis)), 32
    if name.startswith("%lanemask_"):
        lane = g.header("t", "lane")
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
        a = g.header("launch", "smem_dynamic")
        return g.op(f"add i32 {a}, {g.header('launch', 'shared_static')}"), 32
    return _cluster(g, name), 32


def _cluster(g: Operands, name: str) -> str:
    packed = g.header("launch", "cluster")
    if name == "%is_explicit_cluster":
        return g.op(f"zext i1 {g.op(f'icmp ne i32 {packed}, 0')} to i32")
    # A launch without clusters counts as a launch with clusters of one block.
    none = g.op(f"icmp eq i32 {packed}, 0")
    packed = g.op(f"select i1 {none}, i32 {0x010101}, i32 {packed}")
    dims = {}
    for i, axis in enumerate(_AXES):
        dims[axis] = g.op(f"and i32 {g.op(f'lshr i32 {packed}, {8 * i}')}, 255")
    if name == "%cluster_nctarank":
        return g.op(f"mul i32 {g.op('mul i32 ' + dims['x'] + ', ' + dims['y'])}, {dims['z']}")
    word, _, axis = name.partition(".")
    if axis not in _AXES:
        raise RefusedError(f"unsupported special register {name}")
    if word == "%cluster_nctaid":
        return dims[axis]
    if word == "%nclusterid":
        return g.op(f"udiv i32 {g.header('launch', 'nctaid', _AXES.index(axis))}, {dims[axis]}")
    index = g.header("block", "ctaid", _AXES.index(axis))
    return g.op(f"{'udiv' if word == '%clusterid' else 'urem'} i32 {index}, {dims[axis]}")
