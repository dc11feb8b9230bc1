"""Frontends that share a port, in virtual time: each answers for all."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pdserve.frontend.api.metrics_group import GroupMetrics
from pdserve.messages.node import NodeCard
from pdserve.messages.status import MetricPage
from pdserve.observe.degraded import Degradations
from pdserve.observe.exposition import render
from pdserve.observe.metrics import Metrics
from pdserve.runtime.rpc_methods import SCRAPE
from pdserve.wire.codec import decoder, encode
from tests.net.world import virtually
from tests.runtime.cluster import Cluster, cluster
from tests.support.actors import silent
from tests.support.metrics_page import find

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Sibling:
    """One of the frontends."""

    def __init__(self, metrics: Metrics, degradations: Degradations, group: GroupMetrics) -> None:
        self.metrics, self.degradations, self.group = metrics, degradations, group

    async def completed(self) -> float:
        page = await self.group.page()
        return find(page.body.decode(), 'pdserve_requests_total{outcome="completed"}') or 0.0


@asynccontextmanager
async def frontends(**groups: str) -> AsyncIterator[tuple[Cluster, dict[str, Sibling]]]:
    """Frontends by name, each of a group, with one, two, four, ... completed requests."""
    async with cluster() as nodes:
        made = {}
        for number, (name, group) in enumerate(groups.items()):
            node = await nodes.add(name, role="frontend")
            metrics = Metrics()
            metrics.requests.labels("m", "completed").value = 1 << number
            degradations = Degradations(metrics)
            pages = GroupMetrics(node, group, metrics, degradations)
            made[name] = Sibling(metrics, degradations, pages)
            node.publish_card(NodeCard(role="frontend", group=group), {})

        def known() -> bool:
            return nodes.converged() and all(
                member.card is not None for node in nodes.nodes.values() for member in node.registry
            )

        await nodes.until(known)
        yield nodes, made


@virtually
async def test_any_of_them_answers_for_its_group_and_no_other() -> None:
    async with frontends(a="x", b="x", c="y", d="x") as (_, made):
        assert await made["a"].completed() == 1 + 2 + 8
        assert await made["d"].completed() == 1 + 2 + 8
        assert await made["c"].completed() == 4
        assert not made["a"].degradations.reasons()


@virtually
async def test_one_that_does_not_answer_is_a_degradation_until_it_does() -> None:
    async with frontends(a="x", b="x") as (nodes, made):
        answer = nodes.nodes["b"].actors.answers[SCRAPE.id]
        nodes.nodes["b"].host(silent(SCRAPE))
        start = nodes.loop.time()
        assert await made["a"].completed() == 1
        assert nodes.loop.time() - start < 1.5
        assert "b: " in made["a"].degradations.reasons()["frontend_silent"]
        nodes.nodes["b"].actors.answers[SCRAPE.id] = answer
        assert await made["a"].completed() == 3
        assert not made["a"].degradations.reasons()


@virtually
async def test_one_that_died_is_no_sibling_any_more() -> None:
    async with frontends(a="x", b="x") as (nodes, made):
        await nodes.crash("b")
        await nodes.until(lambda: not len(nodes.nodes["a"].registry))
        assert await made["a"].completed() == 1
        assert not made["a"].degradations.reasons()


@virtually
async def test_one_without_a_card_is_asked_whether_it_belongs() -> None:
    async with frontends(a="x") as (nodes, made):
        for name, group in (("b", "x"), ("c", "y")):
            node = await nodes.add(name, role="frontend")
            metrics = Metrics()
            metrics.requests.labels("m", "completed").value = 10
            GroupMetrics(node, group, metrics, Degradations(metrics))
        await nodes.until(nodes.converged)
        assert await made["a"].completed() == 11
        assert not made["a"].degradations.reasons()
        nodes.nodes["b"].host(silent(SCRAPE))
        assert await made["a"].completed() == 1
        assert "b: " in made["a"].degradations.reasons()["frontend_silent"]


@virtually
async def test_many_scrapes_at_once_ask_the_siblings_once() -> None:
    async with frontends(a="x", b="x") as (nodes, made):
        asked = 0
        answer = nodes.nodes["b"].actors.answers[SCRAPE.id]

        def count(call) -> None:
            nonlocal asked
            asked += 1
            answer(call)

        nodes.nodes["b"].actors.answers[SCRAPE.id] = count
        assert await asyncio.gather(*(made["a"].completed() for _ in range(20))) == [3.0] * 20
        assert asked == 1


@virtually
async def test_a_scrape_that_is_given_up_leaves_the_others_their_answer() -> None:
    async with frontends(a="x", b="x") as (_, made):
        first = asyncio.create_task(made["a"].completed())
        second = asyncio.create_task(made["a"].completed())
        await asyncio.sleep(0)
        first.cancel()
        assert await second == 3


def test_families_survive_the_journey() -> None:
    metrics = Metrics()
    metrics.requests.labels("m", "completed").value = 5
    metrics.of_model("m").time_to_first_token.observe(0.5)
    families = metrics.families()
    page = MetricPage((), tuple(families))
    travelled = decoder(type(page))(encode(page))
    assert render(travelled.scraped) == render(families)
