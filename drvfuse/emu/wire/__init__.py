# SPDX-License-Identifier: Apache-2.0
"""Driver calls as bytes, by a table of the C prototypes of all functions.

`signatures` reads the table. `arguments` and `inputs` read Python values as cuda.bindings do. `coder` reads whole
calls, and writes calls and results as messages. This package does not use a machine: the process that makes a call
writes the message, and the process with the machine runs the call. The package imports `emu.space`, `emu.abi` and
`emu.bindings`.
"""
