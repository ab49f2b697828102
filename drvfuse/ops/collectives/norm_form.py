# SPDX-License-Identifier: Apache-2.0
"""What a fused kernel does to a row besides the plain RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass

from ...dtypes import DType

NORMS = ("rms", "layer")


@dataclass(frozen=True)
class NormForm:
    """The definitions of cu/collectives/norm_form.cuh.

    `residual`: the dtype of residual and residual output, None for the inputs'. `layer`: LayerNorm, with `beta` or
    without. `normed`: the normed rows are stored in the inputs' dtype too.
    """

    residual: DType | None = None
    layer: bool = False
    beta: bool = False
    normed: bool = False

    @property
    def has_more(self) -> bool:
        """Whether the kernel takes what `FormParams` adds."""
        return self.beta or self.normed

    def defines(self, dtype: DType) -> dict[str, str | int]:
        """For inputs of `dtype`."""
        return {
            "DRVFUSE_RESIDUAL_DTYPE": (self.residual or dtype).cxx,
            "DRVFUSE_LAYER": int(self.layer),
            "DRVFUSE_BETA": int(self.beta),
            "DRVFUSE_NORMED": int(self.normed),
        }

    def text(self, dtype: DType) -> list[str]:
        """What of it must be equal on all ranks, for inputs of `dtype`; nothing for the plain form."""
        said = [f"residuals {self.residual}"] if self.residual not in (None, dtype) else []
        words = ("norm layer", self.layer), ("betas", self.beta), ("normed outputs", self.normed)
        return said + [word for word, holds in words if holds]
