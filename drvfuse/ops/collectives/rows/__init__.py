# SPDX-License-Identifier: Apache-2.0
"""Collectives that add the ranks' rows, norm and quantise them: all-reduce and reduce-scatter with RMSNorm and FP8."""
