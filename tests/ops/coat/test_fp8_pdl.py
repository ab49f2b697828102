# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch of every FP8 kernel, at each `PDLLevel`. Producers write late, and consumers start
early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from fp8_support import bits, case, place

import drvfuse as df
from drvfuse.ops.coat import layernorm, rmsnorm_forward
from drvfuse.plans import coat_backward
from drvfuse.plans.coat_forward import FewRows, HeldRows, HeldTiles, ManyRows
from drvfuse.reference import coat_rmsnorm

ON, EARLY = df.PDLLevel.ON, df.PDLLevel.OVERLAP_AT_BEGINNING

HELPERS = r"""
// Lets its dependents start at once, waits, then copies.
extern "C" __global__ void late(const unsigned char* from, unsigned char* to, int count, unsigned long long ns) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// Waits for the preceding kernel, then copies.
extern "C" __global__ void consume(const unsigned char* from, unsigned char* to, int count) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
"""


class Inputs(NamedTuple):
    x: Any
    s_x: Any
    w: Any
    g: Any
    rstd: Any


Outputs = Sequence[tuple[tuple[int, ...], str]]


class Kernel(NamedTuple):
    """A call that tests one kernel with operands of `shape`. `plan` forces that kernel if another one would be
    chosen."""

    shape: tuple[int, int]
    outputs: Callable[[int, int], Outputs]
    run: Callable[..., object]
    plan: Any = None


def forward(a: Inputs, **rest: Any) -> object:
    return df.coat.fp8_rmsnorm_forward(a.x, a.s_x, a.w, 16, 1e-5, **rest)


def layer_forward(a: Inputs, **rest: Any) -> object:
    return df.coat.fp8_layernorm_param_forward(a.x, a.s_x, a.w, a.w, 16, 1e-5, **rest)


def backward(a: Inputs, **rest: Any) -> object:
    return df.coat.fp8_rmsnorm_backward(a.x, a.s_x, a.g, a.w, a.rstd, 16, **rest)


def gradients(a: Inputs, **rest: Any) -> object:
    return df.coat.fp8_rmsnorm_backward(a.x, a.s_x, [a.g, a.g], a.w, a.rstd, 16, **rest)


def division(a: Inputs, **rest: Any) -> object:
    return df.coat.fp8_division_transpose(a.g, 16, "E4M3", **rest)


def division_by(a: Inputs, **rest: Any) -> object:
    return df.coat.fp8_division(a.g, 16, "E4M3", a.rstd[:1], **rest)


def groups(a: Inputs, **rest: Any) -> object:
    return df.coat.fp8_rmsnorm_pg2pg_forward(a.x, a.s_x, a.w, 16, 1e-5, **rest)


def turned(m: int, n: int) -> Outputs:
    return ((m, n), "float8_e4m3fn"), ((), "bfloat16"), ((n, m), "float8_e4m3fn")


def normed(m: int, n: int) -> Outputs:
    return *turned(m, n), ((m,), "float32")


def layer_normed(m: int, n: int) -> Outputs:
    return *normed(m, n), ((m,), "float32")


def both_gradients(m: int, n: int) -> Outputs:
    return ((m, n), "bfloat16"), ((n,), "bfloat16")


def quotient(m: int, n: int) -> Outputs:
    return (((m, n), "float8_e4m3fn"),)


def grouped(m: int, n: int) -> Outputs:
    return ((m, n), "float8_e4m3fn"), ((m, n // 16), "bfloat16"), ((m,), "float32")


SMALL = (33, 96)
KERNELS = {
    "forward": Kernel(SMALL, normed, forward, lambda limits, m, n, QB: FewRows(limits, m, n)),
    "forward-one-block": Kernel((1, 96), normed, forward, lambda limits, m, n, QB: HeldRows(m, n)),
    "forward-cluster": Kernel((13, 1040), normed, forward, lambda limits, m, n, QB: HeldRows(m, n)),
    "forward-tiles": Kernel((133, 96), normed, forward, lambda limits, m, n, QB: HeldTiles(limits, m, n, 4, 1)),
    "forward-rows": Kernel((165, 512), normed, forward, ManyRows),
    "layernorm": Kernel(SMALL, layer_normed, layer_forward, lambda *arguments: None),
    "layernorm-rows": Kernel(
        (133, 1200), layer_normed, layer_forward, lambda *arguments: ManyRows(*arguments[:-1], layer=True, affine=True)
    ),
    "backward": Kernel(SMALL, both_gradients, backward),
    "backward-many": Kernel((140, 512), both_gradients, backward, 0),
    "gradients": Kernel(SMALL, both_gradients, gradients),
    "division": Kernel(SMALL, turned, division),
    "division-by": Kernel(SMALL, quotient, division_by),
    "groups": Kernel(SMALL, grouped, groups),
}


@pytest.fixture(scope="module", params=[0, 1], ids=["late", "early"])
def device(request, driver):
    """The device under test. With the emulated driver there are two: one starts dependent launches as late as possible,
    one as early as allowed."""
    if driver == "cuda":
        yield df.device(0, driver=driver)
        return
    with df.emu.Machine(devices=1, sm_count=16, seed=request.param) as machine:
        yield df.device(0, driver=machine)
        assert not machine.reports


@pytest.fixture
def module(device):
    return df.compile(HELPERS, driver=device.driver)


def force(monkeypatch, name: str, plan: Any) -> None:
    if name.startswith("backward") and plan is not None:
        monkeypatch.setattr(coat_backward, "FEW_ROWS", plan)
    elif name.startswith("forward"):
        monkeypatch.setattr(rmsnorm_forward, "forward_plan", plan)
    elif name.startswith("layernorm"):
        monkeypatch.setattr(layernorm, "layernorm_plan", plan)


@pytest.mark.parametrize(
    ("name", "level"), [("forward", df.PDLLevel.OFF), *((name, level) for name in KERNELS for level in (ON, EARLY))]
)
def test_results_are_right_with_a_late_producer_and_an_early_consumer(device, module, rng, monkeypatch, name, level):
    """Kernels write every input except the weights. They trigger first, so the call may start before they write."""
    kernel = KERNELS[name]
    force(monkeypatch, name, kernel.plan)
    values = case(rng, kernel.shape)
    right = Inputs(*place(device, values), device.array(coat_rmsnorm.row_rstd(values.x, values.s_x, 16, 1e-5)))
    made = [[device.empty(*one) for one in kernel.outputs(*kernel.shape)] for _ in range(2)]
    kernel.run(right, outputs=made[0])
    expected = [array.numpy() for array in made[0]]

    hosts = [array.numpy() for array in right]
    wrong = Inputs(*(device.array(np.full(host.shape, 0.5, np.float32).astype(host.dtype)) for host in hosts))
    wrong = wrong._replace(w=right.w)
    kernel.run(wrong, outputs=made[1], pdl_level=level)  # the first run loads the kernel and allocates the workspace
    device.synchronize()
    for source, target in zip(right._replace(w=right.g), wrong._replace(w=wrong.g), strict=True):
        module["late"].prepare(1, 64, source, target, source.nbytes, 50_000, pdl=True)(device.stream)
    kernel.run(wrong, outputs=made[1], pdl_level=level)
    copies = [device.zeros(array.shape, array.dtype) for array in made[1]]
    for result, copy in zip(made[1], copies, strict=True):
        module["consume"].prepare(1, 64, result, copy, result.nbytes, pdl=True)(device.stream)
    device.synchronize()
    for found, copy, host in zip(made[1], copies, expected, strict=True):
        assert (bits(found.numpy()) == bits(host)).all()
        assert (bits(copy.numpy()) == bits(host)).all()
