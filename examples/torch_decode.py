# SPDX-License-Identifier: Apache-2.0
"""The end of a tensor-parallel layer with torch: a process per GPU, torch's tensors and streams, in torch's CUDA graph.

torch multiplies, and drvfuse sums over the ranks, adds the residual, norms and quantises in one launch. The group finds
its ranks by what torchrun sets. The op runs on torch's current stream, and is captured with torch's kernels.

    torchrun --nproc-per-node 2 examples/torch_decode.py        # a process per GPU: any number up to 8

Output:

    3 replays: residual, scales and FP8 rows are those of torch's own operators: True
"""

from __future__ import annotations

import torch

import drvfuse as df

TOKENS, HIDDEN, INNER, EPSILON = 16, 1024, 2048, 1e-6
FP8 = torch.float8_e4m3fn


def main() -> None:
    with df.Group.connect(max_blocks=16) as group:
        (rank,) = group.ranks
        torch.cuda.set_device(rank.device.index)
        torch.set_default_device("cuda")
        # Every rank makes all parts of the weights, and so can check the sum by itself.
        torch.manual_seed(0)
        weights = [torch.randn(HIDDEN, INNER, dtype=torch.bfloat16) / INNER**0.5 for _ in range(group.size)]
        gamma = torch.rand(HIDDEN, dtype=torch.float32).add(0.5).bfloat16()
        inner, residual = torch.zeros(TOKENS, INNER).bfloat16(), torch.zeros(TOKENS, HIDDEN).bfloat16()
        partial = torch.empty_like(residual)
        rows, scales = torch.empty(TOKENS, HIDDEN, dtype=FP8), torch.empty(TOKENS)
        output = df.view(
            rows.data_ptr(), (TOKENS, HIDDEN), "float8_e4m3fn", rank.device
        )  # a view in place of DLPack, which some releases of torch lack for FP8
        new_residual = torch.empty_like(residual)

        def layer() -> None:
            torch.mm(inner, weights[rank.index].T, out=partial)
            df.allreduce_rmsnorm_fp8(
                group,
                partial,
                gamma,
                epsilon=EPSILON,
                residuals=residual,
                residual_outputs=new_residual,
                outputs=output,
                scales=scales,
                streams="current",
            )

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer()  # compiles, and lets cuBLAS make its workspace
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            layer()

        right = True
        for step in range(3):
            torch.manual_seed(step + 1)  # the same random numbers on all ranks
            inner.copy_(torch.randn(TOKENS, INNER))
            residual.copy_(torch.randn(TOKENS, HIDDEN))
            graph.replay()
            torch.cuda.synchronize()
            group.check()  # raises if a rank gave up waiting, which replays of torch's graphs do not check
            total = sum((inner @ weight.T).float() for weight in weights)
            expected = (total + residual.float()).bfloat16()
            x = new_residual.float()
            normed = x * gamma.float() * torch.rsqrt((x * x).mean(1, keepdim=True) + EPSILON)
            scale = normed.abs().amax(1) / torch.finfo(FP8).max
            right &= torch.equal(new_residual, expected)
            right &= torch.allclose(scales, scale, rtol=1e-5)
            right &= torch.allclose(rows.float() * scales[:, None], normed, rtol=2**-3, atol=1e-2)
        if rank.index == 0:
            print("3 replays: residual, scales and FP8 rows are those of torch's own operators:", right)


if __name__ == "__main__":
    main()
