# SPDX-License-Identifier: Apache-2.0
"""How the rows of an op's result are quantised: which codes, which scales, and where these lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import dtypes
from ..dtypes import FP4, DType, DTypeLike
from ..errors import ArgumentError, any_of, foreign, require_integer, require_kind, require_real, shown
from .definitions import Defines, defines
from .limits import ceil_div

KINDS = ("none", "row", "static", "group")
LAYOUTS = ("row", "column", "tiles")
E8M0 = "float8_e8m0fnu"
ROW_SCALES = ("float32", "bfloat16")
GROUP_SCALES = ("float32", E8M0)
GROUPS = (64, 128)
_MX_GROUP, _NV_GROUP = 32, 16
_TILE_ROWS, _TILE_GROUPS, _COLUMN_ROWS = 128, 4, 4
_TILES_ALIGNMENT = 16
_FORMS = (
    ("none", None, 0, None),
    *(("row", codes, 0, scales) for codes in dtypes.FP8 for scales in ROW_SCALES),
    *(("static", codes, 0, None) for codes in dtypes.FP8),
    *(("group", codes, group, scales) for codes in dtypes.FP8 for group in GROUPS for scales in GROUP_SCALES),
    *(("group", codes, _MX_GROUP, E8M0) for codes in dtypes.FP8),
    ("group", FP4, _NV_GROUP, "float8_e4m3fn"),
)
"""The combinations that exist: kind, dtype of the codes, columns of a group, dtype of the scales."""


@dataclass(frozen=True)
class Quantisation:
    """How rows of float32 values y [..., columns] become codes of few bits and scales, with y ~ code * scale.

    It is made by one of its class methods: `per_row`, `static`, `per_group`, `mxfp8`, `nvfp4`, `none`. The rules are
    below. Each float32 operation is rounded to nearest even, and `drvfuse.reference.quantise` has every bit:

    - `row`: scale = min(max|y|, upper_bound) / fp8_max, in the scales' dtype, for each row, where fp8_max is the
      largest finite code (448 or 57344). Before that max|y| and upper_bound are rounded to the scales' dtype. The code
      is y * (1 / scale), saturated and rounded once, to nearest even. Where 1 / scale is infinite or NaN it is taken as
      0: a row of zeros has scale 0 and codes 0, and a row with a NaN has a NaN scale, codes 0, and NaN where y is NaN.
    - `static`: the code is y * (1 / scale) with one given scale for all rows. No scales are written.
    - `group`: the rule "row", applied to each `group` columns of a row. With float8_e8m0fnu scales, which are powers of
      two, the scale is the least power of two that is not below min(max|y|, upper_bound) / fp8_max, but at least
      2^-127. The inverse of such a scale is exact. A code saturates only if `upper_bound` is below max|y|, or if y is
      infinite. The OCP specification has another rule: it divides the largest power of two in max|y| by the largest in
      fp8_max, and may saturate. A group of zeros has scale 2^-127 and codes 0. If min(max|y|, upper_bound) is infinite,
      it counts as the largest float32. A group with a NaN has the scale NaN (0xFF), and all its codes are NaN.
    - `group` of NVFP4 (`nvfp4`): codes are e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign), two in a byte, the element of
      even index in the low four bits. scale = (max|y| / 6) / tensor_scale, saturated and rounded to float8_e4m3fn; the
      code is y * (1 / (scale * tensor_scale)), saturated and rounded to nearest even, or y * 0 where that inverse is
      infinite (as for a scale of 0) or NaN. FP4 has no NaN: a NaN's code is +6, and the scale is NaN.

    The scales of groups have the shape [..., groups] in `layout` "row". In "column" they have [groups, rows], where
    rows are all leading dimensions together, padded to a multiple of 4: block-scaled GEMMs that read columns of scales
    need this. "tiles" is the layout of block scales in cuBLASLt: one dimension of tiles of 512 bytes, each for
    128 rows and 4 groups. Rows and groups are padded to whole tiles, the tiles of the same rows follow one another, and
    the scale of row r and group g of a tile is its byte r % 32 * 16 + r // 32 * 4 + g. Tiles begin at a multiple of 16
    bytes. Every call writes bytes of 0 as padding.

    `kind` is "none", "row", "static" or "group". `dtype` is the dtype of the codes (None for the kind "none"), and
    `scales` the dtype of the scales (None where no scales are written). `group` is the number of columns of a scale, 0
    for kinds other than "group". `scale` is the scale given to `static` or the tensor scale of `nvfp4`, else 1.

    The class methods that make a `Quantisation` raise ArgumentError for a dtype, layout, number or group that does
    not exist, and ops raise it for columns that the group does not divide.

    >>> mx = df.Quantisation.mxfp8(layout="tiles")
    >>> mx.scales, mx.groups(256), mx.scales_shape((100,), 256)
    (DType(name='float8_e8m0fnu', ...), 8, (1024,))
    """

    kind: str
    dtype: DType | None = None
    group: int = 0
    scales: DType | None = None
    layout: str = "row"
    upper_bound: float = math.inf
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Raise ArgumentError unless the values of the fields are a combination that a class method makes."""
        form = self.kind, _name(self.dtype), self.group, _name(self.scales)
        whole = self.layout == "row" or (self.group and self.layout == "column")
        tiled = self.layout == "tiles" and self.scales is not None and self.scales.itemsize == 1 and self.group
        real = isinstance(self.upper_bound, float) and isinstance(self.scale, float)
        if form not in _FORMS or not (whole or tiled) or not (real and self.upper_bound >= 0 < self.scale < math.inf):
            made = "made by Quantisation.per_row, static, per_group, mxfp8, nvfp4 or none"
            raise ArgumentError("quantisation", shown(self), made)

    @classmethod
    def per_row(
        cls, dtype: DTypeLike = "float8_e4m3fn", scales: DTypeLike = "float32", upper_bound: float = math.inf
    ) -> Quantisation:
        """FP8 codes with a scale for each row, in float32 or bfloat16. The scale is computed from min(max|y|,
        `upper_bound`)."""
        kind = _dtype("scales", scales, ROW_SCALES)
        return cls("row", _fp8(dtype), scales=kind, upper_bound=_bound(upper_bound))

    @classmethod
    def static(cls, scale: float, dtype: DTypeLike = "float8_e4m3fn") -> Quantisation:
        """FP8 codes with one scale for all rows, a finite number above 0 that is known before the call. No scales are
        written.
        """
        return cls("static", _fp8(dtype), scale=_scale("scale", scale))

    @classmethod
    def per_group(
        cls,
        columns: int = 128,
        dtype: DTypeLike = "float8_e4m3fn",
        scales: DTypeLike = "float32",
        layout: str = "row",
        upper_bound: float = math.inf,
    ) -> Quantisation:
        """FP8 codes with a scale for each 64 or 128 columns of a row, in float32 or float8_e8m0fnu.

        `layout` is "row", "column" or, for scales of one byte, "tiles". Scales are computed from min(max|y|,
        `upper_bound`).
        """
        wanted = any_of(list(map(str, GROUPS)))
        group = require_integer("columns", columns, wanted)
        if group not in GROUPS:
            raise ArgumentError("columns", shown(columns), wanted)
        kind = _dtype("scales", scales, GROUP_SCALES)
        arranged = _layout(layout, kind)
        return cls("group", _fp8(dtype), group, kind, arranged, _bound(upper_bound))

    @classmethod
    def mxfp8(cls, dtype: DTypeLike = "float8_e4m3fn", layout: str = "row") -> Quantisation:
        """MXFP8: FP8 codes with a float8_e8m0fnu scale for each 32 columns of a row, in the layout "row", "column" or
        "tiles".
        """
        kind = dtypes.get(E8M0)
        return cls("group", _fp8(dtype), _MX_GROUP, kind, _layout(layout, kind))

    @classmethod
    def nvfp4(cls, tensor_scale: float, layout: str = "row") -> Quantisation:
        """NVFP4: e2m1 codes with a float8_e4m3fn scale for each 16 columns, in the layout "row", "column" or "tiles",
        and a scale for the whole tensor, which is given: a finite number above 0.
        """
        kind = dtypes.get("float8_e4m3fn")
        given = _scale("tensor_scale", tensor_scale)
        return cls("group", dtypes.get(FP4), _NV_GROUP, kind, _layout(layout, kind), scale=given)

    @classmethod
    def none(cls) -> Quantisation:
        """No quantisation: y is rounded to the inputs' dtype."""
        return cls("none")

    @property
    def given(self) -> float:
        """The one number that kernels get: the given scale or tensor scale if there is one, else the upper bound."""
        return self.scale if self.kind == "static" or self.dtype == FP4 else self.upper_bound

    def check(self, columns: int, in_dtype: DType) -> None:
        """Raise ArgumentError unless this quantisation applies to rows of `columns` columns and inputs of `in_dtype`.

        The number of columns must be a multiple of the field `group`, as rows are not padded. So it is even for FP4
        codes, two of which share a byte.
        """
        require_integer("columns", columns, "a number of columns", 0)
        require_kind("in_dtype", in_dtype, DType, "a drvfuse dtype")
        if in_dtype.name not in ("bfloat16", "float16", "float32"):
            raise ArgumentError("quantisation", f"of {in_dtype}", "of bfloat16, float16 or float32 values")
        if self.group and columns % self.group:
            shown = f"with a scale for each {self.group} columns, for rows of {columns}"
            raise ArgumentError("quantisation", shown, f"for rows of a multiple of {self.group} columns")

    def groups(self, columns: int) -> int:
        """The number of scales of a row of `columns` columns, 0 if no scales are written."""
        require_integer("columns", columns, "a number of columns", 0)
        return columns // self.group if self.group else int(self.kind == "row")

    def scales_shape(self, rows_shape: Sequence[int], columns: int) -> tuple[int, ...] | None:
        """The shape of the scales of rows [*rows_shape, columns], padding included; None where none are written."""
        shape, groups = _shape("rows_shape", rows_shape), self.groups(columns)
        if self.scales is None:
            return None
        if self.kind == "row":
            return shape
        rows = math.prod(shape)
        if self.layout == "row":
            return (*shape, groups)
        if self.layout == "column":
            return groups, ceil_div(rows, _COLUMN_ROWS) * _COLUMN_ROWS
        return (ceil_div(rows, _TILE_ROWS) * _TILE_ROWS * ceil_div(groups, _TILE_GROUPS) * _TILE_GROUPS,)

    @property
    def scales_alignment(self) -> int:
        """The required alignment of the scales in bytes. Kernels clear the padding of tiles by stores of 16 bytes."""
        return _TILES_ALIGNMENT if self.layout == "tiles" else 1

    def output_dtype(self, in_dtype: DType) -> DType:
        """The dtype of the codes, or of the inputs for the kind "none"."""
        require_kind("in_dtype", in_dtype, DType, "a drvfuse dtype")
        return in_dtype if self.dtype is None else self.dtype

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the output for inputs of `shape`. An element of FP4 output holds the codes of two columns."""
        lanes = 1 if self.dtype is None else self.dtype.lanes
        lengths = _shape("shape", shape)
        if not lengths:
            raise ArgumentError("shape", "()", "a shape of at least one dimension")
        return (*lengths[:-1], lengths[-1] // lanes)

    def row_bytes(self, columns: int, in_dtype: DType) -> int:
        """The bytes of a row of output."""
        out = self.output_dtype(in_dtype)
        require_integer("columns", columns, "a number of columns", 0)
        return columns // out.lanes * out.itemsize

    def row_scale_bytes(self, columns: int) -> int:
        """The bytes of a row's scales, without padding; 0 where none are written."""
        return 0 if self.scales is None else self.groups(columns) * self.scales.itemsize

    def definitions(self, in_dtype: DType) -> Defines:
        """The definitions that a kernel is compiled with (cu/common/quantise.cuh)."""
        return defines(
            quant=KINDS.index(self.kind),
            group=self.group,
            out_dtype=self.output_dtype(in_dtype),
            scales_dtype=self.scales or dtypes.get("float32"),
            scales_layout=LAYOUTS.index(self.layout),
        )

    def __str__(self) -> str:
        """A description of everything that must be equal on all ranks."""
        if self.kind == "none":
            return "none"
        per = {"row": "per row", "static": "static", "group": f"per {self.group} columns"}[self.kind]
        words = [f"{self.dtype} {per}"]
        words += [] if self.scales is None else [f"scales {self.scales}"]
        words += [f"layout {self.layout}"] if self.layout != "row" else []
        name = "scale" if self.kind == "static" else "tensor scale" if self.dtype == FP4 else "upper bound"
        words += [f"{name} {np.float32(self.given)!s}"] if self.given < math.inf else []
        return ", ".join(words)


