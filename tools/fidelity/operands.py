# SPDX-License-Identifier: Apache-2.0
"""The operands of instruction forms: combinations of edge values, related values (ties, cancellation, overflow) and
random bits.

All operands are computed with integers from a counter, so that every version of numpy gives the same ones.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from dataclasses import dataclass

import numpy as np

Words = np.ndarray  # uint64: one operand each, in the low bits

LANES = 32


@dataclass(frozen=True)
class Format:
    """A floating-point format by the widths of its fields in bits."""

    width: int
    exponent: int
    mantissa: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def top(self) -> int:
        """The exponent of infinities and NaN."""
        return (1 << self.exponent) - 1

    @property
    def sign(self) -> int:
        return 1 << (self.width - 1)


FORMATS = {
    "f64": Format(64, 11, 52),
    "f32": Format(32, 8, 23),
    "f16": Format(16, 5, 10),
    "bf16": Format(16, 8, 7),
    "e4m3": Format(8, 4, 3),
    "e5m2": Format(8, 5, 2),
}
PAIRS = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}

# The bits of the register, for operand kinds that are not formats. "i8": 8 bits of the register are read. "amount": a
# shift amount or the position of a field. "bit": 0 or 1. "few": edge values, so that lanes of a warp have equal ones.
# "uniform": all lanes of a warp have the same value, in half of the warps. "clamp": the last operand of shfl.
_WIDTHS = {"i8": 32, "i16": 16, "i32": 32, "i64": 64, "amount": 32, "bit": 32, "few": 32, "few64": 64}
_WIDTHS |= {"uniform": 32, "uniform64": 64, "clamp": 32}


def width(kind: str) -> int:
    """The number of bits of an operand or result of that kind."""
    if kind in PAIRS:
        return 2 * FORMATS[PAIRS[kind]].width
    return FORMATS[kind].width if kind in FORMATS else _WIDTHS[kind]


class Stream:
    """Random words that depend on the name alone (splitmix64 over a counter)."""

    def __init__(self, name: str) -> None:
        self._next = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")

    def words(self, count: int) -> Words:
        step = 0x9E3779B97F4A7C15
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(step) + np.uint64(self._next)
        self._next = (self._next + step * count) % (1 << 64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def below(self, count: int, bound: int) -> Words:
        return (self.words(count) >> np.uint64(11)) % np.uint64(bound)

    def choose(self, pool: Words, count: int) -> Words:
        return pool[self.below(count, len(pool)).astype(np.int64)]

    def shuffled(self, values: Words) -> Words:
        return values[np.argsort(self.words(len(values)), kind="stable")]


# Pools --------------------------------------------------------------------------------------------------------------
def _unique(values: list[int], bits: int) -> Words:
    mask = (1 << bits) - 1
    return np.array(list(dict.fromkeys(v & mask for v in values)), np.uint64)


def _number(f: Format, value: float) -> int:
    """The bits of a positive number, rounded down to a number of the format."""
    mantissa, exponent = math.frexp(value)
    e = exponent - 1 + f.bias
    if e >= f.top:
        return (f.top << f.mantissa) - 1
    if e < 1:
        return int(value * 2.0 ** (f.bias - 1 + f.mantissa)) if f.width < 64 else 1
    return (e << f.mantissa) + int((mantissa * 2 - 1) * (1 << f.mantissa))


@functools.cache
def _edges(kind: str) -> Words:
    """All edge values of a kind."""
    if kind in PAIRS:
        half = _edges(PAIRS[kind])
        other = Stream(f"edges {kind}").shuffled(half)
        return half | other << np.uint64(FORMATS[PAIRS[kind]].width)
    if kind in FORMATS:
        f = FORMATS[kind]
        one, unit = f.bias << f.mantissa, 1 << f.mantissa
        infinity = f.top << f.mantissa
        positive = [0, 1, 2, unit // 2, unit - 1, unit, unit + 1, 2 * unit - 1, 2 * unit]
        positive += [one, one + 1, one - 1, one + unit // 2, one + unit, one + unit - 1, one - unit, one - unit // 2]
        positive += [infinity - 1, infinity - 2, infinity - unit, infinity, infinity + 1, infinity + unit // 2]
        positive += [infinity + unit // 2 + 1, infinity + unit - 1, infinity + unit // 4]
        for value in (0.25, 0.5, 1.5, 2.5, 3.5, 126.5, 127, 127.5, 128, 240, 255, 255.5, 256, 448, 464, 480, 57344):
            positive.append(_number(f, value))
        for value in (61440, 65504, 65520, 65535, 65536, 32767, 32767.5, 32768, 65535.5, *(2.0**k for k in _POWERS)):
            positive += [_number(f, value) + k for k in (-1, 0, 1)]
        # numbers just below the least normal number of each narrower format
        for narrow in (FORMATS["f32"], FORMATS["f16"], FORMATS["bf16"]):
            if narrow.mantissa < f.mantissa - 3 and narrow.bias <= f.bias:
                least = (1 - narrow.bias + f.bias) << f.mantissa
                half = 1 << f.mantissa - narrow.mantissa - 1
                positive += [least - k for k in (1, half // 2, half // 2 + 1, half - 1, half, half + 1, 3 * half // 4)]
        return _unique(positive + [p | f.sign for p in positive], f.width)
    bits = width(kind)
    if kind == "amount":
        values = [*range(256), 256, 257, 511, 0x10000, 0x10003, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x01010101]
    elif kind == "clamp":
        values = [0x1F, 0, 0x1C1F, 0x181F, 0x100F, 0x1F1F, 0x0010, 0x1E1F, 0x0107, 0xFFFFFFFF]
    elif kind == "bit":
        values = [0, 1]
    elif kind in ("few", "few64", "uniform", "uniform64"):
        values = [0, 1, (1 << bits) - 1, 1 << (bits - 1)]
    else:
        n = 8 if kind == "i8" else bits
        values = [0, 1, 2, 3, 5, 7, 10, 100, 0x5A, 0xA5, (1 << n) // 3]
        for k in range(1, n + 1):
            values += [1 << k, (1 << k) - 1, (1 << k) + 1, -(1 << k), -(1 << k) - 1, 1 - (1 << k)]
        if kind == "i8":  # with and without bits above the byte, which must not matter
            values = [v & 0xFF | (k * 0x9E3779) << 8 for k, v in enumerate(values)] + [v & 0xFF for v in values]
    return _unique(values, bits)


_POWERS = (-133, -126, -25, -24, -16, -15, -14, -10, -9, -7, -6, 7, 8, 15, 16, 23, 24, 31, 32, 52, 53, 63, 64, 126)


@functools.cache
def _corners(kind: str, count: int) -> Words:
    """At most `count` edge values: those whose combinations matter most."""
    if kind in PAIRS:
        half = _corners(PAIRS[kind], count)
        return half | np.roll(half, 1) << np.uint64(FORMATS[PAIRS[kind]].width)
    if kind in FORMATS:
        f = FORMATS[kind]
        one, unit = f.bias << f.mantissa, 1 << f.mantissa
        infinity = f.top << f.mantissa
        positive = [0, infinity, one, infinity + unit // 2, 1, infinity - 1, unit, infinity + 1, unit - 1, one + unit]
        positive += [one + 1, infinity + unit - 1, one - 1, one + unit // 2, infinity // 2, infinity + unit // 2 + 5]
        return _unique([v for p in positive for v in (p, p | f.sign)], f.width)[:count]
    if kind in ("i16", "i32", "i64"):
        n = width(kind)
        values = [0, 1, -1, (1 << n - 1) - 1, 1 << n - 1, 2, -2, 3, 0x7F, 0x80, 0xFF, 0x100, 0x5555555555555555]
        values += [(1 << n // 2) - 1, 1 << n // 2, (1 << n // 2) + 1, 10, -10, (1 << n - 1) + 1, (1 << n - 1) - 2]
        values += [n - 1, n, n + 1, 1 << n - 2, -7, 7, 1000, -1000]
        return _unique(values, n)[:count]
    if kind == "amount":
        return _unique([0, 1, 31, 32, 33, 63, 64, 255, 8, 16, 65, 254, 15, 17, 7, 128, 256, 0xFFFFFFFF, 2, 3], 32)[
            :count
        ]
    return _edges(kind)[:count]


def _ties(f: Format, count: int, stream: Stream) -> Words:
    """Values at and next to the midpoints between adjacent numbers of narrower formats, and between integers."""
    kept = stream.choose(np.array([k for k in (2, 3, 7, 10, 23) if k < f.mantissa - 1], np.uint64), count)
    dropped = np.uint64(f.mantissa) - kept
    mantissa = stream.words(count) & np.uint64((1 << f.mantissa) - 1)
    mantissa = (mantissa >> dropped << dropped) + (np.uint64(1) << (dropped - np.uint64(1)))
    reach = min(20, f.bias - 2)
    exponent = stream.below(count, 2 * reach) + np.uint64(f.bias - reach)
    value = (exponent << np.uint64(f.mantissa)) + mantissa + stream.below(count, 3) - np.uint64(1)
    return value | (stream.below(count, 2) << np.uint64(f.width - 1))


def _moderate(f: Format, count: int, stream: Stream) -> Words:
    """Random numbers of magnitudes near one."""
    reach = min(8, f.bias - 1)
    exponent = stream.below(count, 2 * reach) + np.uint64(f.bias - reach)
    mantissa = stream.words(count) & np.uint64((1 << f.mantissa) - 1)
    return exponent << np.uint64(f.mantissa) | mantissa | (stream.below(count, 2) << np.uint64(f.width - 1))


def _sample(kind: str, count: int, stream: Stream) -> Words:
    """Random operands of a kind."""
    mask = np.uint64((1 << width(kind)) - 1)
    if kind in PAIRS:
        low, high = (_sample(PAIRS[kind], count, stream) for _ in range(2))
        return low | high << np.uint64(FORMATS[PAIRS[kind]].width)
    if kind in FORMATS:
        f = FORMATS[kind]
        parts = [stream.words(count - 2 * (count // 3)) & mask, _moderate(f, count // 3, stream)]
        if f.mantissa > 4:
            parts.append(_ties(f, count // 3, stream))
        else:
            parts.append(stream.words(count // 3) & mask)
        return stream.shuffled(np.concatenate(parts))
    if kind == "amount":
        return stream.shuffled(np.resize(_edges("amount"), count))
    if kind == "bit":
        return stream.below(count, 2)
    if kind in ("few", "few64"):
        return stream.choose(_edges(kind), count)
    if kind in ("uniform", "uniform64"):
        warps = -(-count // LANES)
        leader = np.repeat(stream.words(warps) & mask, LANES)[:count]
        odd = np.repeat(stream.below(warps, 2), LANES)[:count].astype(bool)
        return np.where(odd, leader, stream.choose(_edges(kind), count))
    if kind == "clamp":
        return stream.words(count) & np.uint64(0x1F1F)
    small = stream.words(count) & mask
    return small >> stream.below(count, width(kind))  # values of every length in bits


# Related floating-point operands -------------------------------------------------------------------------------------
def _related(f: Format, arity: int, count: int, stream: Stream) -> list[Words]:
    """Operands near a tie, cancellation, underflow or overflow of a sum, product or quotient."""
    m = np.uint64(f.mantissa)
    fraction = np.uint64((1 << f.mantissa) - 1)
    mode = np.arange(count) % 8

    def assemble(exponent: np.ndarray, mantissa: Words) -> Words:
        e = np.clip(exponent, 0, f.top - 1).astype(np.uint64)
        return e << m | mantissa & fraction | stream.below(count, 2) << np.uint64(f.width - 1)

    def offset(low: int, high: int) -> np.ndarray:
        return stream.below(count, high - low + 1).astype(np.int64) + low

    ex = stream.below(count, f.top).astype(np.int64)
    x = assemble(ex, stream.words(count))
    near = ex - offset(0, f.mantissa + 2)
    choices = [
        assemble(near, stream.words(count)),
        assemble(ex - f.mantissa - 1, np.zeros(count, np.uint64)) + stream.below(count, 2),  # half an ulp of x
        x + stream.choose(np.array([0, 0, 1, (1 << 64) - 1], np.uint64), count)
        ^ (stream.below(count, 2) << np.uint64(f.width - 1)),
        assemble(f.bias - ex + 1 - offset(-2, f.mantissa + 2), stream.words(count)),  # a subnormal product
        assemble(f.bias - ex + f.top - offset(-1, 3), stream.words(count)),  # a product next to the greatest number
        assemble(
            ex + f.bias - stream.choose(np.array([1, f.top], np.uint64), count).astype(np.int64), stream.words(count)
        ),
        _reciprocal(f, x, stream),  # a product next to the least normal number
        x,
    ]
    y = np.choose(mode, choices)
    # A quotient next to the least normal number.
    near_one = (x & fraction) + stream.below(count, 9) - np.uint64(4)
    x = np.where(mode == 7, stream.below(count, 4) << m | near_one & fraction, x)
    high = np.uint64(f.bias - 1) + (x >> m & np.uint64(f.top)) - stream.below(count, 2)
    y = np.where(mode == 7, high << m | y & (fraction | np.uint64(f.sign)), y)
    mask = np.uint64((1 << f.width) - 1)
    if arity == 2:
        return [x, y & mask]
    spread = assemble(f.bias - ex + offset(f.bias // 2, f.bias), stream.words(count))
    y = np.where((mode % 2 == 0) & (mode != 6), spread, y) & mask
    ey = (y >> m & np.uint64(f.top)).astype(np.int64)
    product = ex + ey - f.bias
    z = np.choose(
        mode % 3,
        [
            assemble(product - offset(-2, f.mantissa + 2), stream.words(count)),
            assemble(product + offset(-f.mantissa - 1, f.mantissa + 1), np.zeros(count, np.uint64)),
            _negated_product(f, x, y),
        ],
    )
    least = stream.below(count, 3) % np.uint64(2) << m | stream.below(count, 2) << np.uint64(f.width - 1)
    z = np.where(mode == 6, least, z)  # zero, or the least normal number
    tiny = assemble(f.bias - ex - offset(0, f.mantissa + 4), stream.words(count))
    return [x, np.where(mode == 7, tiny, y), np.where(mode == 7, least, z) & mask]


def _reciprocal(f: Format, x: Words, stream: Stream) -> Words:
    """Values y for which x * y is equal to the least normal number, or slightly above or below it."""
    unit = 1 << f.mantissa
    nudge = stream.below(len(x), 5).astype(int) - 2
    out = []
    for value, by in zip(x.tolist(), nudge.tolist(), strict=True):
        significand = unit + (value & (unit - 1))
        other = min(max(2 * unit * unit // significand + by, unit), 2 * unit - 1)
        exponent = f.bias + 1 - (value >> f.mantissa & f.top) - 1  # the product of the significands is 2
        out.append(max(exponent, 0) << f.mantissa | other - unit | value & f.sign)
    return np.array(out, np.uint64)


def _negated_product(f: Format, x: Words, y: Words) -> Words:
    """Numbers close to -x*y, computed with integers: the truncated product of the significands, and its exponent."""
    m = np.uint64(f.mantissa)
    fraction = np.uint64((1 << f.mantissa) - 1)
    drop = np.uint64(max(0, f.mantissa - 24))  # a product of two significands of 25 bits fits in a word
    a = ((x & fraction) | np.uint64(1) << m) >> drop
    b = ((y & fraction) | np.uint64(1) << m) >> drop
    product = a * b
    bits = 2 * (f.mantissa - int(drop)) + 1
    carry = product >> np.uint64(bits) & np.uint64(1)
    product = np.where(carry == 1, product >> np.uint64(1), product)
    shift = bits - 1 - f.mantissa
    significand = product >> np.uint64(shift) if shift >= 0 else product << np.uint64(-shift)
    e = (x >> m & np.uint64(f.top)).astype(np.int64) + (y >> m & np.uint64(f.top)).astype(np.int64) - f.bias
    e = np.clip(e + carry.astype(np.int64), 0, f.top - 1).astype(np.uint64)
    sign = ((x ^ y) >> np.uint64(f.width - 1) & np.uint64(1)) ^ np.uint64(1)
    return sign << np.uint64(f.width - 1) | e << m | significand & fraction


# Rows ---------------------------------------------------------------------------------------------------------------
ROWS = {0: 64, 1: 1024, 2: 2048, 3: 2048, 4: 2048}
_CROSSED = {2: 28, 3: 9, 4: 5}


@functools.cache
def rows(sources: tuple[str, ...], extra: int = 0) -> tuple[Words, ...]:
    """The operands that all forms with these source kinds share: a column for each kind. The last `extra` rows are
    random."""
    count, arity = ROWS[len(sources)], len(sources)
    stream = Stream("rows " + " ".join(sources))
    if not sources:
        return ()
    parts: list[list[Words]] = []
    if arity == 1 and not sources[0].startswith("uniform"):  # a uniform operand gets no edges: they differ in a warp
        parts.append([_edges(sources[0])[: count // 2]])
    elif arity > 1:
        pools = [_corners(kind, _CROSSED[arity]) for kind in sources]
        crossed = np.array(list(itertools.product(*(p.tolist() for p in pools))), np.uint64)
        parts.append(list(crossed.T))
        kinds = {PAIRS.get(kind, kind) for kind in sources}
        if arity in (2, 3) and len(kinds) == 1 and (f := FORMATS.get(*kinds)) is not None:
            if sources[0] in PAIRS:
                low, high = (_related(f, arity, count // 4, stream) for _ in range(2))
                parts.append([a | b << np.uint64(f.width) for a, b in zip(low, high, strict=True)])
            else:
                parts.append(_related(f, arity, count // 4, stream))
    left = count - sum(len(p[0]) for p in parts)
    parts.append([_sample(kind, left, stream) for kind in sources])
    if extra:
        parts.append([_sample(kind, extra, stream) for kind in sources])
    return tuple(np.concatenate([p[i] for p in parts]) for i in range(arity))
