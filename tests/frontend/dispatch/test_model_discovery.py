from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.frontend.dispatch import model_discovery
from pdserve.frontend.dispatch.model_discovery import ModelDiscovery
from pdserve.ids import NodeId
from pdserve.messages.card import ModelCard
from pdserve.messages.lora import LoraSummary
from pdserve.messages.node import NodeCard, summarize_card
from tests.net.world import virtually
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.runtime.node import Node
    from tests.runtime.cluster import Cluster


def model(name: str = "tiny", **changes: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "name": name,
        "max_model_len": 64,
        "vocab_size": 100,
        "block_size": 32,
        "tokenizer_json": f"the tokenizer of {name}".encode() * 100,
        "chat_template": "{{ messages }}",
    }
    return ModelCard(**fields | changes)


def publish(node: Node, *models: ModelCard, started: int = 1) -> None:
    small, parts = [], dict[bytes, bytes]()
    for one in models:
        offered, large = summarize_card(one)
        small.append(offered)
        parts |= large
    node.publish_card(NodeCard(role="worker", started=started, models=tuple(small)), parts)


class Reader:
    """Offers on a frontend's node, looked at whenever a member changes."""

    def __init__(self, node: Node, remember: float = 60.0) -> None:
        self.conflicts: Mapping[NodeId, str] = {}
        self.changes = 0
        self.offers = ModelDiscovery(node, remember, self._note, self._changed)
        node.on_member(lambda event: self.offers.refresh())

    def _note(self, conflicts: Mapping[NodeId, str]) -> None:
        self.conflicts = conflicts

    def _changed(self) -> None:
        self.changes += 1

    def serves(self, name: str) -> bool:
        return bool(self.offers.workers(name))

    def names(self) -> dict[str, str]:
        return {name: card.name for name, card in self.offers.cards().items()}


async def start(nodes: Cluster, *workers: str, remember: float = 60.0) -> Reader:
    front = await nodes.add("f", role="frontend")
    for name in workers:
        await nodes.add(name)
    await nodes.until(nodes.converged)
    return Reader(front, remember)


@virtually
async def test_a_model_is_put_together_from_what_a_worker_announces() -> None:
    async with cluster() as nodes:
        reader = await start(nodes, "a")
        assert not reader.offers.any_worker
        whole = model(aliases=("default",), tokenizer_json=b"x" * 3_000_000)
        publish(nodes.nodes["a"], whole)
        await nodes.until(lambda: reader.offers.any_worker)
        assert reader.offers.cards() == {"tiny": whole, "default": whole}
        assert reader.offers.workers("default") == ("a",)
        assert reader.changes == 1


@virtually
async def test_a_model_whose_worker_restarts_its_engine_keeps_its_card() -> None:
    """A tokenizer is made per card: another object would be made again."""
    async with cluster() as nodes:
        reader = await start(nodes, "a")
        publish(nodes.nodes["a"], model())
        await nodes.until(lambda: reader.offers.any_worker)
        before = reader.offers.cards()["tiny"]
        publish(nodes.nodes["a"])
        await nodes.until(lambda: not reader.offers.any_worker)
        assert reader.offers.workers("tiny") == ()
        assert reader.offers.cards()["tiny"] is before
        publish(nodes.nodes["a"], replace(model(), created=99))
        await nodes.until(lambda: reader.offers.any_worker)
        assert reader.offers.cards()["tiny"] is before


@virtually
async def test_a_model_without_workers_is_remembered_for_a_while() -> None:
    async with cluster() as nodes:
        reader = await start(nodes, "a", remember=10.0)
        publish(nodes.nodes["a"], model(aliases=("default",)))
        await nodes.until(lambda: reader.offers.any_worker)
        await nodes.crash("a")
        await nodes.until(lambda: not reader.offers.any_worker)
        assert set(reader.offers.cards()) == {"tiny", "default"}
        await asyncio.sleep(11.0)
        reader.offers.refresh()
        assert reader.offers.cards() == {}


