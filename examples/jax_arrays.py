# SPDX-License-Identifier: Apache-2.0
"""JAX arrays in and out, without a copy: inputs by DLPack, results back by `jax.dlpack.from_dlpack`.

JAX arrays are immutable, so drvfuse reads them and writes its own arrays, which JAX then uses where they lie.

    python examples/jax_arrays.py        # all GPUs of the machine, one or more

Output:

    JAX sees the sum over the GPUs: True
    JAX uses drvfuse's arrays where they lie: True
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import drvfuse as df


def main() -> None:
    devices = jax.devices("gpu")[:8]
    with df.Group.local(len(devices), max_blocks=16) as group:
        inputs = [jax.device_put(jnp.full((128, 1024), 1 + i, jnp.bfloat16), d) for i, d in enumerate(devices)]
        sums = df.allreduce(group, inputs)  # waits on the GPUs for what JAX still computes
        back = [jax.dlpack.from_dlpack(array) for array in sums]
        doubled = [array * 2 for array in back]  # runs after the all-reduce
        total = sum(range(1, len(devices) + 1))
        print("JAX sees the sum over the GPUs:", all(bool((array == 2 * total).all()) for array in doubled))
        same = all(a.unsafe_buffer_pointer() == b.ptr for a, b in zip(back, sums, strict=True))
        print("JAX uses drvfuse's arrays where they lie:", same)


if __name__ == "__main__":
    main()
