# SPDX-License-Identifier: Apache-2.0
"""The parameters of the fused kernels, with those that only some forms take."""

from __future__ import annotations

import ctypes
import functools

from .norm_form import NormForm
from .params import FusedParams


class FormParams(FusedParams):
    """`struct FusedParams` of a form with beta, normed outputs, or scales in another layout than by row."""

    _fields_ = (  # type: ignore[assignment]  # behind those of the base
        ("beta", ctypes.c_uint64),
        ("normed_output", ctypes.c_uint64),
        ("all_rows", ctypes.c_int32),
        ("first_row", ctypes.c_int32),
    )


@functools.cache
def params_of(base: type[FusedParams], form: NormForm) -> type[FusedParams]:
    """The parameters of that form: the fields of `FormParams`, followed by those of `base`."""
    if not form.has_more:
        return base
    if base is FusedParams:
        return FormParams
    return type(base.__name__, (FormParams,), {"_fields_": base._fields_})
