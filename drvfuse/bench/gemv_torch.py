# SPDX-License-Identifier: Apache-2.0
"""The GEMV with partial RMSNorm as torch users write it, for comparison."""

from __future__ import annotations

from typing import Any

from .torch_graph import torch_us_per_call

_CALLS = 64


def torch_us(n: int, k: int, n_normed: int, epsilon: float, rotated_bytes: int) -> tuple[float, float, float]:
    """Microseconds per call of cuBLAS alone, of cuBLAS and a compiled norm, and of a compiled product and norm. Calls
    use random bfloat16 weights in turn, of about `rotated_bytes` in all."""
    import torch

    torch._dynamo.reset()  # without this, torch stops compiling after a few shapes
    many = max(1, min(_CALLS, rotated_bytes // (2 * n * k)))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(many)]
    act = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
    gamma = torch.randn(n_normed, device="cuda", dtype=torch.bfloat16)

    def norm(y: Any) -> Any:
        first = y[:, :n_normed].float()
        factor = torch.rsqrt(first.square().mean(1, keepdim=True) + epsilon)
        return ((first * gamma) * factor).bfloat16(), y[:, n_normed:]

    compiled = torch.compile(norm)
    arguments = [(weights[turn % many],) for turn in range(-(-_CALLS // many) * many)]
    return (
        torch_us_per_call(lambda w: act @ w.t(), arguments),
        torch_us_per_call(lambda w: compiled(act @ w.t()), arguments),
        torch_us_per_call(torch.compile(lambda w: norm((act * w).float().sum(1)[None])), arguments),
    )
