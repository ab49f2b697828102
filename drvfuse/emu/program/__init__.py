# SPDX-License-Identifier: Apache-2.0
"""Runs programs that were written for the CUDA driver, unchanged, on the emulated driver.

`switched(machine)` replaces the functions of cuda-python's modules for a `with` block. `run(program)` is the command
`drvfuse emu run`. `finish(machine)` runs the work that a program left queued.
"""

from .found import finish as finish
from .runner import run as run
from .switch import switched as switched
