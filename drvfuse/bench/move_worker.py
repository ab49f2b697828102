# SPDX-License-Identifier: Apache-2.0
"""NCCL's all-gather, broadcast and all-to-all, in a process of `peer_worker`, with torch.

A shape of the plan is (1, bytes of a rank's output). "NCCL windows" has inputs and outputs in symmetric windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .torch_graph import torch_times

OPS = ("all_gather", "broadcast", "all_to_all")
PEERS = ("NCCL", "NCCL windows")
_kept: list[Any] = []


def measure(rank: int, plan: dict[str, Any], write: Callable[..., None], failure: Callable[[Exception], str]) -> None:
    """Times of every shape, measured once the processes are connected."""
    ranks, op = plan["ranks"], plan["op"]
    for _, nbytes in plan["shapes"]:
        own = nbytes // ranks if op == "all_gather" else nbytes
        try:
            inputs, output = _arrays(plan["peer"], own, nbytes, plan["sets"])
            call = _CALLS[op]
            _screen(op, call, inputs[0], output, rank, ranks)
            for x in inputs:
                x.random_(0, 256)
            turns = -(-plan["calls"] // len(inputs)) * len(inputs)
            us = torch_times(call, [(inputs[turn % len(inputs)], output) for turn in range(turns)])
            write(rows=1, cols=nbytes, residual=False, us=us)
        except Exception as error:  # this size has failed; if the device is lost, the others fail too
            write(rows=1, cols=nbytes, residual=False, failed=failure(error))


def _arrays(peer: str, own: int, nbytes: int, most: int) -> tuple[list[Any], Any]:
    import torch
    import torch.distributed as dist

    from .moves import sets_of

    sets = sets_of(own, most)
    if peer == "NCCL":
        made = [torch.empty(own, dtype=torch.uint8, device="cuda") for _ in range(sets)]
        return made, torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    backend: Any = dist.group.WORLD._get_backend(torch.device("cuda"))
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        every = torch.empty(sets * own + nbytes, dtype=torch.uint8, device="cuda")
    backend.register_mem_pool(pool, symm=True)
    _kept.append(pool)
    return list(every[: sets * own].view(sets, own)), every[sets * own :]


def _screen(op: str, call: Callable[[Any, Any], None], x: Any, output: Any, rank: int, ranks: int) -> None:
    """Raise if the peer's output bytes are wrong; such a peer is not timed."""
    call(x.fill_(rank + 1), output)
    if op == "broadcast":
        right = bool((x == 1).all())
    else:
        right = all(bool((part == source + 1).all()) for source, part in enumerate(output.view(ranks, -1)))
    if not right:
        raise ValueError("the bytes are wrong")


def _all_gather(x: Any, output: Any) -> None:
    import torch.distributed as dist

    dist.all_gather_into_tensor(output, x)


def _broadcast(x: Any, output: Any) -> None:
    """torch has only an in-place broadcast, so `output` is not used."""
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
