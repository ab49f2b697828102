# SPDX-License-Identifier: Apache-2.0
"""Epilogues of collectives: their parameters on the local ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from ....errors import ArgumentError
from ...call.epilogue import Epilogue
from ...call.epilogue_parameters import EpilogueParameters
from ...call.operands import Operand
from .kernel import BY_OWNER

if TYPE_CHECKING:
    from ....comm.group import Group


class BoundEpilogue(EpilogueParameters):
    """An epilogue with a structure of parameters for each local rank."""

    def replaced(self, algo: str, parameters: dict[str, Any]) -> Self:
        """Return a copy with some parameters replaced. Raises ArgumentError if the copy would need another kernel, or
        if the parameters differ by rank and `algo` does not allow that."""
        new = super().replaced(algo, parameters)
        if new.epilogue.differs_by_rank and algo in BY_OWNER:
            raise ArgumentError("parameters", "different by rank", f'the same on all ranks, as algo is "{algo}"')
        return new


def bind(group: Group, epilogue: Epilogue) -> BoundEpilogue:
    """Check the epilogue's parameters for the group and fill a structure per local rank.

    Raises ArgumentError, which names the wrong parameter.
    """
    return BoundEpilogue.of([rank.device for rank in group.ranks], epilogue)


def read_by(sources: Sequence[Operand], epilogue: BoundEpilogue | None) -> Sequence[Operand]:
    """Return all arrays that a call reads on the local ranks: its inputs and those of its epilogue."""
    if epilogue is None:
        return sources
    return [*sources, *(operand for of_rank in epilogue.operands for operand in of_rank)]