@virtually
async def test_an_alias_means_the_model_of_the_worker_that_had_it_first() -> None:
    async with cluster() as nodes:
        reader = await start(nodes, "a", "b", "c")
        publish(nodes.nodes["b"], model("one", aliases=("default",)), started=1)
        await nodes.until(lambda: reader.offers.any_worker)
        publish(nodes.nodes["a"], model("two", aliases=("default",)), started=2)
        await nodes.until(lambda: bool(reader.conflicts))
        publish(nodes.nodes["c"], model("three"), started=3)
        await nodes.until(lambda: bool(reader.offers.workers("three")))
        assert set(reader.conflicts) == {"a"}
        assert reader.names() == {"one": "one", "default": "one", "three": "three"}
        await nodes.crash("b")  # what is served comes before what is remembered
        await nodes.until(lambda: bool(reader.offers.workers("two")))
        assert reader.names() == {"one": "one", "default": "two", "two": "two", "three": "three"}


@virtually
async def test_workers_of_one_model_with_different_aliases_are_one_fetch() -> None:
    async with cluster() as nodes:
        reader = await start(nodes, "a", "b")
        publish(nodes.nodes["b"], model(aliases=("x",)), started=1)
        publish(nodes.nodes["a"], model(aliases=("y",)), started=2)
        await nodes.until(lambda: set(reader.offers.cards()) == {"tiny", "x", "y"})
        assert reader.offers.workers("tiny") == ("a", "b")
        changes = reader.changes
        for _ in range(5):
            reader.offers.refresh()
            await asyncio.sleep(1.0)
        assert reader.changes == changes


@virtually
async def test_no_worker_serves_a_name_while_its_card_is_another_model() -> None:
    """What was tokenized for one model must not be computed by another."""
    async with cluster() as nodes:
        reader = await start(nodes, "a")
        publish(nodes.nodes["a"], model())
        await nodes.until(lambda: reader.offers.any_worker)
        changed = model(tokenizer_json=b"another")
        publish(nodes.nodes["a"], changed)
        nodes.world.set_conditions(delay_min=0.05, delay_max=0.1)
        old = reader.offers.cards()["tiny"]
        member = nodes.nodes["f"].registry.get(NodeId("a"))
        assert member is not None
        before = member.card

        def heard() -> bool:
            now = nodes.nodes["f"].registry.get(NodeId("a"))
            return now is not None and now.card != before

        await nodes.until(heard)
        assert (reader.offers.cards()["tiny"], reader.offers.workers("tiny")) == (old, ())
        await nodes.until(lambda: reader.offers.any_worker)
        assert reader.offers.cards()["tiny"] == changed


@virtually
async def test_parts_come_from_another_worker_if_the_first_one_dies() -> None:
    async with cluster() as nodes:
        reader = await start(nodes, "a", "b")
        nodes.world.set_conditions(bandwidth=200_000.0)
        large = model(tokenizer_json=b"x" * 2_000_000)
        publish(nodes.nodes["a"], large, started=1)
        publish(nodes.nodes["b"], large, started=2)
        front = nodes.nodes["f"]
        await nodes.until(lambda: len(front.tasks) > 0)
        await nodes.crash("a")
        nodes.world.set_conditions(bandwidth=0.0)
        assert await nodes.until(lambda: reader.offers.any_worker) < 15.0
        assert reader.offers.workers("tiny") == ("b",)


@virtually
async def test_a_part_that_nobody_has_is_asked_for_again() -> None:
    async with cluster() as nodes:
        reader = await start(nodes, "a")
        front = nodes.nodes["f"]
        fetch, failures = front.part, [2]

        async def failing(owner: NodeId, hash: bytes, *, timeout: float) -> bytes:
            if failures[0]:
                failures[0] -= 1
                return (
                    b"\xff" if hash == small.chat_template else await fetch(owner, hash, timeout=1)
                )
            return await fetch(owner, hash, timeout=timeout)

        small, _ = summarize_card(model())
        front.part = failing  # type: ignore[method-assign]
        publish(nodes.nodes["a"], model())
        await nodes.until(lambda: reader.offers.any_worker)
        assert failures == [0]


