# SPDX-License-Identifier: Apache-2.0
"""Traces of when the blocks of kernels did what: buffers, clocks, and the evaluation of the records."""
