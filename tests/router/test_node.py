"""A router's node begins, drains and ends as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.messages.node import NodeCard
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.router.config import RouterConfig
from pdserve.router.node import RouterNode
from pdserve.runtime.hash_secret import HashSecrets
from tests.net.world import virtually
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from pdserve.runtime.node import Node
    from tests.runtime.cluster import Cluster


def router(node: Node, policy: str = "least_loaded") -> RouterNode:
    degradations = Degradations(Metrics())
    secrets = HashSecrets(
        node, entropy=node.random.randbytes, wall=node.now, degradations=degradations
    )
    card = NodeCard(role="router")
    return RouterNode(node, RouterConfig(policy=policy), card, secrets, degradations)


async def started(nodes: Cluster) -> tuple[RouterNode, Node]:
    """A router, and a node that knows its card."""
    watcher = await nodes.add("watcher")
    made = router(nodes.make("r", role="router"))
    await made.join()
    await nodes.until(lambda: card_of(made, watcher) is not None)
    return made, watcher


def card_of(made: RouterNode, watcher: Node) -> NodeCard | None:
    member = watcher.registry.get(made.node.id)
    return None if member is None else member.card


@virtually
async def test_a_router_that_drains_says_so_in_its_card() -> None:
    async with cluster() as nodes:
        made, watcher = await started(nodes)
        card = card_of(made, watcher)
        assert card is not None
        assert not card.draining
        made.drain()
        await nodes.until(lambda: (card := card_of(made, watcher)) is not None and card.draining)
        await made.close()


@virtually
async def test_a_router_that_leaves_is_gone_at_once() -> None:
    async with cluster() as nodes:
        made, watcher = await started(nodes)
        await made.close()
        within = await nodes.until(lambda: watcher.registry.get(made.node.id) is None)
        assert within < 0.1
        assert made.topics.names == ()


@virtually
async def test_a_router_that_ends_without_leaving_is_missed_later() -> None:
    async with cluster() as nodes:
        made, watcher = await started(nodes)
        await made.close(leave=False)
        assert watcher.registry.get(made.node.id) is not None
        await nodes.until(lambda: watcher.registry.get(made.node.id) is None)


@virtually
async def test_an_unknown_policy_is_refused_before_anything_starts() -> None:
    async with cluster() as nodes:
        node = nodes.make("r", role="router")
        with pytest.raises(ConfigError, match="no-such-policy"):
            router(node, policy="no-such-policy")
        await node.close()
