# SPDX-License-Identifier: Apache-2.0
"""The opcodes that are not emulated, with the reasons. All other instructions of PTX for sm_90a are translated."""

from __future__ import annotations

_WGMMA = "wgmma is not emulated, mma.sync and wmma are"
_TENSOR_MEMORY = "tensor memory and its matrix instructions (tcgen05) are not emulated"
_TENSOR_MAPS = "tensor maps are not emulated, cp.async.bulk without .tensor is"
_TEXTURES = "textures and surfaces are not emulated"
_MATRICES = "a matrix instruction on {} operands is not emulated"

FAMILIES: dict[str, str] = {
    "wgmma": _WGMMA,
    "tcgen05": _TENSOR_MEMORY,
    "cp.async.bulk.tensor": _TENSOR_MAPS,
    "cp.async.bulk.prefetch.tensor": _TENSOR_MAPS,
    "cp.reduce.async.bulk.tensor": _TENSOR_MAPS,
    "tensormap": _TENSOR_MAPS,
    "fence.proxy.tensormap::generic": _TENSOR_MAPS,
    **dict.fromkeys(("tex", "tld4", "txq", "istypep", "suld", "sust", "sured", "suq"), _TEXTURES),
}
"""By the beginning of an opcode: why it is refused."""

OPERANDS: dict[str, str] = {
    "sp": "sparse",
    "sp::ordered_metadata": "sparse",
    "f64": "fp64",
    **dict.fromkeys(("s4", "u4", "e2m1"), "4-bit"),
    "b1": "1-bit",
}
"""The modifiers of mma and wmma that name refused types of operands."""


def refusal(opcode: str) -> str | None:
    """The reason why instructions with this opcode are not emulated, or None if the opcode is not refused."""
    for name, reason in FAMILIES.items():
        if opcode == name or opcode.startswith(name + "."):
            return reason
    base, *modifiers = opcode.split(".")
    if base in ("mma", "wmma"):
        found = next((OPERANDS[m] for m in modifiers if m in OPERANDS), None)
        return found and _MATRICES.format(found)
    return None
