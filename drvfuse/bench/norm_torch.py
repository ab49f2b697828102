# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with quantisation as a torch user would write it, through torch.compile, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .torch_graph import torch_us_per_call

_GROUP = 128
_FP8_MAX = 448.0


def torch_us(rows: int, columns: int, epsilon: float, sets: int, least: int) -> dict[str, float]:
    """Microseconds per call for those of `rmsnorm_fp8.FORMS` that have a version in torch, by name. Calls use `sets`
    sets of random bfloat16 inputs in turn."""
    import torch

    torch._dynamo.reset()  # without this, torch stops compiling after a few shapes

    def quantise(y: Any, parts: int) -> tuple[Any, Any]:
        pieces = y.view(rows, parts, columns // parts)
        scale = pieces.abs().amax(2, keepdim=True) / _FP8_MAX
        codes = (pieces / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        return codes.view(rows, columns), scale.view(rows, parts)

    def norm(x: Any, gamma: Any) -> Any:
        return (x * gamma.float()) * torch.rsqrt(x.square().mean(1, keepdim=True) + epsilon)

    def plain(parts: int) -> Callable[..., Any]:
        return lambda x, residual, gamma: quantise(norm(x.float(), gamma), parts)

    def added(parts: int) -> Callable[..., Any]:
        def run(x: Any, residual: Any, gamma: Any) -> Any:
            total = x + residual
            return *quantise(norm(total.float(), gamma), parts), total

        return run

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    gamma = normal(columns)
    inputs = [(normal(rows, columns), normal(rows, columns), gamma) for _ in range(sets)]
    inputs *= -(-least // sets)
    forms = {"row": plain(1), "row, residual": added(1)}
    if columns % _GROUP == 0:
        forms |= {"group": plain(columns // _GROUP), "group, residual": added(columns // _GROUP)}
    return {name: torch_us_per_call(torch.compile(form), inputs) for name, form in forms.items()}
