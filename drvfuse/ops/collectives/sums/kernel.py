# SPDX-License-Identifier: Apache-2.0
"""The compile-time settings of the kernels of all-reduces and reduce-scatters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..shared.kernel import INPUT_DTYPES, PULL, CollectiveKernel, check


@dataclass(frozen=True)
class SumsKernel(CollectiveKernel):
    """A kernel that sums tensors element by element.

    A kernel "reduce_scatter" sums this rank's part of the tensor as a kernel "allreduce" of the same settings sums a
    whole tensor, and `work` is that of the largest part. `epilogue`: C++ text that defines `EpilogueParams` and
    `epilogue` as `cu/common/epilogue.cuh` says, or "" for none."""

    epilogue: str = ""

    family: ClassVar[str] = "sums"
    ops: ClassVar[tuple[str, ...]] = ("allreduce", "reduce_scatter")

    def __post_init__(self) -> None:
        super().__post_init__()
        check("out_dtype", self.out_dtype.name, INPUT_DTYPES)

    @property
    def multimem_algos(self) -> tuple[str, ...]:
        return PULL

    @property
    def name(self) -> str:
        return f"{self.op}_many_{self.algo}" if self.many and self.pushes else super().name

    @property
    def defines(self) -> dict[str, str | int]:
        return super().defines | ({"DRVFUSE_EPILOGUE": 1} if self.epilogue else {})

    @property
    def text(self) -> str:
        return f'#include "common/prelude.cuh"\n{self.epilogue}\n' if self.epilogue else ""