def _shape(argument: str, shape: Any) -> tuple[int, ...]:
    expected = "a sequence of lengths, each at least 0"
    lengths = foreign(argument, expected, lambda: tuple(shape))
    return tuple(n if type(n) is int and n >= 0 else require_integer(argument, n, expected, 0) for n in lengths)


def _name(dtype: DType | None) -> str | None:
    """The name of a dtype; "" for a value that is no dtype object, such as a string."""
    return None if dtype is None else dtype.name if isinstance(dtype, DType) else ""


def _dtype(argument: str, value: DTypeLike, allowed: Sequence[str]) -> DType:
    try:
        found = dtypes.get(value, argument)
    except ArgumentError as error:
        raise ArgumentError(argument, error.got, any_of(allowed)) from None
    if found.name not in allowed:
        raise ArgumentError(argument, str(found), any_of(allowed))
    return found


def _fp8(dtype: DTypeLike) -> DType:
    return _dtype("dtype", dtype, dtypes.FP8)


def _bound(value: float) -> float:
    return require_real("upper_bound", value, least=0.0, finite=False) + 0.0  # -0.0 becomes 0.0


def _scale(argument: str, value: float) -> float:
    return require_real(argument, value, positive=True)


def _layout(layout: str, scales: DType) -> str:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ArgumentError("layout", shown(layout), any_of(list(map(repr, LAYOUTS))))
    if layout == "tiles" and scales.itemsize != 1:
        raise ArgumentError("layout", shown(layout), f"'row' or 'column' for scales of {scales}: tiles hold bytes")
    return layout


PER_ROW = Quantisation.per_row()
"""The quantisation of a call that names none."""
