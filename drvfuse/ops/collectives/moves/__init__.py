# SPDX-License-Identifier: Apache-2.0
"""Collectives that only move bytes: all-gather, broadcast, all-to-all."""
