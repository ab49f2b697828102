# SPDX-License-Identifier: Apache-2.0
"""The native runtime that emulated kernels call (CUDA C++, compiled to PTX, translated like any kernel), and the
loading of native code.

It imports `emu.translate` and `emu.abi`.
"""
