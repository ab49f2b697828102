# SPDX-License-Identifier: Apache-2.0
"""Emulated GPUs: devices and their memory, streams, graphs, the queues of work and the engine that runs kernels.

It imports every room of the emulator but `emu.driver`.
"""
