# SPDX-License-Identifier: Apache-2.0
"""Compares results of the emulated driver with those of a GPU: of single instructions and of drvfuse's own kernels.

A form is an instruction with given modifiers and types, and the PTX around it. `forms` lists the forms, `operands`
makes their operands, `batch` makes the PTX, `execute` runs it, `rules` says which results count as equal, and `fixture`
stores the results of a GPU. `collectives` lists calls of drvfuse's own kernels.
"""
