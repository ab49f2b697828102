# SPDX-License-Identifier: Apache-2.0
"""COAT's FP8 norms, divisions and residual add on one device. `drvfuse.coat` has their public names."""
