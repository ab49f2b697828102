# SPDX-License-Identifier: Apache-2.0
"""Grids, chunks, tiles and choices of algorithm, as integers computed from shapes and limits.

It imports the ground floor alone, so that references and tests may use it without a driver.
"""
