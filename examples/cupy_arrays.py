# SPDX-License-Identifier: Apache-2.0
"""CuPy arrays in and out, without a copy, on CuPy's streams.

    python examples/cupy_arrays.py        # 2 GPUs

Output:

    written into CuPy's arrays: [3.0, 3.0]
    drvfuse's arrays in CuPy, the same memory: True
"""

from __future__ import annotations

import cupy

import drvfuse as df


def main() -> None:
    with df.Group.local(2, max_blocks=16) as group:
        inputs, outputs, streams = [], [], []
        for rank in group:
            with cupy.cuda.Device(rank.device.index):
                streams.append(cupy.cuda.Stream(non_blocking=True))
                with streams[-1]:
                    inputs.append(cupy.full((128, 1024), 1 + rank.index, cupy.float32))
                    outputs.append(cupy.empty_like(inputs[-1]))
        df.allreduce(group, inputs, outputs, streams=[stream.ptr for stream in streams])  # behind what they hold
        print(
            "written into CuPy's arrays:",
            [float(read(output, stream)) for output, stream in zip(outputs, streams, strict=True)],
        )
        sums = df.allreduce(group, inputs)  # drvfuse's own arrays
        back = [cupy.from_dlpack(total) for total in sums]
        group.synchronize()
        same = all(a.data.ptr == b.ptr for a, b in zip(back, sums, strict=True))
        print("drvfuse's arrays in CuPy, the same memory:", same)


def read(array: cupy.ndarray, stream: cupy.cuda.Stream) -> float:
    with array.device, stream:
        return array.min().get()


if __name__ == "__main__":
    main()
