# SPDX-License-Identifier: Apache-2.0
# The public names, here and nowhere else: see `drvfuse.lazy`.

from . import driver as driver
from . import program as program
from .findings.reports import Report as Report
from .machine.machine import Machine as Machine
from .machine.machine import default_machine as default_machine
from .machine.process.process import Process as Process
from .serve.client import AttachedMachine as AttachedMachine
from .serve.server import Server as Server
