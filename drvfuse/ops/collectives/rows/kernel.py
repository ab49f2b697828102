# SPDX-License-Identifier: Apache-2.0
"""The compile-time settings of the kernels of the fused norms: their form, which is their variant of norm, quantisation
and results, and what they have in common with other kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .... import dtypes
from ....dtypes import DType
from ....plans.quantisation import E8M0, KINDS, LAYOUTS
from ....plans.rows import RowsWork
from ..shared.kernel import INPUT_DTYPES, PULL, CollectiveKernel, check

SCALES_DTYPES = ("float32", "bfloat16")
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
        """Whether the kernel has the parameters that `RowsFormParams` adds."""
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


@dataclass(frozen=True)
class RowsKernel(CollectiveKernel):
    """A kernel that sums rows, adds a residual if `residual`, norms and quantises the rows. The output dtype is the
    inputs' (no quantisation), an FP8 type or FP4; `form` describes the other variants.

    A kernel "reduce_scatter_rmsnorm_fp8" does this for the rows of its rank, and `work` is that of the largest part."""

    residual: bool = False
    gamma_dtype: DType = field(default_factory=lambda: dtypes.get("float32"))
    scales_dtype: DType = field(default_factory=lambda: dtypes.get("float32"))
    form: NormForm = NormForm()

    family: ClassVar[str] = "rows"
    ops: ClassVar[tuple[str, ...]] = ("allreduce_rmsnorm_fp8", "reduce_scatter_rmsnorm_fp8")
    wide_blocks_share: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check("to_outputs", self.to_outputs, (False,))
        check("out_dtype", self.out_dtype.name, (self.dtype.name, *dtypes.FP8, dtypes.FP4))
        check("gamma_dtype", self.gamma_dtype.name, INPUT_DTYPES)
        groups = (E8M0, "float8_e4m3fn") if self.form.group else ()
        check("scales_dtype", self.scales_dtype.name, (*SCALES_DTYPES, *groups))

    @property
    def multimem_algos(self) -> tuple[str, ...]:
        return PULL[1:]

    @property
    def work(self) -> RowsWork:
        """The properties of this kernel that plans depend on."""
        return RowsWork(
            **self.work_fields,
            residual=self.residual,
            residual_itemsize=self.form.residual.itemsize if self.form.residual else 0,
            normed=self.form.normed,
            group=self.form.group or self.form.head,
            scales_itemsize=self.scales_dtype.itemsize,
            out_lanes=self.out_dtype.lanes,
        )

    @property
    def defines(self) -> dict[str, str | int]:
        return super().defines | {
            "DRVFUSE_RESIDUAL": int(self.residual),
            "DRVFUSE_GAMMA_DTYPE": self.gamma_dtype.cxx,
            "DRVFUSE_SCALES_DTYPE": self.scales_dtype.cxx,
            "DRVFUSE_CLUSTER": self.cluster,
            **self.form.defines(self.dtype, self.out_dtype != self.dtype),
        }
