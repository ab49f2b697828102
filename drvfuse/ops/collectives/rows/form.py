# SPDX-License-Identifier: Apache-2.0
"""The forms of the fused kernels: their variants of norm, quantisation and results."""

from __future__ import annotations

from dataclasses import dataclass

from ....dtypes import DType
from ....plans.quantisation import KINDS, LAYOUTS

NORMS = ("rms", "layer")


@dataclass(frozen=True)
class NormForm:
    """The form of a fused kernel, as cu/collectives/rows/form.cuh describes it. The defaults are the plain RMSNorm.

    `kind`, `group` and `layout` are those of a `Quantisation`. `kind` is "" for quantisation per row, and also for
    no quantisation, when the output has the inputs' dtype. `head`: the number of columns of a head if a row has several
    heads, 0 if whole rows are normed. `residual`: the dtype of residual and residual output, None for the inputs'
    dtype. `layer`: LayerNorm, with `beta` or without. `normed`: the normed rows are stored too, in the inputs' dtype.
    """

    kind: str = ""
    group: int = 0
    layout: str = "row"
    head: int = 0
    residual: DType | None = None
    layer: bool = False
    beta: bool = False
    normed: bool = False

    @property
    def has_more(self) -> bool:
        """Whether the kernel has the parameters that `FormParams` adds."""
        return self.beta or self.normed or self.layout != "row"

    def defines(self, dtype: DType, quantised: bool) -> dict[str, str | int]:
        """Return the macros that a kernel is compiled with, for inputs of `dtype`. Outputs that are not `quantised`
        have that dtype too."""
        kind = self.kind or ("row" if quantised else "none")
        return {
            "DRVFUSE_MORE": int(self.has_more),
            "DRVFUSE_QUANT": KINDS.index(kind),
            "DRVFUSE_GROUP": self.group,
            "DRVFUSE_HEAD": self.head,
            "DRVFUSE_SCALES_LAYOUT": LAYOUTS.index(self.layout),
            "DRVFUSE_RESIDUAL_DTYPE": (self.residual or dtype).cxx,
            "DRVFUSE_LAYER": int(self.layer),
            "DRVFUSE_BETA": int(self.beta),
            "DRVFUSE_NORMED": int(self.normed),
        }

    def text(self, dtype: DType) -> list[str]:
        """Return descriptions of what must be equal on all ranks, for inputs of `dtype`; empty for the plain
        RMSNorm."""
        said = [f"residuals {self.residual}"] if self.residual not in (None, dtype) else []
        words = ("norm layer", self.layer), ("betas", self.beta), ("normed outputs", self.normed)
        return said + [word for word, holds in words if holds]
