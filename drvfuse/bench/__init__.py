# SPDX-License-Identifier: Apache-2.0
"""Benchmarks beside floors and peers of the same run, for `drvfuse bench`; real GPUs only."""
