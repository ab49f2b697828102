# SPDX-License-Identifier: Apache-2.0
"""What a fused kernel does to a row besides the plain RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass

from ...dtypes import DType
from ...plans.quantisation import KINDS, LAYOUTS

NORMS = ("rms", "layer")


@dataclass(frozen=True)
class NormForm:
    """The definitions of cu/collectives/norm_form.cuh.

    `kind`, `group` and `layout` are those of a `Quantisation`; "" is per row, or none where the output's dtype is that
    of the inputs. `head`: the columns of a head, of which a row has several that warps hold whole; 0 where rows are
    normed whole. `residual`: the dtype of residual and residual output, None for that of the inputs. `layer`:
    LayerNorm, with `beta` or without. `normed`: the normed rows are stored in the inputs' dtype too.
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
        """Whether the kernel takes what `FormParams` adds."""
        return self.beta or self.normed or self.layout != "row"

    def defines(self, dtype: DType, quantised: bool) -> dict[str, str | int]:
        """For inputs of `dtype`, and outputs that are `quantised` or of that dtype."""
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
        """What of it must be equal on all ranks, for inputs of `dtype`; nothing for the plain form."""
        said = [f"residuals {self.residual}"] if self.residual not in (None, dtype) else []
        words = ("norm layer", self.layer), ("betas", self.beta), ("normed outputs", self.normed)
        return said + [word for word, holds in words if holds]
