# SPDX-License-Identifier: Apache-2.0
"""The address space of an emulated machine: a window of this process in which device pointers are host pointers;
and whether memory of the process outside of it may be read or written (`mapped`).

It imports `emu.abi`.
"""
