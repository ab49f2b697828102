# SPDX-License-Identifier: Apache-2.0
"""Traces of the phases of kernels' blocks: buffers, clocks, and the evaluation of the records."""
