# SPDX-License-Identifier: Apache-2.0
"""The matrix-vector product with a partial RMSNorm (of the first columns of the result), on one device."""
