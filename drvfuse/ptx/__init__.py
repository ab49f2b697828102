# SPDX-License-Identifier: Apache-2.0
"""PTX as data: a module's intermediate form, its parser, and facts about its kernels.

It imports the ground floor alone; `compiler` and `emu` read PTX through it.
"""
