# SPDX-License-Identifier: Apache-2.0
"""The functions of graphs: structure, nodes, memory, instantiation."""

from . import any_node, dot, edges, executable, graph, memory, nodes, user_object  # noqa: F401  they register functions
