# SPDX-License-Identifier: Apache-2.0
"""Driver calls as bytes: one table of the functions' C prototypes, and what follows from it.

`signatures` reads the table, `arguments` and `inputs` read Python values as cuda.bindings do, `coder` does it for whole
calls and writes calls and results. It imports `emu.space`, `emu.abi` and `emu.bindings`.
Nothing here knows a machine: whoever has the arguments of a call writes it, whoever has the machine runs it.
"""
