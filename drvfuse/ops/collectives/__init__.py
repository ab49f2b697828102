# SPDX-License-Identifier: Apache-2.0
"""The collectives of a group of ranks: all-reduce, all-reduce + RMSNorm + FP8, all-gather, broadcast, all-to-all."""
