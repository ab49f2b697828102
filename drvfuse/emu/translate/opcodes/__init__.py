# SPDX-License-Identifier: Apache-2.0
"""Instructions by kind: each module registers the emitters of its opcodes."""
