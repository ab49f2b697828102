# SPDX-License-Identifier: Apache-2.0
"""Processes that use a machine, their threads, their failures, and how their calls wait."""
