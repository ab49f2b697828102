# SPDX-License-Identifier: Apache-2.0
"""drvfuse's own kernels on one device, with special values that random tests rarely have.

Every output depends on the operands alone, so both drivers must give the same bits. The exception is rstd of the FP8
RMSNorm, which is computed with approximate instructions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import drvfuse as df
from drvfuse import dtypes

from .fixture import Answer
from .operands import FORMATS, Stream, rows

_FORMAT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True)
class Case:
    """A call of a kernel. `run(group)` makes the call and returns its outputs by name."""

    name: str
    run: Callable[[df.Group], dict[str, df.Array]]

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(f"{VERSION} {self.name}".encode(), digest_size=8).digest()


VERSION = 1  # version of the operands below; a change makes recorded answers stale


def hard_values(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random bits, edge values and ordinary numbers of a dtype, in an order that the name decides."""
    count, kind = math.prod(shape), _FORMAT[dtype]
    pool = Stream(name).shuffled(np.resize(rows((kind,))[0], max(count, 1024)))[:count]
    return pool.astype(f"<u{FORMATS[kind].width // 8}").view(dtypes.get(dtype).numpy).reshape(shape)


def norm_rows(name: str, count: int, columns: int, dtype: str) -> np.ndarray:
    """Rows to normalise, each with its own difficulty: none, NaN, infinity, zeros, subnormals, huge, an outlier."""
    f, stream = FORMATS[_FORMAT[dtype]], Stream(name)
    m, shape = np.uint64(f.mantissa), (count, columns)
    words = stream.words(count * columns).reshape(shape)
    fraction = words & np.uint64((1 << f.mantissa) - 1)
    sign = (words >> np.uint64(60) & np.uint64(1)) << np.uint64(f.width - 1)
    near = (words >> np.uint64(50)) % np.uint64(8) + np.uint64(f.bias - 4)
    x = near << m | fraction | sign
    at = stream.below(count, columns).astype(int)
    for row in range(count):
        match row % 7:
            case 1:
                x[row, at[row]] = f.top << f.mantissa | 1 << (f.mantissa - 1) | 5
            case 2:
                x[row, at[row]] = f.top << f.mantissa | int(sign[row, 0])
            case 3:
                x[row] = sign[row]
            case 4:
                x[row] = fraction[row] | sign[row]
            case 5:
                x[row] = np.uint64(f.top - 1) << m | fraction[row] | sign[row]
            case 6:
                x[row, at[row]] = (f.bias + 12) << f.mantissa
    return x.astype(f"<u{f.width // 8}").view(dtypes.get(dtype).numpy)


def _allreduce(dtype: str, algo: str, count: int, epilogue: bool = False) -> Case:
    name = f"allreduce {dtype} {algo} {count}{' epilogue' if epilogue else ''}"

    def run(group: df.Group) -> dict[str, df.Array]:
        xs = [group.ranks[0].array(hard_values(name, (count,), dtype))]
        extra = {"epilogue": df.Epilogue("x * scale", scale=df.float32(0.37))} if epilogue else {}
        return {"output": df.allreduce(group, xs, algo=algo, **extra)[0]}

    return Case(name, run)


def _fused(
    dtype: str, out: str, scales: str, columns: int, *, algo: str = "one_stage", residual: bool = False,
    upper_bound: float = math.inf, weight_offset: float = 0.0, epsilon: float = 1e-6, rows_: int = 7,
) -> Case:  # fmt: skip
    name = f"rmsnorm {dtype} {out} {scales} {columns} {algo}{' residual' if residual else ''}"
    if upper_bound < math.inf or weight_offset or epsilon != 1e-6:
        name += f" ub {upper_bound} offset {weight_offset} epsilon {epsilon}"

    def run(group: df.Group) -> dict[str, df.Array]:
        rank = group.ranks[0]
        numpy_type = dtypes.get(dtype).numpy
        x = norm_rows(name, rows_, columns, dtype)
        gamma = norm_rows("gamma " + name, 1, columns, dtype)[0].astype(numpy_type)
        residuals = (
            [rank.array(norm_rows("residual " + name, rows_, columns, dtype)[::-1].copy())] if residual else None
        )
        per_row = df.Quantisation.per_row
        quantisation = df.Quantisation.none() if out == dtype else per_row(out, scales, upper_bound)
        result = df.allreduce_rmsnorm_fp8(
            group, [rank.array(x)], [rank.array(gamma)], epsilon=epsilon, weight_offset=weight_offset,
            quantisation=quantisation, residuals=residuals, algo=algo,
        )  # fmt: skip
        found = {"output": result.output[0]}
        if result.scales is not None:
            found["scales"] = result.scales[0]
        if result.residual is not None:
            found["residual"] = result.residual[0]
        return found

    return Case(name, run)


