# SPDX-License-Identifier: Apache-2.0
"""Operands of matrix products, in tiles: the first tile is made by the first of MODES, the second by the second, and so
on, cyclically.

A tile is A [m, k], B [k, n] and C [m, n] of one product, as bits. As in `operands`, they are computed with integers.
A mode makes tiles for one difficulty, such as cancellation or underflow; its docstring describes the tile.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from drvfuse.ptx.fragments import Shape

from .operands import FORMATS, Format, Stream, Words

_FORMATS = FORMATS | {"tf32": FORMATS["f32"]}  # a tf32 register has the bits of an f32, whose low 13 are ignored
Tile = tuple[Words, Words, Words]


class _Maker:
    """Makes the numbers of one tile from a stream of random words."""

    def __init__(self, stream: Stream, shape: Shape, kinds: tuple[str, str, str]) -> None:
        self.stream, self.shape = stream, shape
        self.a, self.b, self.c = (_FORMATS[k] for k in kinds)

    def random(self, f: Format, shape: tuple[int, int]) -> Words:
        return (self.stream.words(shape[0] * shape[1]) & np.uint64((1 << f.width) - 1)).reshape(shape)

    def number(self, f: Format, shape: tuple[int, int], low: int, high: int, bits: int | None = None) -> Words:
        """Random finite numbers with at most `bits` bits of mantissa. Their unbiased exponents are in low..high, as far
        as the format has such exponents."""
        count = shape[0] * shape[1]
        exponent = self.stream.below(count, high - low + 1).astype(np.int64) + (low + f.bias)
        top = f.top - 1 if f.width > 8 or f.mantissa == 2 else f.top
        exponent = np.clip(exponent, 0, top).astype(np.uint64)
        mantissa = self.stream.words(count) & np.uint64((1 << f.mantissa) - 1)
        if bits is not None and bits < f.mantissa:
            drop = np.uint64(f.mantissa - bits)
            mantissa = mantissa >> drop << drop
        if f is FORMATS["e4m3"]:
            # exponent 15 with mantissa 7 is NaN
            mantissa = np.where(exponent == top, mantissa & np.uint64(6), mantissa)
        sign = self.stream.below(count, 2) << np.uint64(f.width - 1)
        return (sign | exponent << np.uint64(f.mantissa) | mantissa).reshape(shape)

    def some(self, shape: tuple[int, int], one_in: int) -> np.ndarray:
        return (self.stream.below(shape[0] * shape[1], one_in) == 0).reshape(shape)

    def tile(self, a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> Tile:
        shape = self.shape
        return (
            self.number(self.a, shape.of("a"), *a),
            self.number(self.b, shape.of("b"), *b),
            self.number(self.c, shape.of("c"), *c),
        )


def _bits(m: _Maker) -> Tile:
    return tuple(m.random(f, m.shape.of(w)) for f, w in ((m.a, "a"), (m.b, "b"), (m.c, "c")))  # type: ignore[return-value]


def _finite(m: _Maker) -> Tile:
    return m.tile((-m.a.bias, m.a.bias), (-m.b.bias, m.b.bias), (-m.c.bias, m.c.bias))


def _near(m: _Maker) -> Tile:
    return m.tile((-2, 2), (-2, 2), (-3, 3))


def _greater_c(m: _Maker) -> Tile:
    return m.tile((-3, 3), (-3, 3), (0, 30))


def _spread(m: _Maker) -> Tile:
    return m.tile((-12, 12), (-12, 12), (-24, 24))


def _sparse(m: _Maker) -> Tile:
    a, b, c = m.tile((-4, 4), (-4, 4), (-8, 8))
    a[~m.some(a.shape, 4)] &= np.uint64(m.a.sign)
    c[m.some(c.shape, 2)] &= np.uint64(m.c.sign)
    return a, b, c


def _cancel(m: _Maker, a: Words, b: Words) -> Words:
    """Change `a` and `b` so that the products cancel in pairs. Returns the indices k in a random order, in which
    elements i and i + K / 2 are the indices of a pair."""
    half = m.shape.k // 2
    order = np.argsort(m.stream.words(m.shape.k), kind="stable")
    first, second = order[:half], order[half : 2 * half]
    a[:, second], b[second] = a[:, first] ^ np.uint64(m.a.sign), b[first]
    return order


def _cancelling(m: _Maker) -> Tile:
    """A tile whose products cancel in pairs, except at two values of k, where the products are smaller."""
    a, b, c = m.tile((-3, 3), (-3, 3), (-30, -10))
    order = _cancel(m, a, b)
    rest = m.stream.choose(order.astype(np.uint64), 2).astype(int)
    a[:, rest] = m.number(m.a, (m.shape.m, 2), -12, 0)
    b[rest] = m.number(m.b, (2, m.shape.n), -12, 0)
    return a, b, c


def _cancelling_c(m: _Maker) -> Tile:
    """A tile in which each sum has one large product, and C is close to the negative of this product."""
    a, b, c = m.tile((-14, -6), (-14, -6), (0, 0))
    k = int(m.stream.below(1, m.shape.k)[0])
    exponent = int(m.stream.below(1, 5)[0])
    a[:, k] = m.number(m.a, (m.shape.m, 1), exponent, exponent)[:, 0]
    b[k] = m.number(m.b, (1, m.shape.n), 0, 0)[0]

    def significand(x: Words, f: Format) -> Words:
        return x & np.uint64((1 << f.mantissa) - 1) | np.uint64(1 << f.mantissa)

    product = significand(a[:, k : k + 1], m.a) * significand(b[k : k + 1], m.b)
    bits = m.a.mantissa + m.b.mantissa
    carry = product >> np.uint64(bits + 1)
    product = np.where(carry == 1, product, product << np.uint64(1))  # the leading 1 is now bit `bits + 1`
    shift = bits + 1 - m.c.mantissa
    product = product >> np.uint64(shift) if shift >= 0 else product << np.uint64(-shift)
    sign = (a[:, k : k + 1] >> np.uint64(m.a.width - 1)) ^ (b[k : k + 1] >> np.uint64(m.b.width - 1)) ^ np.uint64(1)
    fraction = product & np.uint64((1 << m.c.mantissa) - 1)
    c = (
        sign << np.uint64(m.c.width - 1)
        | (carry + np.uint64(exponent + m.c.bias)) << np.uint64(m.c.mantissa)
        | fraction
    )
    nudge = m.stream.below(c.size, 4).reshape(c.shape)
    return a, b, c + np.where(nudge == 1, np.uint64(1), np.uint64(0)) - np.where(nudge == 2, np.uint64(1), np.uint64(0))


def _subnormal(m: _Maker) -> Tile:
    return m.tile((-m.a.bias, -m.a.bias), (-m.b.bias, m.b.bias), (-m.c.bias, 2 - m.c.bias))


def _underflow(m: _Maker) -> Tile:
    """Results are close to the least normal or subnormal number of their type, or as small as the operands allow."""
    least = -m.c.bias - 6
    a = max(least // 2, -m.a.bias)
    b = max(least - a, -m.b.bias)
    return m.tile((a - 6, a + 6), (b - 6, b + 6), (-m.c.bias, 4 - m.c.bias))


def _overflow(m: _Maker) -> Tile:
    a = min(m.c.bias // 2, m.a.bias)
    b = min(m.c.bias - a, m.b.bias)
    return m.tile((a - 2, a), (b - 2, b), (m.c.bias - 3, m.c.bias))


def _special(m: _Maker) -> Tile:
    """A tile with some NaN, infinities and zeros among ordinary numbers."""
    tile = _near(m)
    for x, f, count in zip(tile, (m.a, m.b, m.c), (3, 2, 8), strict=True):
        infinity = f.top << f.mantissa if f.width > 8 or f.mantissa == 2 else 0
        nan = infinity + 1 if infinity else 0x7F
        quiet = infinity | (1 << f.mantissa) - 1 if infinity else 0x7F
        pool = [v | s for v in (infinity, infinity, nan, quiet, 0) for s in (0, f.sign)]
        at = m.stream.below(count, x.size).astype(int)
        x.reshape(-1)[at] = m.stream.choose(np.array(pool, np.uint64), count)
    return tile


def _zeros(m: _Maker) -> Tile:
    """A tile whose elements are zeros and ones, of both signs."""
    found = []
    for f, which, one_in in ((m.a, "a", 8), (m.b, "b", 4), (m.c, "c", 8)):
        rows, columns = m.shape.of(which)
        x = (m.stream.below(rows * columns, 2) << np.uint64(f.width - 1)).reshape(rows, columns)
        if which == "a":
            x[: rows // 2] = x[: rows // 2, :1]  # all elements of these rows have one sign
        if which == "b":
            x[:, : columns // 2] = x[:1, : columns // 2]
        x[m.some(x.shape, one_in)] |= np.uint64(f.bias << f.mantissa)
        found.append(x)
    return tuple(found)  # type: ignore[return-value]


def _ties(m: _Maker) -> Tile:
    """Elements have few significant bits, and some elements are far smaller than the others, so that sums end in half a
    unit in the last place."""
    s = m.shape
    a, b, c = m.number(m.a, s.of("a"), -1, 1, 1), m.number(m.b, s.of("b"), -1, 1, 1), m.number(m.c, s.of("c"), 0, 3)
    few = min(4, s.k)
    at = np.argsort(m.stream.words(s.k), kind="stable")
    a[:, at[few:]] &= np.uint64(m.a.sign)
    step = min(m.c.mantissa + 1, m.a.bias + m.a.mantissa - 1)
    a[:, at[0]] = m.number(m.a, (s.m, 1), -min(step, 14), -min(step, 14) + 3, 1)[:, 0]
    if m.c.mantissa > 10:
        b[at[0]] = m.number(m.b, (1, s.n), -12, -9, 1)[0]
    return a, b, c


def _below_product(m: _Maker) -> Tile:
    """One product is large; the others are smaller by factors of 2^18 to 2^30, or as far as the operands allow."""
    a, b, c = m.tile((-15, -9), (-15, -9), (-30, -18))
    k = int(m.stream.below(1, m.shape.k)[0])
    a[:, k] = m.number(m.a, (m.shape.m, 1), 0, 1)[:, 0]
    b[k] = m.number(m.b, (1, m.shape.n), 0, 1)[0]
    c[m.some(c.shape, 2)] = 0
    return a, b, c


def _below_c(m: _Maker) -> Tile:
    """A tile with a large C. The products are smaller by factors of 2^18 to 2^30, or as far as the operands allow."""
    return m.tile((-7, -3), (-7, -3), (10, 15))


def _vanishing(m: _Maker) -> Tile:
    """A tile whose C is zero, and whose products are near or below the least number of the format of C. The products
    have both signs, or all the same sign."""
    least = -m.c.bias - m.c.mantissa - 2
    a = max(least // 2, -m.a.bias)
    b = max(least - a, -m.b.bias)
    tile = m.tile((a - 3, a + 1), (b - 3, b + 1), (0, 0))
    if m.stream.below(1, 2)[0]:
        tile[0][:] |= np.uint64(m.a.sign)
        tile[1][:] &= np.uint64(m.b.sign - 1)
    tile[0][m.some(tile[0].shape, 2)] &= np.uint64(m.a.sign)
    tile[2][:] &= np.uint64(m.c.sign)
    return tile


def _zero_by_great(m: _Maker) -> Tile:
    """Half of the products have a zero and a large factor; the others, and C, are small."""
    a, b, c = m.tile((-m.a.bias // 2, -m.a.bias // 2 + 3), (-m.b.bias // 2, -m.b.bias // 2 + 3), (-m.c.bias, -14))
    at = np.argsort(m.stream.words(m.shape.k), kind="stable")[::2]
    for k in at.tolist():
        a[:, k] &= np.uint64(m.a.sign)
        b[k] = m.number(m.b, (1, m.shape.n), m.b.bias - 2, m.b.bias)[0]
    c[m.some(c.shape, 2)] &= np.uint64(m.c.sign)
    return a, b, c


def _edge(m: _Maker) -> Tile:
    """C is the greatest number or just below, and the products are about half a unit in its last place."""
    place = m.c.bias - m.c.mantissa - 1
    a = min(place // 2, m.a.bias)
    b = min(place - a, m.b.bias)
    tile = m.tile((a - 3, a), (b - 3, b), (0, 0))
    greatest = np.uint64((m.c.top << m.c.mantissa) - 1)
    sign = m.stream.below(tile[2].size, 2) << np.uint64(m.c.width - 1)
    tile[2][:] = (greatest - m.stream.below(tile[2].size, 2) | sign).reshape(tile[2].shape)
    tile[0][m.some(tile[0].shape, 2)] &= np.uint64(m.a.sign)
    return tile


def _beyond(m: _Maker) -> Tile:
    """A tile whose products are as large as the operands allow. All but a few products cancel in pairs, and C has any
    magnitude."""
    a, b, c = m.tile((m.a.bias - 3, m.a.bias), (m.b.bias - 3, m.b.bias), (-m.c.bias, m.c.bias))
    _cancel(m, a, b)
    a[m.some(a.shape, 64)] ^= np.uint64(1)
    return a, b, c


MODES: dict[str, Callable[[_Maker], Tile]] = {
    "bits": _bits, "finite": _finite, "near": _near, "greater c": _greater_c, "spread": _spread, "sparse": _sparse,
    "cancelling": _cancelling, "cancelling c": _cancelling_c, "subnormal": _subnormal, "underflow": _underflow,
    "overflow": _overflow, "special": _special, "zeros": _zeros, "ties": _ties, "below product": _below_product,
    "below c": _below_c, "vanishing": _vanishing, "zero by great": _zero_by_great, "edge": _edge,
    "beyond": _beyond,
}  # fmt: skip


def _integers(stream: Stream, shape: Shape, kinds: tuple[str, str, str], mode: int) -> Tile:
    """A and B have 8-bit integers: random, extreme or small. C has 32-bit ones: random, small, or near their limits."""
    found = []
    for which in ("a", "b"):
        size = shape.of(which)
        x = stream.words(size[0] * size[1]) & np.uint64(0xFF)
        if mode % 4 == 1:
            x = stream.choose(np.array([0x80, 0x7F, 0xFF, 0, 1], np.uint64), x.size)
        if mode % 4 == 2:
            x = stream.choose(np.array([0x80, 0xFF, 0x7F], np.uint64), 1).repeat(x.size)
        if mode % 4 == 3:
            x[stream.below(x.size, 4) != 0] = 0
        found.append(x.reshape(size))
    size = shape.of("c")
    c = stream.words(size[0] * size[1]) & np.uint64(0xFFFFFFFF)
    if mode % 3 == 1:
        c = stream.below(c.size, 1 << 20) - np.uint64(1 << 19) & np.uint64(0xFFFFFFFF)
    if mode % 3 == 2:
        c = (stream.below(c.size, 2) << np.uint64(31)) - stream.below(c.size, 1 << 19) + stream.below(c.size, 1 << 19)
    return found[0], found[1], (c & np.uint64(0xFFFFFFFF)).reshape(size)


def tiles(name: str, shape: Shape, kinds: tuple[str, str, str], count: int) -> list[Tile]:
    """`count` tiles (A, B, C) whose elements have the types `kinds`. The random values depend on `name` alone."""
    stream = Stream("tiles " + name)
    if kinds[2] == "s32":
        return [_integers(stream, shape, kinds, i) for i in range(count)]
    makers = list(MODES.values())
    return [makers[i % len(makers)](_Maker(stream, shape, kinds)) for i in range(count)]
