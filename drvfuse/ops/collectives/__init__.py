# SPDX-License-Identifier: Apache-2.0
"""The collectives of a group of ranks: all-reduce, and all-reduce + RMSNorm + FP8."""
