# SPDX-License-Identifier: Apache-2.0
"""PTX as data: a module's intermediate form, its parser, and facts about its kernels.

This package imports only errors, config, dtypes, lazy and tables. `compiler` and `emu` read PTX through it.
"""
