# SPDX-License-Identifier: Apache-2.0
"""Emulated GPUs: devices and their memory, streams, graphs, the queues of work and the engine that runs kernels.

It imports `emu.findings`, `emu.native`, `emu.translate`, `emu.space`, `emu.abi` and `ptx`.
"""
