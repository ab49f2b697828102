# SPDX-License-Identifier: Apache-2.0
"""Training steps through COAT's FP8 RMSNorm: activations are kept in FP8, and the gradients need no other copy.

A norm followed by a linear layer learns a random target. The forward of the norm gives its output twice, in FP8 with
one scale: by rows for the forward product, and transposed for the gradient of the weight. The backward of the norm
reads the FP8 input that the forward kept. Both run on the GPU, in one launch each; the two matrix products, which an
engine has already, are numpy's here.

    python examples/fp8_training_step.py        # one GPU; DRVFUSE_DRIVER=emu for an emulated one

Output:

    step 0: loss 1.9
    step 4: loss 0.4
    bytes of activations kept for the backward: 13312 in place of 24576 of bfloat16
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import drvfuse as df
from drvfuse import coat

TOKENS, HIDDEN, OUTPUTS, GROUP, EPSILON = 64, 96, 8, 16, 1e-5
BF16 = ml_dtypes.bfloat16


def real(stored: df.Array, scale: df.Array) -> np.ndarray:
    """The values of an FP8 array with one scale."""
    return stored.numpy().astype(np.float32) * scale.numpy().astype(np.float32)


def main() -> None:
    random = np.random.default_rng(0)
    device = df.device(0)
    hidden, residual = (device.array(random.standard_normal((TOKENS, HIDDEN)).astype(BF16)) for _ in range(2))
    target = random.standard_normal((TOKENS, OUTPUTS)).astype(np.float32)
    norm_weight = np.ones(HIDDEN, np.float32)
    weight = 0.1 * random.standard_normal((HIDDEN, OUTPUTS)).astype(np.float32)

    # The residual add gives the norm's input in FP8, with a scale for each group of 16 elements.
    _, (x, x_scales) = coat.fp8_add_Ifp_Ifp_Ofp_Og16(hidden, residual, "E4M3", GROUP)
    for step in range(5):
        w = device.array(norm_weight.astype(BF16))
        y, y_scale, y_transposed, (w, rstd, warps) = coat.fp8_rmsnorm_forward(x, x_scales, w, GROUP, EPSILON, True)
        difference = real(y, y_scale) @ weight - target
        loss = float((difference**2).mean())
        if step in (0, 4):
            print(f"step {step}: loss {loss:.1f}")

        gradient = 2 * difference / difference.size
        into_weight = real(y_transposed, y_scale) @ gradient
        into_y = device.array((gradient @ weight.T).astype(BF16))
        _, into_norm = coat.fp8_rmsnorm_backward(x, x_scales, into_y, w, rstd, GROUP, warps)
        weight -= 2.0 * into_weight
        norm_weight -= 2.0 * into_norm.numpy().astype(np.float32)

    kept = sum(array.nbytes for array in (x, x_scales, rstd, y_transposed))
    print(f"bytes of activations kept for the backward: {kept} in place of {2 * 2 * TOKENS * HIDDEN} of bfloat16")


if __name__ == "__main__":
    main()
