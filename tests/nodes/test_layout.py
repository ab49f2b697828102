# SPDX-License-Identifier: Apache-2.0
"""Which ranks form a node, and the order in which nodes are added."""

from __future__ import annotations

import pytest

from drvfuse.errors import ArgumentError
from drvfuse.nodes.layout import Nodes, find_nodes, find_order


def test_auto_makes_a_node_of_the_ranks_of_a_host():
    found = find_nodes(["a", "a", "b", "b", "c", "c"])
    assert found.of == (0, 0, 1, 1, 2, 2)
    assert (found.count, found.inside, found.ranks(1), found.place(3)) == (3, 2, (2, 3), 1)


def test_nodes_are_numbered_by_their_lowest_rank_however_ranks_are_placed():
    found = find_nodes(["b", "a", "b", "a"])
    assert found == Nodes((0, 1, 0, 1))
    assert [found.ranks(node) for node in range(2)] == [(0, 2), (1, 3)]
    assert [found.place(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_a_number_of_nodes_splits_one_host_too():
    assert find_nodes(["a"] * 6, 3).of == (0, 0, 1, 1, 2, 2)
    assert find_nodes(["a"] * 6, 1).count == 1
    assert find_nodes(["a"] * 3, 3).inside == 1


@pytest.mark.parametrize("nodes", [0, 7, 4, -1, True, 2.0, "two", None])
def test_numbers_of_nodes_that_do_not_divide_the_ranks_are_refused(refused, nodes):
    refused(lambda: find_nodes(["a"] * 6, nodes), "nodes", "divides the 6 ranks")


def test_hosts_with_unequal_numbers_of_ranks_are_refused_by_name(refused):
    refused(lambda: find_nodes(["a", "a", "b"]), "nodes", "2 on 'a', 1 on 'b'")


def test_more_nodes_than_a_workspace_has_words_for_are_refused(refused):
    assert find_nodes(range(448)).count == 448
    refused(lambda: find_nodes(range(449)), "nodes", "at most 448 nodes")


def test_a_node_across_hosts_is_refused_and_its_ranks_are_named(refused):
    refused(lambda: find_nodes(["a", "b", "a", "b"], 2), "nodes", "ranks 0 on 'a' and 1 on 'b'")


def test_more_than_eight_ranks_per_node_are_refused(refused):
    refused(lambda: find_nodes(["a"] * 9), "nodes", "9 ranks form a node")
    refused(lambda: find_nodes(["a"] * 18, 2), "nodes", "at most 8")
    assert find_nodes(["a"] * 8 + ["b"] * 8).inside == 8


def test_the_order_is_fixed_for_few_nodes():
    assert [find_order(None, nodes) for nodes in (1, 2, 4, 5, 64)] == ["fixed"] * 3 + ["engine"] * 2
    assert find_order("fixed", 64) == "fixed" and find_order("engine", 2) == "engine"
    for wrong in ("Fixed", 1, ""):
        with pytest.raises(ArgumentError, match="node_order is"):
            find_order(wrong, 2)
