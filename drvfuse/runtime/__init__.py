# SPDX-License-Identifier: Apache-2.0
"""Explicit objects over the CUDA driver API. Knows nothing of collectives; importing it opens no library."""
