# SPDX-License-Identifier: Apache-2.0
"""The address space of an emulated machine: a range of addresses of this process, the window. A device pointer is a
host pointer into the window. `mapped` checks memory of the process outside of the window.

The package imports `emu.abi`.
"""
