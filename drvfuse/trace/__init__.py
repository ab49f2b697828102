# SPDX-License-Identifier: Apache-2.0
"""What the blocks of traced kernels did when: buffers, clocks, and what is made of the records."""
