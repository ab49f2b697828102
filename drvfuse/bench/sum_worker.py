# SPDX-License-Identifier: Apache-2.0
"""NCCL's reduce-scatter, alone and with a compiled norm, and its all-reduces in a group call, in a process of
`peer_worker`, with torch.

A shape of the plan is (1, bytes of a rank's input, of bfloat16). "NCCL windows" has inputs and outputs in symmetric
windows. The fused op is NCCL's reduce-scatter, then residual, RMSNorm and FP8 by row in one compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .torch_graph import torch_times

OPS = ("allreduce_many", "reduce_scatter", "reduce_scatter_rmsnorm_fp8")
EPSILON = 1e-6
_kept: list[Any] = []


def columns_of(nbytes: int, ranks: int) -> int:
    """The number of columns of an input of `nbytes`: at most 4096, and few enough that there is a row for each rank."""
    return min(4096, nbytes // 2 // ranks)


def tensors_of(nbytes: int) -> int:
    """The number of tensors into which an input of `nbytes` is divided: 16 if they begin at multiples of 16 bytes."""
    return 16 if nbytes % 256 == 0 else 1


def measure(rank: int, plan: dict[str, Any], write: Callable[..., None], failure: Callable[[Exception], str]) -> None:
    """Times of every shape, measured once the processes are connected."""
    ranks, op = plan["ranks"], plan["op"]
    for _, nbytes in plan["shapes"]:
        try:
            inputs, output = _arrays(plan["peer"], nbytes, ranks, plan["sets"])
            call = _call(op, nbytes, ranks)
            _screen(op, call, inputs[0], output, rank, ranks)
            for x in inputs:
                x.normal_()
            turns = -(-plan["calls"] // len(inputs)) * len(inputs)
            us = torch_times(call, [(inputs[turn % len(inputs)], output) for turn in range(turns)])
            write(rows=1, cols=nbytes, residual=False, us=us)
        except Exception as error:  # this size has failed; if the device is lost, the others fail too
            write(rows=1, cols=nbytes, residual=False, failed=failure(error))


def _arrays(peer: str, nbytes: int, ranks: int, most: int) -> tuple[list[Any], Any]:
    import torch
    import torch.distributed as dist

    from .moves import sets_of

    sets, count = sets_of(nbytes, most), nbytes // 2
    if peer == "NCCL":
        made = [torch.empty(count, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]
        return made, torch.empty(count // ranks, dtype=torch.bfloat16, device="cuda")
    backend: Any = dist.group.WORLD._get_backend(torch.device("cuda"))
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        every = torch.empty(sets * count + count // ranks, dtype=torch.bfloat16, device="cuda")
    backend.register_mem_pool(pool, symm=True)
    _kept.append(pool)
    return list(every[: sets * count].view(sets, count)), every[sets * count :]


def _screen(op: str, call: Callable[[Any, Any], Any], x: Any, output: Any, rank: int, ranks: int) -> None:
    """Raise if the peer's sums are wrong; such a peer is not timed."""
    call(x.fill_(rank + 1), output)
    total = ranks * (ranks + 1) // 2
    if not bool(((x if op == "allreduce_many" else output) == total).all()):
        raise ValueError("the sums are wrong")


def _call(op: str, nbytes: int, ranks: int) -> Callable[[Any, Any], Any]:
    import torch
    import torch.distributed as dist

    if op == "allreduce_many":  # in place
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
