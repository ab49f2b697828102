# SPDX-License-Identifier: Apache-2.0
"""Benchmarks for `drvfuse bench`: ops compared with lower bounds and with other libraries measured in the same run, on
real GPUs, and the emulator's cost.

A module has `HEAD`, `TEXT_COLUMNS` and `lines(result)` for the table, and functions that measure one result each, a
dictionary that JSON can hold.
"""
