# SPDX-License-Identifier: Apache-2.0
"""What an emulated machine finds and says: races, faults, deadlocks, timelines, counts, printed text.

It imports `emu.native`, `emu.translate`, `emu.space` and `emu.abi`, and never `emu.machine`.
"""
