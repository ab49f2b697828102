# SPDX-License-Identifier: Apache-2.0
"""Grids, chunks, tiles and choices of algorithm, as integers computed from shapes and limits.

It imports the ground floor alone (docs/architecture.md), so references and tests use it without a driver.
"""
