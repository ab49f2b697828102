# SPDX-License-Identifier: Apache-2.0
"""The collectives of a group of ranks: all-reduce, reduce-scatter, both with norm and FP8, all-gather, broadcast,
all-to-all."""
