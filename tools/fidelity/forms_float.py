# SPDX-License-Identifier: Apache-2.0
"""Instruction forms of floating-point arithmetic, roots, approximate functions, neg, abs, copysign and testp."""

from __future__ import annotations

from collections.abc import Iterator

from .forms import Form, alike, form, product

DIRECTED = (".rn", ".rz", ".rm", ".rp")
FTZ, SAT, NAN = ("", ".ftz"), ("", ".sat"), ("", ".NaN")


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
    yield from alike(product(("add", "sub", "mul"), ("", *DIRECTED), FTZ, SAT), "f32", 2)
    yield from alike(product(("fma", "mad"), DIRECTED, FTZ, SAT), "f32", 3)
    yield from alike(product(("div",), DIRECTED, FTZ), "f32", 2)
    yield from alike(product(("rcp", "sqrt"), DIRECTED, FTZ), "f32", 1)
    yield from alike(product(("neg", "abs"), FTZ), "f32", 1)
    yield from alike(product(("min", "max"), FTZ, NAN), "f32", 2)
    yield from alike(product(("min", "max"), NAN, (".xorsign.abs",)), "f32", 2)
    for op in ("div.approx", "div.full"):
        yield from alike(product((op,), FTZ), "f32", 2, op)
    for op in ("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos"):
        yield from alike(product((f"{op}.approx",), FTZ), "f32", 1, f"{op}.approx")
    yield from alike(("tanh.approx",), "f32", 1, "tanh.approx")


def _double() -> Iterator[Form]:
    yield from alike(product(("add", "sub"), ("", *DIRECTED)), "f64", 2, "nan")
    yield from alike(("mul", "div.rn", "mul.rn", "min", "max"), "f64", 2, "nan")
    yield from alike(("fma.rn", "mad.rn"), "f64", 3, "nan")
    yield from alike(("rcp.rn", "sqrt.rn", "neg", "abs"), "f64", 1, "nan")
    yield from alike(("rcp.approx.ftz", "rsqrt.approx.ftz"), "f64", 1, "gross")
    yield from alike(("rsqrt.approx",), "f64", 1, "rsqrt.approx.f64")


def _halves() -> Iterator[Form]:
    for t in ("f16", "f16x2"):
        yield from alike(product(("add", "sub", "mul"), ("", ".rn"), FTZ, SAT), t, 2)
        yield from alike(product(("fma.rn",), FTZ, ("", ".sat", ".relu")), t, 3)
        yield from alike(product(("neg", "abs"), FTZ), t, 1)
        yield from alike(product(("min", "max"), FTZ, NAN), t, 2)
        yield from alike(("ex2.approx",), t, 1, "ex2.half")
    for t in ("bf16", "bf16x2"):
        yield from alike(product(("add", "sub", "mul"), ("", ".rn")), t, 2)
        yield from alike(("fma.rn", "fma.rn.relu"), t, 3)
        yield from alike(("neg", "abs"), t, 1)
        yield from alike(product(("min", "max"), NAN), t, 2)
        yield from alike(("ex2.approx.ftz",), t, 1, "ex2.half")
    for t in ("f16", "f16x2", "bf16", "bf16x2"):
        yield from alike(("tanh.approx",), t, 1, "tanh.half")
