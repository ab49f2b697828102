# SPDX-License-Identifier: Apache-2.0
"""A process that times one rank of a peer (a collective of another library) with torch. `peers` starts it as `python -m
drvfuse.bench.peer_worker RANK PLAN`.

PLAN is a JSON object that says what to measure. It has `peer`, `op`, `residuals` (a list of booleans: each shape is
timed with a residual for true, and without one for false), `ranks`, `shapes`, `calls` (the number of calls per graph),
`sets` (the number of sets of inputs, which the calls use in turn), `weight_columns` (K of the GEMV, for each shape),
`epsilon`, `folder`, and `seconds` (the time limit for waiting for the processes of other ranks). The process writes
`folder`/RANK, a JSON object per line: the times of a shape, in microseconds per call for each replay, or what failed.

A peer reduces its sets of inputs in turn, in place, so values grow to infinity, which does not change the time. Only
"torch one-shot" has a separate output. For the fused op a compiled norm and quantisation follow the sum.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import nccl
from .nccl import window
from .sizes import MOVES, SUMS
from .torch_graph import compiled_norm, torch_times

Reduce = Callable[[Any], Any]


def main(rank: int, plan: dict[str, Any]) -> int:
    with (Path(plan["folder"]) / str(rank)).open("w", buffering=1) as sink:

        def write(**record: Any) -> None:
            sink.write(json.dumps(record) + "\n")

        try:
            _measure(rank, plan, write)
        except Exception as error:
            write(failed=first_line(error))
            return 1
    return 0


def first_line(error: Exception) -> str:
    """The type of an error and the first line of its text, or the first two lines if the first ends with a colon."""
    lines = str(error).strip().splitlines() or ["without a message"]
    return f"{type(error).__name__}: {' '.join(lines[: 1 + lines[0].endswith(':')])}"


def _measure(rank: int, plan: dict[str, Any], write: Callable[..., None]) -> None:
    import torch
    import torch.distributed as dist

    ranks = plan["ranks"]
    torch.cuda.set_device(rank)
    wait = timedelta(seconds=plan["seconds"])
    store = dist.FileStore(str(Path(plan["folder"]) / "store"), ranks)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=wait, device_id=device)
    if plan["op"] in (*MOVES, *SUMS):
        nccl.measure(rank, plan, write, first_line)
    else:
        _measure_sums(rank, plan, write)
    torch.cuda.synchronize()
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(ranks)], wait)  # others may still use this rank's memory


def _measure_sums(rank: int, plan: dict[str, Any], write: Callable[..., None]) -> None:
    import torch

    ranks, bf16 = plan["ranks"], torch.bfloat16
    most = max(rows * cols for rows, cols in plan["shapes"])
    inputs, reduce = _PEERS[plan["peer"]](most, plan["sets"])
    gamma = {cols: torch.ones(cols, dtype=bf16, device="cuda") for _, cols in plan["shapes"]}
    for (rows, cols), k in zip(plan["shapes"], plan["weight_columns"], strict=True):
        sets = [x[: rows * cols].view(rows, cols) for x in inputs]
        for residual in plan["residuals"]:
            try:
                _screen(reduce, sets[0], rank, ranks, reduces=plan["peer"] != NORM)
                for x in sets:
                    x.normal_()
                call = reduce
                if plan["op"] != "allreduce":
                    norm = compiled_norm(torch.randn_like(sets[0]) if residual else None, gamma[cols], plan["epsilon"])
                    call = _after(norm, reduce)
                weights = [torch.randn(cols, k, dtype=bf16, device="cuda") for _ in sets]
                gemv = _gemv(torch.randn(1, k, dtype=bf16, device="cuda"))
                turns = [number % len(sets) for number in range(-(-plan["calls"] // len(sets)) * len(sets))]
                pairs = [(sets[turn], weights[turn]) for turn in turns]
                write(
                    rows=rows,
                    cols=cols,
                    residual=residual,
                    us=torch_times(call, [(x,) for x, _ in pairs]),
                    gemv=torch_times(gemv, pairs),
                    chain=torch_times(_after_gemv(gemv, call), pairs),
                )
            except Exception as error:  # this shape has failed; after the loss of the device all others fail too
                write(rows=rows, cols=cols, residual=residual, failed=first_line(error))


def _screen(reduce: Reduce, x: Any, rank: int, ranks: int, reduces: bool) -> None:
    """Raise ValueError if the peer's sums are wrong, so that the peer is not timed. Without `reduces` the peer computes
    no sums, and nothing is checked."""
    if reduces:
        got = reduce(x.fill_(rank + 1))
        if not bool((got == ranks * (ranks + 1) // 2).all()):
            raise ValueError(f"the all-reduce has wrong sums on rank {rank}")


def _after(norm: Callable[[Any], Any], reduce: Reduce) -> Reduce:
    return lambda x: norm(reduce(x))


def _after_gemv(gemv: Callable[[Any, Any], Any], call: Reduce) -> Callable[[Any, Any], Any]:
    def both(x: Any, weight: Any) -> None:
        gemv(x, weight)
        call(x)

    return both


def _gemv(act: Any) -> Callable[[Any, Any], Any]:
    """Return a function of an input x and a weight. It multiplies `act` by the weight with cuBLAS, and stores the
    product in the first row of x."""
    import torch

    return lambda x, weight: torch.mm(act, weight.t(), out=x[:1])


def _empties(elements: int, sets: int) -> list[Any]:
    import torch

    return [torch.empty(elements, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]


def _nccl(elements: int, sets: int) -> tuple[list[Any], Reduce]:
    return _empties(elements, sets), _all_reduce


def _nccl_windows(elements: int, sets: int) -> tuple[list[Any], Reduce]:
    """`sets` inputs, which are parts of one array in a symmetric window, and NCCL's all-reduce of one of them."""
    import torch

    return list(window(elements * sets, torch.bfloat16).view(sets, elements)), _all_reduce


def _all_reduce(x: Any) -> Any:
    import torch.distributed as dist

    dist.all_reduce(x)
    return x


def _symmetric(elements: int, sets: int) -> tuple[list[Any], str]:
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as memory

    group = dist.group.WORLD.group_name
    inputs = [memory.empty(elements, dtype=torch.bfloat16, device=torch.device("cuda")) for _ in range(sets)]
    _kept.extend(memory.rendezvous(x, group) for x in inputs)
    return inputs, group


def _torch_one_shot(elements: int, sets: int) -> tuple[list[Any], Reduce]:
    import torch

    inputs, group = _symmetric(elements, sets)
    (output,) = _empties(elements, 1)

    def reduce(x: Any) -> Any:
        out = output[: x.numel()].view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_out(x, "sum", group, out)

    return inputs, reduce


def _torch_two_shot(elements: int, sets: int) -> tuple[list[Any], Reduce]:
    import torch

    inputs, group = _symmetric(elements, sets)
    return inputs, lambda x: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group)


def _norm_alone(elements: int, sets: int) -> tuple[list[Any], Reduce]:
    return _empties(elements, sets), lambda x: x


NORM = "norm alone"
_PEERS: dict[str, Callable[[int, int], tuple[list[Any], Reduce]]] = {
    "NCCL": _nccl,
    "NCCL windows": _nccl_windows,
    "torch one-shot": _torch_one_shot,
    "torch two-shot": _torch_two_shot,
    NORM: _norm_alone,
}
PEERS = tuple(name for name in _PEERS if name != NORM)
_kept: list[Any] = []


if __name__ == "__main__":
    status = main(int(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # runs no destructors: that of a communicator would wait for a rank that has failed
