# SPDX-License-Identifier: Apache-2.0
"""The common parts of the measurements of NCCL's collectives by size, in a process of `peer_worker`, with torch.

A shape in the JSON object that `peer_worker` gets is (1, number of bytes). The peer "NCCL windows" is NCCL with inputs
and outputs in its symmetric windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .torch_graph import torch_times

PEERS = ("NCCL", "NCCL windows")
_kept: list[Any] = []


def measure(
    plan: dict[str, Any],
    write: Callable[..., None],
    failure: Callable[[Exception], str],
    made: Callable[[int], tuple[Callable[[Any, Any], Any], list[Any], Any]],
) -> None:
    """Write the times of every shape. `made(nbytes)` returns the call, its sets of inputs and its output."""
    for _, nbytes in plan["shapes"]:
        try:
            call, inputs, output = made(nbytes)
            turns = -(-plan["calls"] // len(inputs)) * len(inputs)
            us = torch_times(call, [(inputs[turn % len(inputs)], output) for turn in range(turns)])
            write(rows=1, cols=nbytes, residual=False, us=us)
        except Exception as error:  # this size has failed; after the loss of the device all others fail too
            write(rows=1, cols=nbytes, residual=False, failed=failure(error))


def buffers(peer: str, dtype: Any, sets: int, of_input: int, of_output: int) -> tuple[list[Any], Any]:
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
