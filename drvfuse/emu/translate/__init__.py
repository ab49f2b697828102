# SPDX-License-Identifier: Apache-2.0
"""PTX to LLVM IR: functions, registers, control flow and number formats; the instructions are in `opcodes`.

It imports `ptx` and `emu.abi`.
"""
