# SPDX-License-Identifier: Apache-2.0
"""The collectives: each validates, plans, and launches."""
