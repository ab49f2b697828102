# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: tests on emulated GPUs, under several seeds, that fail for what their machine reports."""
