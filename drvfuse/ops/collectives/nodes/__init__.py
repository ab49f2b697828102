# SPDX-License-Identifier: Apache-2.0
"""Calls over several nodes: stages of kernels and exchanges, and the partial sums that the nodes exchange."""
