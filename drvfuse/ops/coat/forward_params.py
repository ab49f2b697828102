# SPDX-License-Identifier: Apache-2.0
"""The parameters that the forward kernels of both norms share."""

from __future__ import annotations

import ctypes

from ..call.scratch import ScratchParams
from .fp8_call import Fp8Params

SHARES = ("groups", "longer", "part_columns", "resident_columns", "chunk_rows")
"""What a plan of `plans.coat_forward` decides."""
_ARRAYS = ("x", "scales", "weight", "bias", "qy", "qy_t", "scale", "mean", "rstd")


class ForwardParams(Fp8Params):
    """`struct ForwardParams` of cu/coat/forward.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _ARRAYS),
        ("scratch", ScratchParams),
        *((name, ctypes.c_int64) for name in ("rows", "batch_rows", "x_stride", "scale_stride")),
        *((name, ctypes.c_int32) for name in ("columns", *SHARES)),
        ("epsilon", ctypes.c_float),
        ("early_trigger", ctypes.c_int32),
    )
