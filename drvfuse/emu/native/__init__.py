# SPDX-License-Identifier: Apache-2.0
"""The native runtime that emulated kernels call, and the loading of native code. The runtime is CUDA C++, which is
compiled to PTX and translated as kernels are.

The package imports `emu.translate` and `emu.abi`.
"""
