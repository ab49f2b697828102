# SPDX-License-Identifier: Apache-2.0
"""Grids, chunks, tiles and choices of algorithm, as integers computed from shapes and limits.

This package imports only errors, config, dtypes, lazy and tables, so references and tests use it without a driver.
"""
