# SPDX-License-Identifier: Apache-2.0
"""COAT's FP8 norms, divisions and residual add on one device, under COAT's names and with its signatures.

Only `fp8_workspace_bytes` is not COAT's: it returns how many bytes an argument `workspace` must have.
"""

from .ops.coat.division import fp8_division as fp8_division
from .ops.coat.division import fp8_division_transpose as fp8_division_transpose
from .ops.coat.group_scales import fp8_add_Ifp_Ifp_Ofp_Og16 as fp8_add_Ifp_Ifp_Ofp_Og16
from .ops.coat.group_scales import fp8_add_rmsnorm_pg2pg_forward as fp8_add_rmsnorm_pg2pg_forward
from .ops.coat.group_scales import fp8_rmsnorm_pg2pg_forward as fp8_rmsnorm_pg2pg_forward
from .ops.coat.layernorm import fp8_layernorm_noparam_backward as fp8_layernorm_noparam_backward
from .ops.coat.layernorm import fp8_layernorm_noparam_forward as fp8_layernorm_noparam_forward
from .ops.coat.layernorm import fp8_layernorm_param_backward as fp8_layernorm_param_backward
from .ops.coat.layernorm import fp8_layernorm_param_forward as fp8_layernorm_param_forward
from .ops.coat.rmsnorm_backward import fp8_rmsnorm_backward as fp8_rmsnorm_backward
from .ops.coat.rmsnorm_backward import fp8_workspace_bytes as fp8_workspace_bytes
from .ops.coat.rmsnorm_forward import fp8_rmsnorm_forward as fp8_rmsnorm_forward
