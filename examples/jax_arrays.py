# SPDX-License-Identifier: Apache-2.0
"""JAX arrays in and out, without a copy: inputs by DLPack, results back by `jax.dlpack.from_dlpack`.

JAX arrays are immutable, so drvfuse reads them and writes its own arrays, which JAX then uses where they lie.

    python examples/jax_arrays.py        # 2 GPUs

Output:

    the sum that JAX sees: [3.0] on 2 devices
    the same memory: True
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import drvfuse as df


def main() -> None:
    with df.Group.local(2, max_blocks=16) as group:
        inputs = [
            jax.device_put(jnp.full((128, 1024), 1.0 + i, jnp.bfloat16), d) for i, d in enumerate(jax.devices()[:2])
        ]
        for array in inputs:
            array.block_until_ready()
        sums = df.allreduce(group, inputs)
        back = [jax.dlpack.from_dlpack(total) for total in sums]
        doubled = [array * 2 for array in back]  # ordered behind the all-reduce
        values = sorted({float(value) / 2 for array in doubled for value in (array.min(), array.max())})
        devices = {device for array in back for device in array.devices()}
        print(f"the sum that JAX sees: {values} on {len(devices)} devices")
        print("the same memory:", all(a.unsafe_buffer_pointer() == b.ptr for a, b in zip(back, sums, strict=True)))
        group.synchronize()


if __name__ == "__main__":
    main()
