# SPDX-License-Identifier: Apache-2.0
"""Instruction forms of integer arithmetic, of pairs of instructions that pass a carry, and of dot products."""

from __future__ import annotations

from collections.abc import Iterator

from .forms import Form, form

TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")
LONG = ("u32", "s32", "u64", "s64")


def forms() -> Iterator[Form]:
    for t in TYPES:
        i = f"i{t[1:]}"
        for op in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"):
            yield form(f"{op}.{t}", f"{i} {i}", i)
        yield form(f"sad.{t}", f"{i} {i} {i}", i)
        for part in ("lo", "hi"):
            yield form(f"mad.{part}.{t}", f"{i} {i} {i}", i)
        if t[0] == "s":
            yield form(f"abs.{t}", i, i)
            yield form(f"neg.{t}", i, i)
        if t[1:] != "64":
            wide = f"i{2 * int(t[1:])}"
            yield form(f"mul.wide.{t}", f"{i} {i}", wide)
            yield form(f"mad.wide.{t}", f"{i} {i} {wide}", wide)
        for divisor in (3, 7, 10, 641) if t[1:] != "16" else (3, 10):
            for op in ("div", "rem"):
                yield form(f"{op}.{t}", i, i, f"{op}.{t} r, x, {divisor};", note=f"by {divisor}")
    for op in ("add.sat", "sub.sat"):
        yield form(f"{op}.s32", "i32 i32", "i32")
    yield form("mad.hi.sat.s32", "i32 i32 i32", "i32")
    yield form("min.relu.s32", "i32 i32", "i32")
    yield form("max.relu.s32", "i32 i32", "i32")
    for t in ("u16x2", "s16x2"):
        for op in ("add", "min", "max"):
            yield form(f"{op}.{t}", "i32 i32", "i32")
    for op in ("min", "max"):
        yield form(f"{op}.relu.s16x2", "i32 i32", "i32")
    for t in ("u32", "s32"):
        for part in ("lo", "hi"):
            yield form(f"mul24.{part}.{t}", "i32 i32", "i32")
            yield form(f"mad24.{part}.{t}", "i32 i32 i32", "i32")
    yield form("mad24.hi.sat.s32", "i32 i32 i32", "i32")
    for a in ("u32", "s32"):
        for b in ("u32", "s32"):
            yield form(f"dp4a.{a}.{b}", "i32 i32 i32", "i32")
            for part in ("lo", "hi"):
                yield form(f"dp2a.{part}.{a}.{b}", "i32 i32 i32", "i32")
    yield from _carries()


def _carries() -> Iterator[Form]:
    """Pairs of instructions, of which the second uses the carry of the first.

    In add and sub each operand has two words: x low and y high, z low and w high.
    """
    for t in LONG:
        i = f"i{t[1:]}"
        low, high = ("t", "u") if i == "i32" else ("l", "m")
        both = f"mov.b64 r, {{{low}, {high}}};" if i == "i32" else f"mov.b64 r, {low}; mov.b64 s, {high};"
        result = "i64" if i == "i32" else "b128"
        for op in ("add", "sub"):
            head = f"{op}.cc.{t} {low}, x, z;"
            yield form(
                f"{op}c.{t}",
                f"{i} {i} {i} {i}",
                result,
                f"{head} {op}c.{t} {high}, y, w; {both}",
                note=f"after {op}.cc",
            )
            last = f"{head} {op}c.cc.{t} {high}, y, w; {op}c.{t} {low}, {low}, {low}; {both}"
            yield form(f"{op}c.cc.{t}", f"{i} {i} {i} {i}", result, last, note="then again")
        for part in ("lo", "hi"):
            head = f"mad.{part}.cc.{t} {low}, x, y, z;"
            yield form(
                f"madc.{part}.{t}", f"{i} {i} {i}", result, f"{head} madc.{part}.{t} {high}, y, z, x; {both}",
                note=f"after mad.{part}.cc",
            )  # fmt: skip
            last = f"{head} madc.{part}.cc.{t} {high}, y, z, x; addc.{t} {low}, {low}, {high}; {both}"
            yield form(f"madc.{part}.cc.{t}", f"{i} {i} {i}", result, last, note="then addc")
