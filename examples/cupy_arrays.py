# SPDX-License-Identifier: Apache-2.0
"""CuPy arrays in and out, without a copy, on CuPy's streams.

    python examples/cupy_arrays.py        # all GPUs of the machine, one or more

Output:

    CuPy's arrays hold the sum over the GPUs: True
    CuPy uses drvfuse's arrays where they lie: True
"""

from __future__ import annotations

import cupy

import drvfuse as df


def main() -> None:
    gpus = min(cupy.cuda.runtime.getDeviceCount(), 8)
    with df.Group.local(gpus, max_blocks=16) as group:
        inputs, outputs, streams = [], [], []
        for rank in group:
            with cupy.cuda.Device(rank.device.index):
                streams.append(cupy.cuda.Stream(non_blocking=True))
                with streams[-1]:
                    inputs.append(cupy.full((128, 1024), 1 + rank.index, cupy.float32))
                    outputs.append(cupy.empty_like(inputs[-1]))
        df.allreduce(group, inputs, outputs, streams=streams)  # runs after what CuPy has queued on these streams
        total = sum(range(1, gpus + 1))
        right = all(holds(output, total, stream) for output, stream in zip(outputs, streams, strict=True))
        print("CuPy's arrays hold the sum over the GPUs:", right)

        sums = df.allreduce(group, inputs)  # drvfuse's own arrays, on its own streams
        back = [cupy.from_dlpack(array) for array in sums]
        right = all(holds(array, total, cupy.cuda.Stream.null) for array in back)
        same = all(a.data.ptr == b.ptr for a, b in zip(back, sums, strict=True))
        print("CuPy uses drvfuse's arrays where they lie:", right and same)


def holds(array: cupy.ndarray, value: float, stream: cupy.cuda.Stream) -> bool:
    """Whether all elements have the value, computed on a stream of CuPy."""
    with array.device, stream:
        return bool((array == value).all())


if __name__ == "__main__":
    main()
