# SPDX-License-Identifier: Apache-2.0
"""Connects the nodes of a group by a `NodeLink`, according to the arguments `nodes`, `node_order` and `exchange`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import GroupMismatch, Unsupported, require_integer
from .engines import check_engine, find_engine
from .exchange import Exchange, Gather, Member
from .layout import Nodes, find_order
from .link import NodeLink


@dataclass(frozen=True)
class NodesWanted:
    """The arguments of a group that concern nodes. Only ranks with equal `domain` on one host may form a node."""

    nodes: str | int = "auto"
    node_order: str | None = None
    exchange: Any = None
    domain: str = ""

    def check(self) -> None:
        """Raise ArgumentError for a value that no group accepts."""
        if self.nodes != "auto":
            require_integer("nodes", self.nodes, '"auto" or a number of nodes', 1)
        find_order(self.node_order, 1)
        if not isinstance(self.exchange, _Used):
            check_engine(self.exchange)

    @property
    def engine(self) -> str:
        """A description of the engine, the same on all ranks."""
        named = self.exchange is None or isinstance(self.exchange, str)
        return repr(self.exchange) if named else f"an object of {type(self.exchange).__name__}"

    def of_part(self, domain: str) -> NodesWanted:
        """The arguments for a new group that is split off; `self` has those of the old group. Only ranks of the new
        group with equal `domain` may form a node.
        """
        exchange = self.exchange if self.exchange is None or isinstance(self.exchange, str) else _Used(self.engine)
        return NodesWanted("auto", self.node_order, exchange, domain)


@dataclass(frozen=True)
class _Used:
    """A placeholder for an engine that was given as an object and already serves another group."""

    name: str


@dataclass(frozen=True)
class Joint:
    """The nodes of a group, and all that is needed to connect them."""

    nodes: Nodes
    wanted: NodesWanted
    gather: Gather
    timeout: float

    def find_engine(self, whole: bool, emulated: bool) -> Exchange:
        """The engine that `nodes.engines.find_engine` finds. Raises Unsupported if the engine was given as an object
        and already serves another group."""
        if isinstance(self.wanted.exchange, _Used):
            raise Unsupported(
                f"the engine {self.wanted.exchange.name} serves the group that it was given to, and the new group "
                "needs an engine too, as it also spans several nodes: name an engine, or open the new group by "
                "Group.connect"
            )
        return find_engine(self.wanted.exchange, whole, emulated)

    def join(self, engine: Exchange, members: Sequence[Member]) -> NodeLink:
        """Connect the nodes. Collective over the group. Raises GroupMismatch if ranks have found different engines,
        which happens if a library is installed on some hosts only."""
        names = [name.decode() for name in self.gather([engine.name.encode()] * len(members))]
        if len(set(names)) > 1:
            raise GroupMismatch("the engine between the nodes", dict(enumerate(names)))
        order = find_order(self.wanted.node_order, self.nodes.count)
        return NodeLink(self.nodes, members, engine, order, self.gather, self.timeout)
