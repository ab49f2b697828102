# SPDX-License-Identifier: Apache-2.0
"""Benchmarks for `drvfuse bench`: ops on real GPUs, with lower bounds and other libraries that are measured in the same
run, and the cost of the emulated driver.

A module has `HEAD`, `TEXT_COLUMNS` and `lines(result)` for the table, and functions each of which measures one result,
a dictionary that can be written as JSON.
"""
