# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: tests on emulated GPUs, under several seeds, which fail for reports of the emulated driver."""
