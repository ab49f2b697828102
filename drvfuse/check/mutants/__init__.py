# SPDX-License-Identifier: Apache-2.0
"""Planted faults. Other systems or earlier states of drvfuse have had them, and `drvfuse check` must find each."""

from . import barriers, calls, moves, multimem, nodes, one_device, push

_MODULES = (barriers, one_device, push, multimem, calls, nodes, moves)
MUTANTS = {mutant.name: mutant for module in _MODULES for mutant in module.MUTANTS}
"""All planted faults, by name."""
