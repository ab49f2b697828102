# SPDX-License-Identifier: Apache-2.0
"""Results of a collective: the arrays that the caller gave, or new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import validate
from .streams import refuse_capture
from .validate import RankArray

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...dtypes import DType
    from ...runtime.stream import Stream


class Results:
    """One result array a local rank, in `operands`: those that the caller gave, or new ones.

    New arrays are allocated in the order of `streams`. Raises CaptureError if that is needed during a capture.
    """

    def __init__(
        self,
        group: Group,
        argument: str,
        given: Any,
        targets: Sequence[RankArray],
        shape: tuple[int, ...],
        dtype: DType,
        streams: Sequence[Stream],
    ) -> None:
        self._group, self._argument, self._given = group, argument, given
        self.operands = list(targets)
        if given is None:
            refuse_capture(streams, argument)
            created = [rank.device.empty(shape, dtype, stream=s) for rank, s in zip(group, streams, strict=True)]
            self.operands = [RankArray(f"{argument}[{i}]", array, None, False) for i, array in enumerate(created)]

    @property
    def addresses(self) -> list[int]:
        return [operand.array.ptr for operand in self.operands]

    def returned(self, inputs: Any) -> Any:
        """What the caller gets: a list, or one array if `inputs` is a bare one. Given arrays come back as given."""
        if self._given is None:
            values: list[Any] = [operand.array for operand in self.operands]
        else:
            values = validate.per_rank(self._group, self._argument, self._given)
        return values[0] if validate.is_bare(self._group, inputs) else values
