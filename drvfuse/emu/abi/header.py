# SPDX-License-Identifier: Apache-2.0
"""The numbers and structures of the package `abi` as a C++ header, which the sources of the native runtime include."""

from __future__ import annotations

from .. import abi
from . import race_structs, structs  # noqa: F401  (they register their declarations)
from .layout import DECLARATIONS, ENUMS

HEADER_NAME = "abi.cuh"
"""The name by which C++ sources include the header."""

CONSTANTS: dict[str, tuple[str, ...]] = {
    "u32": (
        *("SHADOW_ADDRESSABLE", "SHADOW_INITIALISED", "GRANULE_SHIFT", "LINE_SHIFT", "POOL_SHIFT", "KIND_INITIALISED"),
        *("KIND_FULL", "LOOP_SLICE", "EVENTS", "WRITES", "BARRIERS", "POLL_WORDS", "POLL_COUNT", "NO_SITE"),
        *("CLUSTER_SHIFT", "PIECE_SHIFT", "MEMBERS", "ELEMENT_SHIFT", "ACCUMULATE_SHIFT", "REDUCES"),
        *("SCOPE_SHIFT", "ORDER_SHIFT", "SPACE_SHIFT", "ELEMENTS_SHIFT", "UNREAD_SHIFT"),
        *(
            "MBARRIER_EXPECTED_SHIFT",
            "MBARRIER_BYTES_SHIFT",
            "FOUND_RACES",
            "DOUBTS",
            "KNOWN_OPS",
            "MISSED_FLAGS",
            "NOTICES",
        ),
    ),
    "u64": (
        *("SHADOW_OFFSET", "MBARRIER_COUNT_MASK", "MBARRIER_BYTES_MASK"),
        *("MBARRIER_PARITY", "MBARRIER_USED", "MBARRIER_VALID"),
    ),
}
"""Names of constants of this package that C++ has too, by their type in C++."""


def header() -> str:
    """The text of the header: types, enums, constants, then the structures in the order of their declarations."""
    lines = ["// From drvfuse/emu/abi/header.py.", "#pragma once", "typedef unsigned char u8;", "typedef int s32;"]
    lines += ["typedef unsigned int u32;", "typedef unsigned long long u64;"]
    lines.append("typedef u32 Ref;  // of a piece of the race detector's arena, in units of 32 bytes; 0: none")
    for enum, prefix in ENUMS.items():
        lines.append(f"enum {{ {', '.join(f'{prefix}{member.name} = {member.value}' for member in enum)} }};")
    for type_, names in CONSTANTS.items():
        lines += [f"const {type_} {name} = {getattr(abi, name):#x};" for name in names]
    pointers = {d.split("* ")[0] for declarations in DECLARATIONS.values() for d in declarations if "* " in d}
    lines += [f"struct {name};" for name in sorted({*DECLARATIONS, *pointers} - {"u8", "u32", "u64", "void", "Ref"})]
    for name, declarations in DECLARATIONS.items():
        lines += [f"struct {name} {{", *(f"    {declaration};" for declaration in declarations), "};"]
    return "\n".join(lines) + "\n"
