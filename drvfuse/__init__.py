# SPDX-License-Identifier: Apache-2.0
"""drvfuse: fused multi-GPU collectives on the CUDA driver API, and an emulated driver that runs the same PTX on a CPU.

Importing this package opens no CUDA library; each public name, listed in `__init__.pyi`, loads its module on first use.
"""

from .lazy import attach

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = attach(__name__, __file__)
