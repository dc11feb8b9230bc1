"""A frontend's node, without HTTP: its card and its hashes."""

from __future__ import annotations

from pdserve.blocks.hashing import HASH_SECRET_TEST, hash_secret_id
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.node import FrontendNode
from pdserve.messages.node import NodeCard
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.runtime.hash_secret import FixedHashSecret
from tests.frontend.dispatch.test_model_discovery import model
from tests.net.world import virtually
from tests.runtime.cluster import Cluster, cluster


def frontend(nodes: Cluster, secret: bytes = HASH_SECRET_TEST) -> FrontendNode:
    return FrontendNode(
        nodes.make("f", role="frontend"),
        FrontendConfig(),
        FixedHashSecret(secret),
        Degradations(Metrics()),
    )


@virtually
async def test_others_see_its_card_until_it_leaves() -> None:
    async with cluster() as nodes:
        watcher = await nodes.add("watcher")
        made = frontend(nodes)
        await made.join()
        made.node.publish_card(NodeCard(role="frontend", http="10.0.0.1:8000"), {})

        def http() -> str | None:
            member = watcher.registry.get(made.node.id)
            return None if member is None or member.card is None else member.card.http

        await nodes.until(lambda: http() == "10.0.0.1:8000")
        await made.close()
        assert await nodes.until(lambda: http() is None) < 0.1


@virtually
async def test_a_prompt_is_hashed_with_the_secret_in_use() -> None:
    async with cluster() as nodes:
        made, card = frontend(nodes), model()
        hashed = made.hasher.of_one(card, "", range(card.block_size * 2 + 1))
        assert hashed.id == hash_secret_id(HASH_SECRET_TEST)
        assert len(hashed.hashes) == 2 * 16
        await made.close(leave=False)


@virtually
async def test_a_frontend_without_a_secret_hashes_nothing() -> None:
    async with cluster() as nodes:
        made, card = frontend(nodes, b""), model()
        assert made.hasher.of_one(card, "", range(card.block_size)).hashes == b""
        await made.close(leave=False)
