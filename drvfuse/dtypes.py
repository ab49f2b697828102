# SPDX-License-Identifier: Apache-2.0
"""The table of element types: name, C++ type in the kernels, numpy type, DLPack code and size.

Names are those of torch, ml_dtypes and JAX. numpy shows the ml_dtypes types as kind "V".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .errors import ArgumentError, foreign, shown

if TYPE_CHECKING:
    import numpy as np

DTypeLike: TypeAlias = "DType | str | np.dtype[Any] | type[Any]"
"""An element type: a DType, its name, such as "bfloat16", or a numpy type, such as `ml_dtypes.bfloat16`."""


@dataclass(frozen=True, eq=False)
class DType:
    """An element type. `dlpack` is DLPack's (type code, bits). `fp8_max` is the largest finite value of an FP8 type.

    The values of float8_e8m0fnu are powers of two, for scales. An element of float4_e2m1fn_x2 is a byte of two FP4
    numbers, the first in the low four bits, as in torch; numpy has no such type, and shows these bytes as uint8.
    `lanes` is the number of values in an element, 2 for this type and 1 for all others.

    A DType is equal to every value for which `get` returns it (its name, numpy's or ml_dtypes' type), and to no other.
    Its hash is that of its name. numpy accepts it as a dtype: `np.dtype(array.dtype)`.
    """

    name: str
    cxx: str
    itemsize: int
    dlpack: tuple[int, int]
    fp8_max: float | None = None
    lanes: int = 1

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype (from ml_dtypes for bfloat16 and FP8; uint8 for FP4)."""
        import numpy as np

        if self.name == FP4:
            return np.dtype(np.uint8)
        if self.name in _ML_DTYPES:
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, self.name))
        return np.dtype(self.name)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The same as `numpy`: numpy reads the attribute `dtype` when it converts an object to a dtype."""
        return self.numpy

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        found = _find(other)
        return found is not None and found.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
FP4 = "float4_e2m1fn_x2"

_TABLE = {
    dtype.name: dtype
    for dtype in (
        DType("float64", "double", 8, (2, 64)),
        DType("float32", "float", 4, (2, 32)),
        DType("float16", "f16", 2, (2, 16)),
        DType("bfloat16", "bf16", 2, (4, 16)),
        DType("float8_e4m3fn", "e4m3", 1, (10, 8), 448.0),
        DType("float8_e5m2", "e5m2", 1, (12, 8), 57344.0),
        DType("float8_e8m0fnu", "ue8m0", 1, (14, 8)),
        DType(FP4, "e2m1x2", 1, (17, 4), lanes=2),
        DType("int64", "long long", 8, (0, 64)),
        DType("int32", "int", 4, (0, 32)),
        DType("int16", "short", 2, (0, 16)),
        DType("int8", "signed char", 1, (0, 8)),
        DType("uint64", "unsigned long long", 8, (1, 64)),
        DType("uint32", "unsigned int", 4, (1, 32)),
        DType("uint16", "unsigned short", 2, (1, 16)),
        DType("uint8", "unsigned char", 1, (1, 8)),
        DType("bool", "bool", 1, (6, 8)),
    )
}


NAMES = tuple(_TABLE)
FP8 = ("float8_e4m3fn", "float8_e5m2")
WITHOUT_TYPESTR = (*_ML_DTYPES, FP4)  # array interfaces have no type string for these


def get(dtype: DTypeLike, argument: str = "dtype") -> DType:
    """The DType for a name, a numpy or ml_dtypes dtype, or a DType; ArgumentError naming `argument` if unknown."""
    found = _find(dtype)
    if found is None:
        raise ArgumentError(argument, shown(dtype), "one of " + ", ".join(_TABLE))
    return found


def _find(dtype: Any) -> DType | None:
    if isinstance(dtype, DType):
        return dtype
    found = _TABLE.get(dtype) if isinstance(dtype, str) else None
    structured = isinstance(dtype, (tuple, list, dict))  # refused, as numpy would make structured dtypes of them
    if found is None and dtype is not None and not structured:
        import numpy as np

        try:
            element = np.dtype(dtype)
        except Exception:  # numpy parses some strings as Python expressions, and asks objects for their `dtype`
            return None
        found = _TABLE.get(element.name) if element.isnative else None
    return found


def name_of(dtype: object) -> str:
    """The name, without its module, of a dtype of torch, numpy or ml_dtypes, or of a dtype given as a string."""
    return dtype.__name__ if isinstance(dtype, type) else str(dtype).rpartition(".")[2]


def fp8(value: object, argument: str = "dtype") -> DType:
    """The FP8 DType that `value` names, also by COAT's "E4M3" or "E5M2". Raises ArgumentError, naming `argument`, for
    any other value."""
    name = foreign(argument, " or ".join(FP8), lambda: name_of(value)).lower()
    name = {"e4m3": FP8[0], "e5m2": FP8[1]}.get(name, name)
    if name not in FP8:
        raise ArgumentError(argument, shown(value), '"E4M3", "E5M2" or one of ' + ", ".join(FP8))
    return get(name)


def from_dlpack(code: int, bits: int, lanes: int, argument: str = "DLPack dtype") -> DType:
    """The DType for DLPack's (code, bits, lanes)."""
    for dtype in _TABLE.values():
        if (*dtype.dlpack, dtype.lanes) == (code, bits, lanes):
            return dtype
    raise ArgumentError(argument, f"DLPack's (code, bits, lanes) {code, bits, lanes}", "one of " + ", ".join(_TABLE))
