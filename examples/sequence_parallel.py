# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism: the two halves of a fused all-reduce, with the tokens of each rank between them.

A layer of a tensor-parallel transformer ends with partial sums of all tokens on every rank. Here each rank receives the
sums of its own tokens only, adds their residual, norms and quantises them in the same launch, and keeps the residual of
these tokens alone. The next layer needs all tokens again: the FP8 rows and their scales are gathered in one launch.

    python examples/sequence_parallel.py        # up to 4 GPUs; DRVFUSE_DRIVER=emu for emulated ones

Output with four:

    rank 0 has tokens 0 to 2, rank 1 tokens 3 to 5, rank 2 tokens 6 to 7, rank 3 tokens 8 to 9
    the gathered FP8 rows and scales have the bits of the fused all-reduce: True
    so have the residuals of each rank's tokens: True
    bytes of residual per rank: 1536 in place of 5120
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import drvfuse as df

MOST_RANKS, TOKENS, HIDDEN, EPSILON = 4, 10, 256, 1e-6
BF16 = ml_dtypes.bfloat16


def main() -> None:
    ranks = min(MOST_RANKS, df.device(0).driver.cuDeviceGetCount())
    random = np.random.default_rng(0)
    partial_sums = [random.standard_normal((TOKENS, HIDDEN)).astype(BF16) for _ in range(ranks)]
    residual = random.standard_normal((TOKENS, HIDDEN)).astype(BF16)
    gamma = random.uniform(0.5, 1.5, HIDDEN).astype(BF16)
    # The rule of numpy.array_split: the first ranks have a token more.
    owned = np.array_split(np.arange(TOKENS), ranks)
    print(", ".join(f"rank {r} {'has ' * (r == 0)}tokens {own[0]} to {own[-1]}" for r, own in enumerate(owned)))

    with df.Group.local(ranks, max_blocks=16) as group:
        inputs = [rank.array(sums) for rank, sums in zip(group, partial_sums, strict=True)]
        gammas = [rank.array(gamma) for rank in group]
        residuals = [rank.array(residual[own]) for rank, own in zip(group, owned, strict=True)]

        part = df.reduce_scatter_rmsnorm_fp8(
            group, inputs, gammas, epsilon=EPSILON, residuals=residuals, residual_outputs=residuals
        )
        counts = [len(own) for own in owned]
        rows, scales = df.all_gather(group, part.output, scales=part.scales, splits=counts)

        whole = df.allreduce_rmsnorm_fp8(
            group, inputs, gammas, epsilon=EPSILON, residuals=[rank.array(residual) for rank in group]
        )
        group.synchronize()

        def same(a: df.Array, b: np.ndarray) -> bool:
            return a.numpy().tobytes() == b.tobytes()

        gathered = all(
            same(rows[r], whole.output[r].numpy()) and same(scales[r], whole.scales[r].numpy()) for r in range(ranks)
        )
        kept = all(same(residuals[r], whole.residual[r].numpy()[own]) for r, own in enumerate(owned))
        print("the gathered FP8 rows and scales have the bits of the fused all-reduce:", gathered)
        print("so have the residuals of each rank's tokens:", kept)
        print(f"bytes of residual per rank: {residuals[0].nbytes} in place of {residual.nbytes}")


if __name__ == "__main__":
    main()
