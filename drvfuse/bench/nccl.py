# SPDX-License-Identifier: Apache-2.0
"""NCCL's collectives by size, in a process of `peer_worker`, with torch: all-gather, broadcast, all-to-all,
reduce-scatter, alone and with a compiled norm, and several all-reduces in one group call.

A shape in the JSON object that `peer_worker` gets is (1, number of bytes): of a rank's output for the ops that move
bytes, of a rank's bfloat16 input for the ops that add. In place of the fused op, a reduce-scatter is followed by one
compiled kernel, which adds the residual and computes RMSNorm and FP8 with a scale per row. The peer "NCCL windows" is
NCCL with inputs and outputs in its symmetric windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .sizes import EPSILON, MOVES, columns_of, input_bytes, sets_of, tensors_of
from .torch_graph import compiled_norm, torch_times

PEERS = ("NCCL", "NCCL windows")
_kept: list[Any] = []


def measure(rank: int, plan: dict[str, Any], write: Callable[..., None], failure: Callable[[Exception], str]) -> None:
    """Measure every shape, and write its times. Called when the processes are connected."""
    for _, nbytes in plan["shapes"]:
        try:
            call, inputs, output = (_moves if plan["op"] in MOVES else _sums)(rank, plan, nbytes)
            turns = -(-plan["calls"] // len(inputs)) * len(inputs)
            us = torch_times(call, [(inputs[turn % len(inputs)], output) for turn in range(turns)])
            write(rows=1, cols=nbytes, residual=False, us=us)
        except Exception as error:  # this size has failed; after the loss of the device all others fail too
            write(rows=1, cols=nbytes, residual=False, failed=failure(error))


def _moves(rank: int, plan: dict[str, Any], nbytes: int) -> tuple[Callable[[Any, Any], None], list[Any], Any]:
    """Return the call, its random inputs and its output, after a check that the call gives the right output."""
    import torch

    ranks, op = plan["ranks"], plan["op"]
    own = input_bytes(op, ranks, nbytes)
    inputs, output = _buffers(plan["peer"], torch.uint8, sets_of(own, plan["sets"]), own, nbytes)
    call = _CALLS[op]
    _screen_bytes(op, call, inputs[0], output, rank, ranks)
    for x in inputs:
        x.random_(0, 256)
    return call, inputs, output


def _sums(rank: int, plan: dict[str, Any], nbytes: int) -> tuple[Callable[[Any, Any], Any], list[Any], Any]:
    """The call, its random inputs and its output. The sums of the call are checked first."""
    import torch

    ranks, op, count = plan["ranks"], plan["op"], nbytes // 2
    sets = sets_of(nbytes, plan["sets"])
    inputs, output = _buffers(plan["peer"], torch.bfloat16, sets, count, count // ranks)
    call = _call_of_sums(op, nbytes, ranks)
    _screen_sums(op, call, inputs[0], output, rank, ranks)
    for x in inputs:
        x.normal_()
    return call, inputs, output


def _screen_bytes(op: str, call: Callable[[Any, Any], None], x: Any, output: Any, rank: int, ranks: int) -> None:
    """Raise ValueError if the call's output is wrong, so that the peer is not timed."""
    call(x.fill_(rank + 1), output)
    if op == "broadcast":
        right = bool((x == 1).all())
    else:
        right = all(bool((part == source + 1).all()) for source, part in enumerate(output.view(ranks, -1)))
    if not right:
        raise ValueError(f"the output of {op} on rank {rank} has wrong bytes")


def _screen_sums(op: str, call: Callable[[Any, Any], Any], x: Any, output: Any, rank: int, ranks: int) -> None:
    """Raise ValueError if the call's sums are wrong, so that the peer is not timed."""
    call(x.fill_(rank + 1), output)
    total = ranks * (ranks + 1) // 2
    if not bool(((x if op == "allreduce_many" else output) == total).all()):
        raise ValueError(f"{op} has wrong sums on rank {rank}")


def _call_of_sums(op: str, nbytes: int, ranks: int) -> Callable[[Any, Any], Any]:
    import torch
    import torch.distributed as dist

    if op == "allreduce_many":  # the sums overwrite the inputs
        return lambda x, output: dist.all_reduce_coalesced(list(x.view(tensors_of(nbytes), -1)))
    if op == "reduce_scatter":
        return lambda x, output: dist.reduce_scatter_tensor(output, x)
    columns = columns_of(nbytes, ranks)
    gamma = torch.ones(columns, dtype=torch.bfloat16, device="cuda")
    norm = compiled_norm(torch.randn(nbytes // 2 // ranks, device="cuda").bfloat16().view(-1, columns), gamma, EPSILON)

    def both(x: Any, output: Any) -> Any:
        dist.reduce_scatter_tensor(output, x)
        return norm(output.view(-1, columns))

    return both


def _buffers(peer: str, dtype: Any, sets: int, of_input: int, of_output: int) -> tuple[list[Any], Any]:
    """`sets` inputs of `of_input` elements, and an output of `of_output` elements."""
    if peer == "NCCL":
        import torch

        made = [torch.empty(of_input, dtype=dtype, device="cuda") for _ in range(sets)]
        return made, torch.empty(of_output, dtype=dtype, device="cuda")
    every = window(sets * of_input + of_output, dtype)
    return list(every[: sets * of_input].view(sets, of_input)), every[sets * of_input :]


def window(elements: int, dtype: Any) -> Any:
    """A tensor in a symmetric window of all ranks, which lives as long as the process."""
    import torch
    import torch.distributed as dist

    backend: Any = dist.group.WORLD._get_backend(torch.device("cuda"))
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        found = torch.empty(elements, dtype=dtype, device="cuda")
    backend.register_mem_pool(pool, symm=True)
    _kept.append(pool)
    return found


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
