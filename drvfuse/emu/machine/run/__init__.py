# SPDX-License-Identifier: Apache-2.0
"""Queued work and its execution: commands, operations, kernels on the native runtime, virtual time."""
