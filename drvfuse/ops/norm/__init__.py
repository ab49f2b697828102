# SPDX-License-Identifier: Apache-2.0
"""RMSNorm or LayerNorm of rows with quantisation, on one device."""
