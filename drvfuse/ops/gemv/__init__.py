# SPDX-License-Identifier: Apache-2.0
"""The matrix-vector product with a partial RMSNorm, on one device."""
