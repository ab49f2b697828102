# SPDX-License-Identifier: Apache-2.0
"""The forms of a fused norm that benchmarks time: its norm, its quantisation, and its further outputs."""

from __future__ import annotations

from dataclasses import dataclass

from ..plans.quantisation import E8M0, Quantisation

PLAIN = "row"


@dataclass(frozen=True)
class Form:
    """The arguments of a fused op that differ between forms.

    `residual` is the dtype of residuals and residual outputs, None if there are none. If `head_columns` is not 0, the
    norm is computed separately for each head, which is `head_columns` adjacent columns of a row. `normed` says whether
    the normed rows are stored too.
    """

    quantisation: Quantisation = Quantisation.per_row()
    residual: str | None = None
    gamma: str = "bfloat16"
    norm: str = "rms"
    beta: bool = False
    head_columns: int = 0
    normed: bool = False

    @property
    def gathered(self) -> bool:
        """True if the form is a quantisation with scales and nothing else, so that `all_gather` can gather its codes
        and scales.
        """
        return self == Form(self.quantisation) and self.quantisation.scales is not None

    def fits(self, columns: int) -> bool:
        """Whether rows of `columns` columns consist of whole heads, and heads of whole groups. If rows are not divided
        into heads, a row counts as one head.
        """
        of_norm = self.head_columns or columns
        return columns % of_norm == 0 and of_norm % (self.quantisation.group or 1) == 0


_GROUPS = {
    f"group-{group}{suffix}": Form(Quantisation.per_group(group, scales=scales))
    for group in (64, 128)
    for suffix, scales in (("", "float32"), ("-e8m0", E8M0))
}
_BLOCKS = {
    f"{name}{suffix}": Form(made)
    for suffix, layout in (("", "row"), ("-column", "column"), ("-tiles", "tiles"))
    for name, made in (("mxfp8", Quantisation.mxfp8(layout=layout)), ("nvfp4", Quantisation.nvfp4(2.0**-7, layout)))
}
FORMS = {
    PLAIN: Form(),
    "row-bfloat16-scales": Form(Quantisation.per_row(scales="bfloat16")),
    "static": Form(Quantisation.static(2.0**-6)),
    **_GROUPS,
    "group-128-column": Form(Quantisation.per_group(128, layout="column")),
    "group-128-e8m0-tiles": Form(Quantisation.per_group(128, scales=E8M0, layout="tiles")),
    **_BLOCKS,
    "normed": Form(normed=True),
    "gamma-float32": Form(gamma="float32"),
    "layer": Form(norm="layer"),
    "layer-beta": Form(norm="layer", beta=True),
    "heads-128": Form(head_columns=128),
    "residual": Form(residual="bfloat16"),
    "residual-float32": Form(residual="float32"),
    "residual-group-128": Form(Quantisation.per_group(128), residual="bfloat16"),
}
"""The forms by the names that `drvfuse bench fused-forms --form` takes. Given scales suit normally distributed data."""
