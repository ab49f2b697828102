# SPDX-License-Identifier: Apache-2.0
"""Instruction forms and drvfuse's kernels run on two drivers, with the GPU's answers kept as a fixture.

`forms` says what is run, `operands` on what, `batch` makes the PTX, `execute` runs it, `rules` says what counts as
equal, `fixture` keeps a GPU's answers, `collectives` does the same for drvfuse's own kernels.
"""
