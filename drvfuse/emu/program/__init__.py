# SPDX-License-Identifier: Apache-2.0
"""Programs that know nothing of the emulated driver, run on it.

`switched(machine)` exchanges the functions of cuda-python's modules for a `with` block.
"""

from .switch import switched as switched
