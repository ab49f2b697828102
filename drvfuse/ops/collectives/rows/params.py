# SPDX-License-Identifier: Apache-2.0
"""The parameters of the fused kernels, by the form of the norm."""

from __future__ import annotations

import ctypes
import functools

from ..shared.params import FusedParams
from .form import NormForm


class FormParams(FusedParams):
    """`struct FusedParams` for forms with beta, normed outputs, or scales in the layouts "column" and "tiles"."""

    _fields_ = (  # type: ignore[assignment]  # follow the fields of the base
        ("beta", ctypes.c_uint64),
        ("normed_output", ctypes.c_uint64),
        ("all_rows", ctypes.c_int32),
        ("first_row", ctypes.c_int32),
    )


@functools.cache
def params_of(base: type[FusedParams], form: NormForm) -> type[FusedParams]:
    """Return the parameters of a kernel of the form `form`: the fields that `FormParams` adds, if any, and those of
    `base`."""
    if not form.has_more:
        return base
    if base is FusedParams:
        return FormParams
    return type(base.__name__, (FormParams,), {"_fields_": base._fields_})
