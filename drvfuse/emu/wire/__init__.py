# SPDX-License-Identifier: Apache-2.0
"""Driver calls as bytes: one table of the functions' C prototypes, and what follows from it.

`signatures` reads the table, `arguments` reads Python values as cuda.bindings does, `coder` writes calls and results.
Nothing here knows a machine: whoever has the arguments of a call writes it, whoever has the machine runs it.
"""
