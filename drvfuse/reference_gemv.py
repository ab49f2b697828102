# SPDX-License-Identifier: Apache-2.0
"""`drvfuse.gemv_partial_norm` in numpy, bit for bit: `drvfuse.reference.gemv` by its short name."""

from .reference.gemv import Normed as Normed
from .reference.gemv import gemv_partial_norm as gemv_partial_norm
