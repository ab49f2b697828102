# SPDX-License-Identifier: Apache-2.0
"""NCCL's all-gather, broadcast and all-to-all, in a process of `peer_worker`, with torch.

A shape in the JSON object that `peer_worker` gets is (1, bytes of a rank's output).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import nccl_sizes

OPS = ("all_gather", "broadcast", "all_to_all")


def measure(rank: int, plan: dict[str, Any], write: Callable[..., None], failure: Callable[[Exception], str]) -> None:
    """Measure every shape, and write its times. Called when the processes are connected."""
    nccl_sizes.measure(plan, write, failure, lambda nbytes: _made(rank, plan, nbytes))


def _made(rank: int, plan: dict[str, Any], nbytes: int) -> tuple[Callable[[Any, Any], None], list[Any], Any]:
    """Return the call, its random inputs and its output, after a check that the call gives the right output."""
    import torch

    from .moves import sets_of
    from .moves_calls import input_bytes

    ranks, op = plan["ranks"], plan["op"]
    own = input_bytes(op, ranks, nbytes)
    inputs, output = nccl_sizes.buffers(plan["peer"], torch.uint8, sets_of(own, plan["sets"]), own, nbytes)
    call = _CALLS[op]
    _screen(op, call, inputs[0], output, rank, ranks)
    for x in inputs:
        x.random_(0, 256)
    return call, inputs, output


def _screen(op: str, call: Callable[[Any, Any], None], x: Any, output: Any, rank: int, ranks: int) -> None:
    """Raise ValueError if the call's output is wrong, so that the peer is not timed."""
    call(x.fill_(rank + 1), output)
    if op == "broadcast":
        right = bool((x == 1).all())
    else:
        right = all(bool((part == source + 1).all()) for source, part in enumerate(output.view(ranks, -1)))
    if not right:
        raise ValueError(f"the output of {op} on rank {rank} has wrong bytes")


def _all_gather(x: Any, output: Any) -> None:
    import torch.distributed as dist

    dist.all_gather_into_tensor(output, x)


def _broadcast(x: Any, output: Any) -> None:
    """Broadcast `x` from rank 0 in place; `output` is not used, as torch has only an in-place broadcast."""
    import torch.distributed as dist

    dist.broadcast(x, 0)


def _all_to_all(x: Any, output: Any) -> None:
    import torch.distributed as dist

    dist.all_to_all_single(output, x)


_CALLS: dict[str, Callable[[Any, Any], None]] = {
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}
