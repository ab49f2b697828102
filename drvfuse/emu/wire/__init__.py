# SPDX-License-Identifier: Apache-2.0
"""Converts driver calls to bytes and back, using a table of the functions' C prototypes.

`signatures` reads the table. `arguments` and `inputs` read Python values as cuda.bindings do. `coder` reads whole
calls, and writes calls and results as messages. This package does not use a machine: the process that makes a call
writes the message, and the process with the machine runs the call. The package imports `emu.space`, `emu.abi` and
`emu.bindings`.
"""
