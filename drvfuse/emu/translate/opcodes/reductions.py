# SPDX-License-Identifier: Apache-2.0
"""The operations and types of asynchronous reductions (red.async, cp.reduce.async.bulk). The runtime executes these
reductions (`native/reduce.cuh`).
"""

from __future__ import annotations

from ... import abi
from ..opcode import Opcode, RefusedError

# operation -> (types allowed in shared and in global memory, types allowed only in global memory)
_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("and", "or", "xor"), (("b32",), ("b64",))),
    **dict.fromkeys(("min", "max"), (("u32", "s32"), ("u64", "s64", "f16", "bf16"))),
    **dict.fromkeys(("inc", "dec"), (("u32",), ())),
    "add": (("u32", "s32", "u64"), ("f16", "bf16", "f32", "f64")),
}


def reduction(op: Opcode, space: str, *more: str) -> int:
    """Consume the operation and the type of an asynchronous reduction in the state space `space`, and return its
    `Reduce` flags. `more` are types that the operation `add` may have besides those in `_TYPES`.
    """
    verb = op.pick(*_TYPES)
    shared, further = _TYPES[verb]
    halves = verb == "add" and op.flag("noftz")
    t = op.type()
    allowed = (*shared, *(further if space == "global" else ()), *(more if verb == "add" else ()))
    if t not in allowed or halves != (verb == "add" and t in ("f16", "bf16")):
        raise RefusedError(f"unsupported reduction .{verb}{'.noftz' if halves else ''}.{t} in {space} memory")
    return abi.REDUCES | int(abi.Reduce[verb.upper()]) | int(abi.Element[t.upper()]) << abi.ELEMENT_SHIFT
