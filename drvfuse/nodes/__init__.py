# SPDX-License-Identifier: Apache-2.0
"""Groups over several nodes: which ranks form one, and how their partial sums travel between them (docs/nodes.md)."""
