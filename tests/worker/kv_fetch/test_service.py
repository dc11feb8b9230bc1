"""Fetches between workers of a cluster, in the right lives, within their deadlines."""

from __future__ import annotations

import pytest

from pdserve.ids import NodeId, NodeLife
from pdserve.messages.kv_pull import KvPullGrant
from pdserve.runtime.rpc_methods import PULL_KV
from pdserve.testing.virtual_time import run
from pdserve.worker.kv_fetch import service as module
from tests.engine.test_kv_pulls import QUESTION
from tests.worker.kv_fetch.world import fetch_cluster, prompt_of, request_for


def test_blocks_come_from_the_worker_that_has_them(seed: int) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            prompt = prompt_of(1)
            await b.compute(request_for(prompt))
            result = await a.absorb(b.life, prompt)
            assert (result.blocks, result.pulled, result.error) == (10, 10, "")
            before = a.engine.stats()
            await a.compute(request_for(prompt))
            after = a.engine.stats()
            assert after.cached_tokens - before.cached_tokens == 40
            assert after.pulled_blocks == b.engine.stats().served_blocks == 10
            assert a.fetch.numbers.ended == {"ok": 1}
            assert a.fetch.numbers.blocks == 10
            assert b.fetch.numbers.served == 1
            await c.idle()

    run(main())


def test_only_the_life_that_was_meant_is_asked(seed: int) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            prompt = prompt_of(1)
            await b.compute(request_for(prompt))
            other = NodeLife(b.node.id, b.node.epoch - 1)
            result = await a.absorb(other, prompt)
            assert result.pulled == 0
            assert result.error in ("epoch", "transfer", "gone")
            answers: list[KvPullGrant] = []
            a.fetch.ask(QUESTION, other, answers.append)
            await c.nodes.until(lambda: bool(answers))
            assert answers == [KvPullGrant(refused="epoch")]
            link = await a.node.link(b.node.id, timeout=5.0)
            answer = await link.request(PULL_KV, QUESTION, timeout=5.0)
            assert answer == KvPullGrant(refused="epoch")
            assert b.fetch.numbers.refused == {"epoch": 1}
            nobody = await a.absorb(NodeLife(NodeId("nobody"), 1), prompt)
            assert nobody.error in ("gone", "transfer")
            await c.idle()

    run(main())


def test_an_owner_that_restarts_its_engine_has_nothing(seed: int) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            prompt = prompt_of(1)
            await b.compute(request_for(prompt))
            assert (await a.absorb(b.life, prompt[:20])).error == ""
            assert b.engine.die(0.5)
            result = await a.absorb(b.life, prompt)
            assert result.error in ("gone", "transfer", "unready", "deadline")
            assert result.blocks in (0, 5)
            await c.nodes.until(lambda: b.engine.capabilities is not None)
            result = await a.absorb(b.life, prompt)
            assert (result.pulled, result.error) == (0, "absent")
            await b.compute(request_for(prompt))
            result = await a.absorb(b.life, prompt)
            assert (result.pulled, result.error) == (5, "")
            await c.idle()

    run(main())


@pytest.mark.parametrize("after", [0.01, 0.03, 0.06, 0.1])
def test_an_owner_that_dies_ends_the_pull(seed: int, after: float) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            prompt = prompt_of(1)
            await b.compute(request_for(prompt))
            c.nodes.loop.call_later(after, lambda: b.engine.die(60.0))
            result = await a.absorb(b.life, prompt, timeout=30.0)
            assert result.blocks in (0, 10)
            await c.nodes.until(a.idle)
            await a.compute(request_for(prompt))

    run(main())


def test_a_requester_that_dies_costs_the_owner_nothing(seed: int) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            prompt = prompt_of(1)
            await b.compute(request_for(prompt))
            for after in (0.0, 0.02, 0.05, 0.08):
                c.nodes.loop.call_later(after, lambda: a.engine.die(0.2))
                _ = await a.absorb(b.life, prompt, timeout=30.0)
                await c.nodes.until(b.idle)
                await c.nodes.until(lambda: a.engine.capabilities is not None)
            await c.idle()

    run(main())


def test_questions_to_one_peer_are_bounded(seed: int, monkeypatch) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            answers: list[KvPullGrant] = []
            for _ in range(3):
                a.fetch.ask(QUESTION, b.life, answers.append)
            assert answers == [KvPullGrant(refused="busy")]
            await c.nodes.until(lambda: len(answers) == 3)
            assert not a.fetch._waiting

    monkeypatch.setattr(module, "MAX_ASKED", 2)
    run(main())
