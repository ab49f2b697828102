# SPDX-License-Identifier: Apache-2.0
"""Graphs, captures, and what instantiated graphs keep."""
