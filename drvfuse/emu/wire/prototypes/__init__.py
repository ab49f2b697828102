# SPDX-License-Identifier: Apache-2.0
"""The C prototypes of the emulated driver's functions, by subject; `table` says how they are written."""
