# SPDX-License-Identifier: Apache-2.0
"""FP8 RMSNorm as a torch user would write it, through torch.compile, for comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .torch_graph import torch_us_per_call


def torch_us(
    x: npt.NDArray[Any],
    s_x: npt.NDArray[Any],
    w: npt.NDArray[Any],
    g: npt.NDArray[Any],
    QB: int,
    epsilon: float,
    sets: int,
) -> tuple[float, float]:
    """Microseconds per call of forward (tensor maximum, qy, qy_t, rstd) and of backward. The arguments are arrays of
    e4m3 and bfloat16 in host memory."""
    import torch

    torch._dynamo.reset()  # without this, torch stops compiling after a few shapes
    rows, columns = x.shape

    def tensor(host: npt.NDArray[Any], dtype: Any) -> Any:
        raw = host.view(np.uint8 if host.dtype.itemsize == 1 else np.int16)
        return torch.from_numpy(raw.copy()).cuda().view(dtype)

    def forward(x: Any, s: Any, w: Any) -> Any:
        values = (x.float().view(rows, -1, QB) * s.float()[..., None]).view(rows, columns)
        rstd = torch.rsqrt(values.square().mean(1) + epsilon)
        y = values * rstd[:, None] * w.float()
        scale = ((y.abs().amax() + 1e-10) / 448.0).bfloat16()
        q = (y.bfloat16().float() / scale.float()).to(torch.float8_e4m3fn)
        return q, scale, q.view(torch.uint8).t().contiguous(), rstd

    def backward(x: Any, s: Any, g: Any, w: Any, rstd: Any) -> Any:
        values = (x.float().view(rows, -1, QB) * s.float()[..., None]).view(rows, columns)
        normed = values * rstd[:, None]
        gradient = g.float()
        weighted = w.float() * gradient
        mean = (normed * weighted).mean(1, keepdim=True)
        return ((weighted - normed * mean) * rstd[:, None]).bfloat16(), (gradient * normed).sum(0).bfloat16()

    bf16 = torch.bfloat16
    a, s, weight, d = tensor(x, torch.float8_e4m3fn), tensor(s_x, bf16), tensor(w, bf16), tensor(g, bf16)
    rstd = forward(a, s, weight)[3]
    copies = [(a.clone(), s.clone(), d.clone()) for _ in range(sets)]
    return (
        torch_us_per_call(torch.compile(forward), [(a, s, weight) for a, s, _ in copies]),
        torch_us_per_call(torch.compile(backward), [(a, s, d, weight, rstd) for a, s, d in copies]),
    )
