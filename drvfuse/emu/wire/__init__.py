# SPDX-License-Identifier: Apache-2.0
"""Driver calls as bytes, by a table of the C prototypes of all functions.

`signatures` reads the table. `arguments` and `inputs` read Python values as cuda.bindings do. `coder` reads whole
calls, and writes calls and results as messages. This room does not use a machine: the process that makes a call writes
it, and the process with the machine runs it. It imports `emu.space`, `emu.abi` and `emu.bindings`.
"""
