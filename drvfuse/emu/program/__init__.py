# SPDX-License-Identifier: Apache-2.0
"""Programs that know nothing of the emulated driver, run on it.

`switched(machine)` exchanges the functions of cuda-python's modules for a `with` block; `run(program)` is what the
command `drvfuse emu run` does; `finish(machine)` runs what was left queued.
"""

from .found import finish as finish
from .runner import run as run
from .switch import switched as switched
