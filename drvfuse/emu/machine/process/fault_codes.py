# SPDX-License-Identifier: Apache-2.0
"""The errors that faults of kernels leave in their contexts."""

from __future__ import annotations

from typing import Any

from ...bindings import R

_LAUNCH_FAILED = (
    *("trap", "warp_lanes", "warp_mismatch", "matrix_lanes", "unsupported", "copy_size", "mbarrier"),
    *("barrier_count", "barrier_divergence", "barrier_kinds", "barrier_left", "cluster_absent", "cluster_barrier"),
    "bad_free",
)
_CODES = {
    **dict.fromkeys(_LAUNCH_FAILED, R.CUDA_ERROR_LAUNCH_FAILED),
    "misaligned": R.CUDA_ERROR_MISALIGNED_ADDRESS,
    "no_cluster": R.CUDA_ERROR_ILLEGAL_INSTRUCTION,
    "no_function": R.CUDA_ERROR_INVALID_PC,
    "stack_overflow": R.CUDA_ERROR_HARDWARE_STACK_ERROR,
    "assert": R.CUDA_ERROR_ASSERT,
    "endless": R.CUDA_ERROR_LAUNCH_TIMEOUT,
    "interrupted": R.CUDA_ERROR_LAUNCH_TIMEOUT,
}


def error_of(kind: str) -> Any:
    """The CUresult that a fault of this kind leaves in the context of its kernel."""
    return _CODES.get(kind, R.CUDA_ERROR_ILLEGAL_ADDRESS)
