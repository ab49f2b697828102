# SPDX-License-Identifier: Apache-2.0
"""Instruction forms of cvt between every pair of types, with every rounding, .sat and .ftz, and forms of cvt.pack."""

from __future__ import annotations

from collections.abc import Iterator

from .forms import Form, form, product

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
NEAREST = (".rni", ".rzi", ".rmi", ".rpi")
DIRECTED = (".rn", ".rz", ".rm", ".rp")


def kind(integer: str) -> str:
    """The operand kind of an integer type."""
    return f"i{integer[1:]}"


def held(integer: str) -> str:
    """The kind of register that holds a result of an integer type. A result of 8 bits is in a register of 32 bits."""
    return "i32" if integer[1:] == "8" else f"i{integer[1:]}"


def forms() -> Iterator[Form]:
    yield from _integers()
    yield from _reals_and_integers()
    yield from _reals()
    yield from _pairs()
    for t in ("u16", "s16"):
        yield form(f"cvt.pack.sat.{t}.s32", "i32 i32", "i32")
    for t in ("u8", "s8"):
        yield form(f"cvt.pack.sat.{t}.s32.b32", "i32 i32 i32", "i32")


def _integers() -> Iterator[Form]:
    for target in INTEGERS:
        for source in INTEGERS:
            yield form(f"cvt.{target}.{source}", kind(source), held(target))
            if not _contains(target, source):
                yield form(f"cvt.sat.{target}.{source}", kind(source), held(target))


def _contains(target: str, source: str) -> bool:
    """Whether `target` has every value of `source`; PTX then allows no `.sat`."""
    n, m = int(target[1:]), int(source[1:])
    return n >= m if target[0] == source[0] else target[0] == "s" and n > m


def _reals_and_integers() -> Iterator[Form]:
    for t in INTEGERS:
        halves = ("f16",) if t[1:] == "8" else ("f16", "bf16")
        for source in (*halves, "f32", "f64"):
            for modifiers in product(NEAREST, ("", ".ftz") if source == "f32" else ("",)):
                yield form(f"cvt{modifiers}.{t}.{source}", source, held(t))
        for target in (*halves, "f32", "f64"):
            for mode in DIRECTED:
                yield form(f"cvt{mode}.{target}.{t}", kind(t), target)
        for target in ("f16", "f32", "f64"):
            yield form(f"cvt.rn.sat.{target}.{t}", kind(t), target)


def _reals() -> Iterator[Form]:
    for target in ("f16", "bf16"):
        for mode in DIRECTED:
            yield form(f"cvt{mode}.{target}.f64", "f64", target)
            yield form(f"cvt{mode}.{target}.f32", "f32", target)
        for modifiers in product((".rn", ".rz"), (".relu", ".satfinite", ".relu.satfinite")):
            yield form(f"cvt{modifiers}.{target}.f32", "f32", target)
    for modifiers in product(DIRECTED, (".ftz", ".sat", ".ftz.sat")):
        yield form(f"cvt{modifiers}.f16.f32", "f32", "f16")
    for mode in DIRECTED:
        yield form(f"cvt{mode}.sat.f16.f64", "f64", "f16")
        for modifiers in product((mode,), ("", ".ftz"), ("", ".sat")):
            yield form(f"cvt{modifiers}.f32.f64", "f64", "f32")
    for modifiers in product(("", ".ftz"), ("", ".sat")):
        yield form(f"cvt{modifiers}.f32.f16", "f16", "f32")
        yield form(f"cvt{modifiers}.f64.f32", "f32", "f64", rule="nan")
    for sat in ("", ".sat"):
        yield form(f"cvt{sat}.f64.f16", "f16", "f64", rule="nan")
    yield form("cvt.f32.bf16", "bf16", "f32")
    yield form("cvt.f64.bf16", "bf16", "f64", rule="nan")
    for modifiers in product(NEAREST, ("", ".ftz"), ("", ".sat")):
        yield form(f"cvt{modifiers}.f32.f32", "f32", "f32")
    for modifiers in product(NEAREST, ("", ".sat")):
        yield form(f"cvt{modifiers}.f64.f64", "f64", "f64", rule="nan")
        yield form(f"cvt{modifiers}.f16.f16", "f16", "f16")
    for mode in NEAREST:
        yield form(f"cvt{mode}.bf16.bf16", "bf16", "bf16")
    for sat in (".sat", ".ftz.sat", ".ftz"):
        yield form(f"cvt{sat}.f32.f32", "f32", "f32")
    yield form("cvt.sat.f64.f64", "f64", "f64", rule="nan")
    for modifiers in (".rna", ".rn", ".rz", ".rn.relu", ".rz.relu"):
        yield form(f"cvt{modifiers}.tf32.f32", "f32", "i32")


def _pairs() -> Iterator[Form]:
    for target in ("f16x2", "bf16x2"):
        for modifiers in product((".rn", ".rz"), ("", ".relu", ".satfinite", ".relu.satfinite")):
            yield form(f"cvt{modifiers}.{target}.f32", "f32 f32", target)
    for target in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            yield form(f"cvt.rn.satfinite{relu}.{target}.f32", "f32 f32", target)
            yield form(f"cvt.rn.satfinite{relu}.{target}.f16x2", "f16x2", target)
            yield form(f"cvt.rn{relu}.f16x2.{target}", target, "f16x2")
