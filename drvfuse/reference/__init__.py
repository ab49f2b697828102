# SPDX-License-Identifier: Apache-2.0
"""The ops in numpy, with every rounding that the kernels make: what tests and users compare results with, bit for bit.

The collectives are here by name; `gemv`, `coat_rmsnorm`, `coat_layernorm` and `coat_groups` are modules of this room.
It imports the ground floor and `plans` alone, and needs no driver.
"""

from . import coat_groups, coat_layernorm, coat_rmsnorm, gemv
from .collectives import (
    Normalised,
    allreduce,
    allreduce_rmsnorm_fp8,
    bits,
    quantisation,
    round_to,
    row_sum_of_squares,
    sum_ranks,
)

__all__ = [
    "Normalised",
    "allreduce",
    "allreduce_rmsnorm_fp8",
    "bits",
    "coat_groups",
    "coat_layernorm",
    "coat_rmsnorm",
    "gemv",
    "quantisation",
    "round_to",
    "row_sum_of_squares",
    "sum_ranks",
]
