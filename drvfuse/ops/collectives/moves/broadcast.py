# SPDX-License-Identifier: Apache-2.0
"""`broadcast`: one rank's array, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....errors import require_integer
from ....plans import moves, moves_over_nodes
from ....plans.moves_over_nodes import NodeRanks
from ....runtime.array import Array
from ....runtime.interop import ArrayLike
from ...call import operands
from ...call.op import op
from ...call.options import PDLLevel
from ...call.prepared import Prepared
from ...call.streams import Streams, resolve_streams
from . import moving, over_nodes
from .kernel import RELAY
from .part import MovePart

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....trace.buffer import Trace


@op
def broadcast(
    group: Group,
    inputs: ArrayLike | Sequence[ArrayLike],
    outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    *,
    root: int = 0,
    algo: str = "auto",
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[list[Array]]:
    """Copy the input of rank `root` of the group to the output of every rank.

    `inputs` is a list with one array per local rank, all of one shape and dtype, as in `all_gather` but of any number
    of dimensions. Only the root's input is read, so another rank may pass its output as its input. `outputs` is such a
    list; None allocates them. In place: `outputs[i]` may be `inputs[i]` itself.

    `algo` may also be "relay": the root pushes each part of its array to one rank, which stores it and pushes it on to
    the others, so that no link carries the array twice. With fewer than three ranks "relay" means "push".

    The other arguments, alignment and errors are as for `all_gather`. `drvfuse.reference.broadcast` computes the same
    in numpy.
    """
    common = moving.options("broadcast", group, algo, pdl_level, max_num_blocks, trace, (RELAY,))
    root = require_integer("root", root, f"a rank of the group, 0 to {group.size - 1}", 0, group.size - 1)
    sources = operands.of_ranks(group, "inputs", inputs, alignment=1)
    first = sources[0]
    queues = resolve_streams(group, streams, sources)
    targets, values = moving.outputs(group, "outputs", outputs, first.shape, first.dtype, queues, "that of the inputs")
    operands.no_overlap(sources, targets, list(zip(sources, targets, strict=True)))
    table = moves.broadcast(group.size, int(root), first.array.nbytes)
    text = f"of {first.shape} {first.dtype} from rank {int(root)}"
    result = values[0] if operands.is_bare(group, inputs) else values
    parts = [MovePart(sources, targets, table)]
    if group.link is not None:
        steps = moves_over_nodes.broadcast(first.array.nbytes, int(root), NodeRanks(group.layout.of))
        return over_nodes.prepare(common, text, parts, steps, queues, result)
    return moving.prepare(common, text, parts, queues, result, same=True, root=int(root))