def _coat_inputs(rank: df.Rank, name: str, columns: int, kind: str, QB: int, rows_: int) -> tuple[df.Array, df.Array]:
    """FP8 values of every bit pattern but NaN and infinity, and their scales."""
    stream = Stream(name)
    f, t = (FORMATS["e4m3"], "float8_e4m3fn") if kind == "E4M3" else (FORMATS["e5m2"], "float8_e5m2")
    bits_ = stream.below(rows_ * columns, 0x7E if kind == "E4M3" else 0x7C)
    bits_ |= stream.below(len(bits_), 2) << np.uint64(f.width - 1)
    x = bits_.astype(np.uint8).view(dtypes.get(t).numpy).reshape(rows_, columns)
    groups = -(-columns // QB)
    scales = stream.below(rows_ * groups, 1 << 10) + np.uint64(0x3B00)  # 2^-9 to about 2^-1
    return rank.array(x), rank.array(_bf16(scales, (rows_, groups)))


def _bf16(words: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return words.astype("<u2").view(dtypes.get("bfloat16").numpy).reshape(shape)


def _ordinary(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bfloat16 numbers of both signs with magnitudes from 2^-4 to 2^4."""
    stream = Stream(name)
    words = stream.below(math.prod(shape), 8 << 7) + np.uint64(123 << 7)
    return _bf16(words | stream.below(len(words), 2) << np.uint64(15), shape)


def _coat(kind: str, columns: int, QB: int, rows_: int) -> Iterator[Case]:
    name = f"fp8_rmsnorm {kind} {columns} {QB} {rows_}"

    def forward(group: df.Group) -> dict[str, df.Array]:
        rank = group.ranks[0]
        x, s = _coat_inputs(rank, name, columns, kind, QB, rows_)
        qy, s_y, qy_t, (_, rstd, _) = df.coat.fp8_rmsnorm_forward(
            x, s, rank.array(_ordinary("w " + name, (columns,))), QB, 1e-5
        )
        return {"qy": qy, "s_y": s_y, "qy_t": qy_t, "rstd": rstd}

    def backward(group: df.Group) -> dict[str, df.Array]:
        rank = group.ranks[0]
        x, s = _coat_inputs(rank, name, columns, kind, QB, rows_)
        w, g = (rank.array(_ordinary(k + name, t)) for k, t in (("w ", (columns,)), ("g ", (rows_, columns))))
        v = rank.array(_ordinary("v " + name, (rows_,)).astype(np.float32))
        dx, dw = df.coat.fp8_rmsnorm_backward(x, s, g, w, v, QB)
        return {"dx": dx, "dw": dw}

    def division(group: df.Group) -> dict[str, df.Array]:
        x = group.ranks[0].array(_ordinary("x " + name, (rows_, columns)))
        y, s_y, y_t = df.coat.fp8_division_transpose(x, QB, kind)
        return {"y": y, "s_y": s_y, "y_t": y_t}

    yield Case(name + " forward", forward)
    yield Case(name + " backward", backward)
    if columns % 16 == 0:  # other numbers of columns would need a further kernel, which takes long to compile
        yield Case(name.replace("rmsnorm", "division"), division)


def cases() -> Iterator[Case]:
    """All cases, in a fixed order."""
    for dtype in _FORMAT:
        for count in (1, 7, 1003):
            yield _allreduce(dtype, "one_stage", count)
    for algo in ("two_stage", "naive"):
        yield _allreduce("bfloat16", algo, 1003)
    yield _allreduce("bfloat16", "one_stage", 1003, epilogue=True)
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    for columns in (1, 7, 264, 1001, 4096):
        yield _fused("bfloat16", e4m3, "float32", columns)
        yield _fused("bfloat16", e4m3, "float32", columns, residual=True)
    for dtype, out, scales, residual in (
        ("bfloat16", e5m2, "bfloat16", True), ("bfloat16", "bfloat16", "float32", False),
        ("float16", e4m3, "float32", False), ("float16", e5m2, "bfloat16", True),
        ("float16", "float16", "float32", True), ("float32", e4m3, "float32", True),
        ("float32", e5m2, "bfloat16", False), ("float32", "float32", "float32", False),
    ):  # fmt: skip
        yield _fused(dtype, out, scales, 264, residual=residual)
    yield _fused("float32", e4m3, "float32", 61)
    for bound, weight_offset, epsilon in ((0.01, 0.0, 1e-6), (0.0, 1.0, 1e-6), (math.inf, -1.0, 1e-3)):
        yield _fused("bfloat16", e4m3, "float32", 264, upper_bound=bound, weight_offset=weight_offset, epsilon=epsilon)
    yield _fused("bfloat16", e4m3, "float32", 264, algo="two_stage")
    yield _fused("bfloat16", e4m3, "float32", 264, algo="naive", residual=True)
    yield from _coat("E4M3", 512, 128, 33)
    yield from _coat("E5M2", 203, 32, 9)


def run(group: df.Group, case: Case) -> dict[str, Answer]:
    """Run a case. Returns its outputs as flat arrays by the name "case: output", as they are stored and compared."""
    found = {}
    for what, array in case.run(group).items():
        values = array.numpy()
        words = values.view(f"u{values.dtype.itemsize}").reshape(-1)
        found[f"{case.name}: {what}"] = Answer(case.digest, words, "rstd" if what == "rstd" else "exact")
    return found
