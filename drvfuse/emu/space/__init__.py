# SPDX-License-Identifier: Apache-2.0
"""The address space of an emulated machine: a window of this process in which device pointers are host pointers.

It imports `emu.abi`.
"""
