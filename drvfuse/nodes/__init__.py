# SPDX-License-Identifier: Apache-2.0
"""Groups over several nodes: which ranks form a node, and how partial sums are exchanged between nodes
(docs/nodes.md).
"""
