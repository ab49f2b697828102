# SPDX-License-Identifier: Apache-2.0
"""Benchmarks for `drvfuse bench`: times of ops on real GPUs, with lower bounds of these times and the times of other
libraries, which the same run measures; and the CPU time that the emulated driver takes.

A result is a dictionary that can be written as JSON. The module of a benchmark has functions that measure results, and
`HEAD`, `TEXT_COLUMNS` and `lines(result)` for the table that is printed.
"""
