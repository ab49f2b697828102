# SPDX-License-Identifier: Apache-2.0
"""The output of an emulated machine: races, faults, deadlocks, timelines, counts and the text that kernels print.

It imports `emu.native`, `emu.translate`, `emu.space` and `emu.abi`, and never `emu.machine`.
"""
