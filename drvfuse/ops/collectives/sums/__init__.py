# SPDX-License-Identifier: Apache-2.0
"""Collectives that add the ranks' arrays element by element: all-reduce, all-reduce of many arrays, reduce-scatter."""
