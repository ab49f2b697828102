# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a group form a node, and in which order the nodes' sums are added. Pure functions of integers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ..errors import ArgumentError, counted, require_integer, shown
from ..plans.limits import MAX_RANKS

ORDERS = ("fixed", "engine")
FIXED_UP_TO = 4
"""The largest number of nodes for which "fixed" is the default, as each node then receives the sums of all nodes."""
MAX_NODES = 448
"""The most nodes of a group: a workspace has a word for each."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a group: `of[rank]` is the node of a rank. Nodes are numbered in the order of their lowest ranks,
    and have equally many ranks. Made by `find_nodes`.

    A rank's number inside its node is its position, from 0, among the ranks of the node.
    """

    of: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return max(self.of) + 1

    @property
    def inside(self) -> int:
        """How many ranks each node has."""
        return len(self.of) // self.count

    def ranks(self, node: int) -> tuple[int, ...]:
        """The ranks of a node, in ascending order."""
        return tuple(rank for rank, of in enumerate(self.of) if of == node)

    def peer(self, rank: int, place: int) -> int:
        """The rank with the number `place` inside the node of `rank`."""
        return self.ranks(self.of[rank])[place]

    def place(self, rank: int) -> int:
        """The rank's number inside its node."""
        return self.ranks(self.of[rank]).index(rank)


def find_nodes(hosts: Sequence[Hashable], nodes: str | int = "auto") -> Nodes:
    """The nodes of a group whose rank i is on the host, or in the NVLink domain, `hosts[i]`.

    With "auto" the ranks of one host form a node. A number makes that number of nodes of consecutive ranks, also on one
    host. Raises ArgumentError for any other value, for more than `MAX_NODES` nodes, and for nodes of unequal size, of
    more than eight ranks, or across hosts.
    """
    size = len(hosts)
    if nodes == "auto":
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        found = Nodes(tuple(numbers[host] for host in hosts))
        sizes = [len(found.ranks(node)) for node in range(found.count)]
        if len(set(sizes)) > 1:
            shown = ", ".join(f"{count} on {host!r}" for host, count in zip(numbers, sizes, strict=True))
            raise ArgumentError(
                "nodes", f'"auto" for {shown}', "equally many ranks on every host, or a number of nodes"
            )
    else:
        expected = f'"auto", or a number of nodes that divides the {size} ranks'
        count = require_integer("nodes", nodes, expected, 1, size)
        if size % count:
            raise ArgumentError("nodes", count, expected)
        found = Nodes(tuple(rank // (size // count) for rank in range(size)))
    if found.inside > MAX_RANKS:
        raise ArgumentError(
            "nodes",
            f"{nodes!r}, so {counted(found.inside, 'rank')} form a node",
            f"such that at most {MAX_RANKS} ranks form a node",
        )
    if found.count > MAX_NODES:
        got = f"{nodes!r}, so there are {found.count} nodes"
        raise ArgumentError("nodes", got, f"such that there are at most {MAX_NODES} nodes")
    for node in range(found.count):
        first, *others = found.ranks(node)
        for rank in others:
            if hosts[rank] != hosts[first]:
                where = f"ranks {first} on {hosts[first]!r} and {rank} on {hosts[rank]!r}"
                raise ArgumentError("nodes", f"{nodes!r}, so {where} form a node", "such that each node is on one host")
    return found


def find_order(node_order: str | None, nodes: int) -> str:
    """The order that the argument `node_order` selects for `nodes` nodes: "fixed" or "engine"."""
    if node_order is None:
        return "fixed" if nodes <= FIXED_UP_TO else "engine"
    if node_order not in ORDERS:
        raise ArgumentError("node_order", shown(node_order), '"fixed", "engine" or None')
    return node_order
