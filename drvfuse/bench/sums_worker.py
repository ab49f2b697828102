# SPDX-License-Identifier: Apache-2.0
"""Measures NCCL's reduce-scatter, alone and with a compiled norm, and several NCCL all-reduces in one group call. Runs
in a process of `peer_worker`, with torch.

A shape in the JSON object that `peer_worker` gets is (1, number of bytes of a rank's bfloat16 input). In place of the
fused op, NCCL's reduce-scatter is followed by one compiled kernel, which adds the residual and computes RMSNorm and FP8
with a scale per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import nccl_sizes

OPS = ("allreduce_many", "reduce_scatter", "reduce_scatter_rmsnorm_fp8")
EPSILON = 1e-6
_MOST_COLUMNS = 4096


def columns_of(nbytes: int, ranks: int) -> int:
    """The number of columns of an input of `nbytes`: the largest multiple of 8, up to 4096, that divides the number of
    elements in a rank's part. A part must have a multiple of 8 elements."""
    part = nbytes // 2 // ranks
    rows = -(-part // _MOST_COLUMNS)
    return next(part // count for count in range(rows, part + 1) if part % (8 * count) == 0)


def tensors_of(nbytes: int) -> int:
    """The number of tensors into which an input of `nbytes` is divided: 16 if each one then begins at a multiple of
    16 bytes, else 1."""
    return 16 if nbytes % 256 == 0 else 1


def measure(rank: int, plan: dict[str, Any], write: Callable[..., None], failure: Callable[[Exception], str]) -> None:
    """Measure every shape, and write its times. Called when the processes are connected."""
    nccl_sizes.measure(plan, write, failure, lambda nbytes: _made(rank, plan, nbytes))


def _made(rank: int, plan: dict[str, Any], nbytes: int) -> tuple[Callable[[Any, Any], Any], list[Any], Any]:
    """The call, its random inputs and its output. The sums of the call are checked first."""
    import torch

    from .moves import sets_of

    ranks, op, count = plan["ranks"], plan["op"], nbytes // 2
    sets = sets_of(nbytes, plan["sets"])
    inputs, output = nccl_sizes.buffers(plan["peer"], torch.bfloat16, sets, count, count // ranks)
    call = _call(op, nbytes, ranks)
    _screen(op, call, inputs[0], output, rank, ranks)
    for x in inputs:
        x.normal_()
    return call, inputs, output


def _screen(op: str, call: Callable[[Any, Any], Any], x: Any, output: Any, rank: int, ranks: int) -> None:
    """Raise ValueError if the call's sums are wrong, so that the peer is not timed."""
    call(x.fill_(rank + 1), output)
    total = ranks * (ranks + 1) // 2
    if not bool(((x if op == "allreduce_many" else output) == total).all()):
        raise ValueError(f"{op} has wrong sums on rank {rank}")


def _call(op: str, nbytes: int, ranks: int) -> Callable[[Any, Any], Any]:
    import torch
    import torch.distributed as dist

    if op == "allreduce_many":  # the sums overwrite the inputs
        return lambda x, output: dist.all_reduce_coalesced(list(x.view(tensors_of(nbytes), -1)))
    if op == "reduce_scatter":
        return lambda x, output: dist.reduce_scatter_tensor(output, x)
    from .peer_worker import compiled_norm

    columns = columns_of(nbytes, ranks)
    gamma = torch.ones(columns, dtype=torch.bfloat16, device="cuda")
    norm = compiled_norm(torch.randn(nbytes // 2 // ranks, device="cuda").bfloat16().view(-1, columns), gamma, EPSILON)

    def both(x: Any, output: Any) -> Any:
        dist.reduce_scatter_tensor(output, x)
        return norm(output.view(-1, columns))

    return both
