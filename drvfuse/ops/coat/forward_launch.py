# SPDX-License-Identifier: Apache-2.0
"""What the forward passes of RMSNorm and LayerNorm share: the parameters of their kernels, and a launch by a plan."""

from __future__ import annotations

from ...plans.coat_forward import FewRows, HeldRows, HeldTiles, ManyRows
from ...plans.definitions import Defines, defines
from ...structures import laid_out
from ..call.planned import Planned
from ..call.scratch import ScratchParams
from .fp8_call import Fp8Call, Fp8Params

# Parameters of the kernel. The plan has their values, as attributes of the same names.
_SHARES = (
    "groups",
    "longer",
    "part_columns",
    "resident_columns",
    "chunk_rows",
)
_ARRAYS = ("x", "scales", "weight", "bias", "qy", "qy_t", "scale", "mean", "rstd")


@laid_out("coat/forward.cuh", parts=(ScratchParams,))
class ForwardParams(Fp8Params):
    """The parameters of all kernels of the forward pass."""


def planned_forward(
    call: Fp8Call, plan: HeldRows | HeldTiles | FewRows | ManyRows, kinds: Defines, batch_rows: int, address: int
) -> Planned:
    """The launch that `plan` describes. `kinds` are the macros that say which types and which arithmetic the kernel
    has. qy_t consists of batches of `batch_rows` rows, and its address modulo 16 is `address`."""
    shares = {name: getattr(plan, name) for name in _SHARES}
    template = ForwardParams(rows=call.rows, batch_rows=max(batch_rows, 1), **shares)
    every = kinds + plan.defines(call.aligned("x", "qy", "weight", "bias"))
    every += defines(run=plan.run(batch_rows, address))
    return call.planned(
        *(plan.kernel, every, plan.grid, plan.threads, template),
        smem=plan.shared_bytes,
        waits=plan.waits,
        cluster=plan.cluster,
    )
