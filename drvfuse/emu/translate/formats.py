# SPDX-License-Identifier: Apache-2.0
"""The formats of floating-point numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A number format. `width`, `exponent` and `mantissa` are numbers of bits; the other fields are values as bits, of
    which `nan` is the canonical NaN.
    """

    width: int
    exponent: int
    mantissa: int
    largest: int
    infinity: int
    nan: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1


FORMATS = {
    "f64": Format(64, 11, 52, 0x7FEF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
    "f32": Format(32, 8, 23, 0x7F7F_FFFF, 0x7F80_0000, 0x7FFF_FFFF),
    "tf32": Format(19, 8, 10, 0x3FBFF, 0x3FC00, 0x3FFFF),
    "f16": Format(16, 5, 10, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": Format(16, 8, 7, 0x7F7F, 0x7F80, 0x7FFF),
    "e4m3": Format(8, 4, 3, 0x7E, 0x7E, 0x7F),
    "e5m2": Format(8, 5, 2, 0x7B, 0x7C, 0x7F),
}
