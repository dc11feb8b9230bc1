"""Sequences that run on one worker and go on at another, with their KV: real workers of every mode,
engine cores and transports in one simulated world; nothing is computed twice but a partial block."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.errors import NotReady
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.scripted import reference_tokens
from pdserve.transfer.fake import FakeFabric
from pdserve.worker.handoff import prefill as prefill_module
from pdserve.worker.handoff.source import Source
from tests.net.world import virtually
from tests.runtime.cluster import cluster
from tests.worker.handoff.test_whole import SIZE, Sink, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.runtime.cluster import Cluster

MODES = ("aggregated", "decode", "prefill")


class Pair:
    """A worker that has a sequence, and one that is to have it."""

    def __init__(self, nodes: Cluster, seed: int = 1) -> None:
        self.nodes = nodes
        self.fabric = FakeFabric(random.Random(seed))
        self.workers: list[Worker] = []

    async def begin(self, s: str = "aggregated", t: str = "aggregated", **fields: Any) -> None:
        self.s = await self.add("s", s, **fields)
        self.t = await self.add("t", t, **fields)
        await self.nodes.until(self.nodes.converged)
        await self.nodes.until(lambda: self.known(self.s, self.t) and self.known(self.t, self.s))

    async def add(self, name: str, mode: str, **fields: Any) -> Worker:
        node = self.nodes.make(name)
        self.nodes.nodes[name] = node
        worker = Worker(node, mode, self.fabric, **fields)
        self.workers.append(worker)
        await node.start()
        await worker.service.start(lambda stage, fraction: None)
        return worker

    @staticmethod
    def known(of: Worker, at: Worker) -> bool:
        member = at.node.registry.get(of.node.id)
        return member is not None and member.card is not None and bool(member.card.models)

    def begun(self, wanted: GenerateRequest, at: Worker | None = None) -> Sink:
        sink = Sink()
        sink.handle = (at or self.s).member.submit(wanted, sink)  # type: ignore[attr-defined]
        return sink

    async def tokens(self, sink: Sink, count: int) -> list[int]:
        """Those of its only choice, once there are so many."""
        await self.nodes.until(lambda: len(sink.tokens.get(0, ())) >= count or bool(sink.error))
        return list(sink.tokens[0])

    async def ended(self, sink: Sink, timeout: float = 30.0) -> None:
        await self.nodes.until(lambda: bool(sink.finished or sink.error), timeout)
        assert sink.error is None

    async def warm(self, wanted: GenerateRequest, output: list[int]) -> Sink:
        sink = self.begun(self.warm_up(wanted, output), self.t)
        await self.ended(sink)
        return sink

    def warm_up(self, wanted: GenerateRequest, output: list[int]) -> GenerateRequest:
        """As a frontend asks for it."""
        sampling = replace(wanted.sampling, max_tokens=len(output) + 1, ignore_eos=True)
        s = self.s.node
        return replace(
            wanted,
            request_id=f"{wanted.request_id}-move",
            n=1,
            output=[output],
            sampling=sampling,
            source=s.id,
            source_epoch=s.epoch,
        )

    async def idle(self, within: float = 3.0) -> float:
        """Nothing is left of anything."""

        def clean() -> bool:
            stats = [worker.stats() for worker in self.workers]
            held = [
                part
                for worker in self.workers
                for part in (worker.member.decode, worker.member.prefill)
                if part is not None and len(part)
            ]
            return not held and all(
                s.blocks_used == s.blocks_quarantined == s.remote == s.sending == s.running == 0
                for s in stats
            )

        return await self.nodes.until(clean, within)

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()


def asked(prompt: int, output: int = 60, *, name: str = "r", **fields: Any) -> GenerateRequest:
    fields.setdefault("sampling", SamplingParams(max_tokens=output, seed=5, ignore_eos=True))
    tokens = [(prompt * 7 + i * i) % 90 + 3 for i in range(prompt)]
    return GenerateRequest(request_id=name, model="m", prompt=tokens, **fields)


def blocks(tokens: int) -> int:
    return -(-tokens // SIZE)


@pytest.mark.parametrize("cut", [1, 3, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 29])
@pytest.mark.parametrize("prompt", [2 * SIZE, 21])
def test_a_running_sequence_moves_with_its_blocks(prompt: int, cut: int) -> None:
    @virtually
    async def test() -> None:
        async with cluster() as nodes:
            pair = Pair(nodes)
            await pair.begin()
            wanted = asked(prompt)
            running = pair.begun(wanted)
            output = await pair.tokens(running, cut)
            there = pair.s.stats().computed_tokens
            warm = await pair.warm(wanted, output)
            size = len(wanted.prompt) + len(output)
            assert warm.where == ["moved; node=s; reason=source"]
            assert warm.received == size
            stats = pair.t.stats()
            assert stats.computed_tokens == 0
            assert stats.received_blocks == blocks(size)
            assert (
                stats.received_bytes == blocks(size) * stats.received_bytes // stats.received_blocks
            )
            steps = len(running.tokens[0]) - len(output)
            spent = pair.s.stats().computed_tokens - there - steps
            assert spent <= SIZE + 1, "the source computes a partial block at most"
            assert not running.finished, "it runs on meanwhile"
            # The short stop.
            output = list(running.tokens[0])
            pair.s.member.abort(running.handle)  # type: ignore[attr-defined]
            after = pair.begun(replace(wanted, output=[output]), pair.t)
            await pair.ended(after)
            assert output + after.tokens[0] == reference_tokens(wanted, 0, max_len=200)
            computed = pair.t.stats().computed_tokens
            assert computed <= (len(output) - cut) + 2 * SIZE + len(after.tokens[0])
            await pair.idle()
            await pair.close()

    test()