@virtually
async def test_what_is_remembered_is_bounded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_discovery, "_MOST_REMEMBERED", 2)
        async with cluster() as nodes:
            reader = await start(nodes, "a")
            for name in ("m0", "m1", "m2", "m3"):
                publish(nodes.nodes["a"], model(name))
                await nodes.until(partial(reader.serves, name))
            assert set(reader.offers.cards()) == {"m1", "m2", "m3"}


@virtually
async def test_a_worker_that_lacks_a_feature_takes_it_from_the_card_at_once() -> None:
    """It would ignore what it does not know, and answer as if nothing had been asked."""
    async with cluster() as nodes:
        reader = await start(nodes, "a", "b")
        publish(nodes.nodes["a"], model(features=("bans", "grammar")))
        await nodes.until(lambda: reader.offers.any_worker)
        assert reader.offers.cards()["tiny"].features == ("bans", "grammar")
        publish(nodes.nodes["b"], model(), started=2)
        await nodes.until(lambda: len(reader.offers.workers("tiny")) == 2)
        assert reader.offers.cards()["tiny"].features == ()
        before = reader.offers.cards()["tiny"]
        reader.offers.refresh()
        assert reader.offers.cards()["tiny"] is before
        publish(nodes.nodes["b"], started=2)
        await nodes.until(lambda: len(reader.offers.workers("tiny")) == 1)
        assert reader.offers.cards()["tiny"].features == ("bans", "grammar")


# ---------------------------------------------------------------------- adapters


def adapted(*names: str, **changes: Any) -> ModelCard:
    loras = tuple(LoraSummary(name=name, revision="1") for name in names)
    return model(loras=loras, **changes)


@virtually
async def test_an_adapter_is_served_by_its_models_card() -> None:
    async with cluster() as nodes:
        reader = await start(nodes, "a", "b")
        publish(nodes.nodes["a"], adapted("poet"))
        await nodes.until(lambda: reader.serves("poet"))
        publish(nodes.nodes["b"], adapted("clerk"), started=2)
        await nodes.until(lambda: reader.serves("clerk"))
        assert reader.names() == {"tiny": "tiny", "poet": "tiny", "clerk": "tiny"}
        assert [lora.name for lora in reader.offers.cards()["tiny"].loras] == ["clerk", "poet"]
        assert reader.offers.workers("poet") == ("a",)
        assert reader.offers.workers("tiny") == ("a", "b")
        assert reader.changes == 1, "nothing was fetched again"


@virtually
async def test_an_adapter_without_workers_is_remembered_for_a_while() -> None:
    """Its model has workers all the time."""
    async with cluster() as nodes:
        reader = await start(nodes, "a", "b", remember=10.0)
        publish(nodes.nodes["a"], adapted("poet"))
        publish(nodes.nodes["b"], model(), started=2)
        await nodes.until(lambda: reader.offers.workers("tiny") == ("a", "b"))
        await nodes.crash("a")
        await nodes.until(lambda: reader.offers.workers("tiny") == ("b",))
        assert reader.offers.workers("poet") == ()
        assert reader.names() == {"tiny": "tiny", "poet": "tiny"}
        assert reader.offers.cards()["poet"].lora("poet") is not None
        await asyncio.sleep(11.0)
        reader.offers.refresh()
        assert reader.names() == {"tiny": "tiny"}
        assert reader.offers.cards()["tiny"].loras == ()


@virtually
async def test_only_so_many_adapters_are_remembered() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_discovery, "_MOST_REMEMBERED", 2)
        await remember_adapters()


async def remember_adapters() -> None:
    async with cluster() as nodes:
        reader = await start(nodes, "a")
        for number in range(4):
            publish(nodes.nodes["a"], adapted(f"a{number}"))
            await nodes.until(partial(reader.serves, f"a{number}"))
        assert set(reader.names()) == {"tiny", "a2", "a3"}
