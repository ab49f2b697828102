# SPDX-License-Identifier: Apache-2.0
"""Floating-point arithmetic, roots, approximate functions, sign and class."""

from __future__ import annotations

from collections.abc import Iterator

from .forms import Form, form, product

DIRECTED = (".rn", ".rz", ".rm", ".rp")


def forms() -> Iterator[Form]:
    yield from _single()
    yield from _double()
    yield from _halves()
    for t in ("f32", "f64"):
        yield form(f"copysign.{t}", f"{t} {t}", t)
        for verb in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            body = f"testp.{verb}.{t} p, x; selp.b32 r, 1, 0, p;"
            yield form(f"testp.{verb}.{t}", t, "i32", body)


def _single() -> Iterator[Form]:
    for op in ("add", "sub", "mul"):
        for modifiers in product(("", *DIRECTED), ("", ".ftz"), ("", ".sat")):
            yield form(f"{op}{modifiers}.f32", "f32 f32", "f32")
    for op in ("fma", "mad"):
        for modifiers in product(DIRECTED, ("", ".ftz"), ("", ".sat")):
            yield form(f"{op}{modifiers}.f32", "f32 f32 f32", "f32")
    for modifiers in product(DIRECTED, ("", ".ftz")):
        yield form(f"div{modifiers}.f32", "f32 f32", "f32")
        yield form(f"rcp{modifiers}.f32", "f32", "f32")
        yield form(f"sqrt{modifiers}.f32", "f32", "f32")
    for ftz in ("", ".ftz"):
        for op in ("neg", "abs"):
            yield form(f"{op}{ftz}.f32", "f32", "f32")
        for op in ("min", "max"):
            for nan in ("", ".NaN"):
                yield form(f"{op}{ftz}{nan}.f32", "f32 f32", "f32")
        yield form(f"div.approx{ftz}.f32", "f32 f32", "f32", rule="div.approx")
        yield form(f"div.full{ftz}.f32", "f32 f32", "f32", rule="div.full")
        for op in ("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos"):
            yield form(f"{op}.approx{ftz}.f32", "f32", "f32", rule=f"{op}.approx")
    yield form("tanh.approx.f32", "f32", "f32", rule="tanh.approx")
    for op in ("min", "max"):
        for nan in ("", ".NaN"):
            yield form(f"{op}{nan}.xorsign.abs.f32", "f32 f32", "f32")


def _double() -> Iterator[Form]:
    for op in ("add", "sub"):
        for mode in ("", *DIRECTED):
            yield form(f"{op}{mode}.f64", "f64 f64", "f64", rule="nan")
    for op in ("mul", "div.rn", "mul.rn"):
        yield form(f"{op}.f64", "f64 f64", "f64", rule="nan")
    for op in ("fma.rn", "mad.rn"):
        yield form(f"{op}.f64", "f64 f64 f64", "f64", rule="nan")
    for op in ("rcp.rn", "sqrt.rn"):
        yield form(f"{op}.f64", "f64", "f64", rule="nan")
    for op in ("neg", "abs"):
        yield form(f"{op}.f64", "f64", "f64", rule="nan")
    for op in ("min", "max"):
        yield form(f"{op}.f64", "f64 f64", "f64", rule="nan")
    yield form("rcp.approx.ftz.f64", "f64", "f64", rule="gross")
    yield form("rsqrt.approx.ftz.f64", "f64", "f64", rule="gross")
    yield form("rsqrt.approx.f64", "f64", "f64", rule="rsqrt.approx.f64")


def _halves() -> Iterator[Form]:
    for t in ("f16", "f16x2"):
        for op in ("add", "sub", "mul"):
            for modifiers in product(("", ".rn"), ("", ".ftz"), ("", ".sat")):
                yield form(f"{op}{modifiers}.{t}", f"{t} {t}", t)
        for modifiers in product(("", ".ftz"), ("", ".sat", ".relu")):
            yield form(f"fma.rn{modifiers}.{t}", f"{t} {t} {t}", t)
        for ftz in ("", ".ftz"):
            for op in ("neg", "abs"):
                yield form(f"{op}{ftz}.{t}", t, t)
            for op in ("min", "max"):
                for nan in ("", ".NaN"):
                    yield form(f"{op}{ftz}{nan}.{t}", f"{t} {t}", t)
        yield form(f"ex2.approx.{t}", t, t, rule="ex2.half")
        yield form(f"tanh.approx.{t}", t, t, rule="tanh.half")
    for t in ("bf16", "bf16x2"):
        for op in ("add", "sub", "mul"):
            for mode in ("", ".rn"):
                yield form(f"{op}{mode}.{t}", f"{t} {t}", t)
        for relu in ("", ".relu"):
            yield form(f"fma.rn{relu}.{t}", f"{t} {t} {t}", t)
        for op in ("neg", "abs"):
            yield form(f"{op}.{t}", t, t)
        for op in ("min", "max"):
            for nan in ("", ".NaN"):
                yield form(f"{op}{nan}.{t}", f"{t} {t}", t)
        yield form(f"ex2.approx.ftz.{t}", t, t, rule="ex2.half")
        yield form(f"tanh.approx.{t}", t, t, rule="tanh.half")
