"""Sequences that run on one worker and go on at another, with their KV: real workers of all modes,
engine cores and transports in a simulated world. Nothing is computed twice but a partial block."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.blocks.hashing import HASH_SECRET_TEST
from pdserve.errors import PdserveError
from pdserve.frontend.preprocess.prompt_hashes import PromptHasher
from pdserve.messages.engine import TransferSpec
from pdserve.messages.handoff import SetDisagg
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.rpc_methods import DISAGG, HAND_OVER
from pdserve.sim.engine import VirtualTimeEngine
from pdserve.testing.fake_rdma import FakeFabric
from pdserve.testing.scripted import reference_tokens
from pdserve.token_ids import token_ids
from pdserve.worker.disagg import prefill_handler as prefill_side
from pdserve.worker.disagg.prefill_handler import PrefillHandler
from pdserve.worker.disagg.state_table import DecodeState
from tests.net.world import virtually
from tests.runtime.cluster import cluster
from tests.worker.disagg.test_end_to_end import SIZE, Sink, Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.runtime.cluster import Cluster

MOVED = "moved; node=s; reason=source"
NAMING = PromptHasher(lambda: HASH_SECRET_TEST)


class Running(Sink):
    """One request at one worker."""

    handle = 0

    @property
    def output(self) -> list[int]:
        """Of its only choice."""
        return list(self.tokens.get(0, ()))


class Pair:
    """A worker `s` that has a sequence, and a worker `t` that is to have it."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.fabric = FakeFabric(random.Random(1))
        self.workers: list[Worker] = []

    async def begin(self, s: str = "aggregated", t: str = "aggregated", **fields: Any) -> None:
        self.s = await self.add("s", s, **fields)
        self.t = await self.add("t", t, **fields)
        await self.nodes.until(self.nodes.converged)
        await self.nodes.until(lambda: known(self.s, self.t) and known(self.t, self.s))

    async def add(self, name: str, mode: str, **fields: Any) -> Worker:
        node = self.nodes.make(name)
        self.nodes.nodes[name] = node
        worker = Worker(node, mode, self.fabric, **fields)
        self.workers.append(worker)
        await worker.join()
        await worker.load()
        return worker

    def at_s(self, wanted: GenerateRequest) -> Running:
        """It runs on its engine, whatever the worker takes."""
        sink = Running()
        sink.handle = self.s.service.engine.submit(wanted, sink)
        return sink

    def at_t(self, wanted: GenerateRequest) -> Running:
        sink = Running()
        sink.handle = self.t.agent.submit(wanted, sink)
        return sink

    async def tokens(self, sink: Running, count: int) -> list[int]:
        """At least so many."""
        await self.nodes.until(lambda: len(sink.output) >= count or bool(sink.error))
        assert sink.error is None
        return sink.output

    async def ended(self, sink: Running, within: float = 30.0) -> None:
        await self.nodes.until(lambda: bool(sink.finished or sink.error), within)
        assert sink.error is None

    def warm_up(self, wanted: GenerateRequest, output: list[int], **fields: Any) -> GenerateRequest:
        """As a frontend asks for it."""
        sampling = replace(wanted.sampling, max_tokens=len(output) + 1, ignore_eos=True)
        node, name = self.s.node, f"{wanted.request_id}-move"
        source: dict[str, Any] = {"source": node.id, "source_epoch": node.epoch}
        fields = {"n": 1, "output": [output], "sampling": sampling, **source, **fields}
        return replace(wanted, request_id=name, **fields)

    async def warm(self, wanted: GenerateRequest, output: list[int], **fields: Any) -> Running:
        sink = self.at_t(self.warm_up(wanted, output, **fields))
        await self.ended(sink)
        return sink

    async def go_on(self, wanted: GenerateRequest, running: Running) -> list[int]:
        """The short stop; returns all tokens of the only choice."""
        output = running.output
        self.s.service.engine.abort(running.handle)
        after = self.at_t(replace(wanted, output=[output]))
        await self.ended(after)
        return output + after.output

    def held(self) -> list[object]:
        """What somebody still has."""
        parts = [part for w in self.workers for part in (w.agent.decode, w.agent.prefill)]
        stats = [worker.stats() for worker in self.workers]
        busy = [s for s in stats if s.blocks_used or s.blocks_quarantined or s.remote or s.sending]
        return [*filter(None, parts), *busy]

    async def idle(self, within: float = 3.0) -> None:
        await self.nodes.until(lambda: not self.held(), within)

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close(leave=False)


def known(of: Worker, at: Worker) -> bool:
    member = at.node.registry.get(of.node.id)
    return member is not None and member.card is not None and bool(member.card.models)


def paired(
    s: str = "aggregated", t: str = "aggregated", **fields: Any
) -> Callable[[Callable[[Pair], Awaitable[None]]], Callable[[], None]]:
    """Run a test with two workers; nothing is left in the end."""

    def decorate(test: Callable[[Pair], Awaitable[None]]) -> Callable[[], None]:
        def run() -> None:
            play(test, s, t, **fields)

        run.__name__ = test.__name__
        return run

    return decorate


def play(
    test: Callable[[Pair], Awaitable[None]],
    s: str = "aggregated",
    t: str = "aggregated",
    **fields: Any,
) -> None:
    @virtually
    async def main() -> None:
        async with cluster() as nodes:
            pair = Pair(nodes)
            await pair.begin(s, t, **fields)
            await test(pair)
            await pair.idle()
            await pair.close()

    main()


def asked(prompt: int, output: int = 60, **fields: Any) -> GenerateRequest:
    fields.setdefault("sampling", SamplingParams(max_tokens=output, seed=5, ignore_eos=True))
    tokens = [(prompt * 7 + i * i) % 90 + 3 for i in range(prompt)]
    return GenerateRequest(request_id=f"r{prompt}", model="m", prompt=token_ids(tokens), **fields)


def named(wanted: GenerateRequest, worker: Worker) -> GenerateRequest:
    """Its prompt's blocks, as a frontend names them."""
    card = worker.service.cards()["m"]
    names = NAMING.of_one(card, wanted.cache_salt, wanted.prompt)
    return replace(wanted, block_names=names.hashes, names_id=names.id)


def blocks(tokens: int) -> int:
    return -(-tokens // SIZE)


async def moves(pair: Pair, prompt: int, cut: int, spend: int = SIZE) -> None:
    """Nothing but a partial block is computed again, and all that is missing is sent."""
    wanted = named(asked(prompt), pair.s)
    running = pair.at_s(wanted)
    output = await pair.tokens(running, cut)
    before_s, before_t = pair.s.stats(), pair.t.stats()
    warm = await pair.warm(wanted, output)
    size = prompt + len(output)
    assert warm.where == [MOVED]
    at_s, at_t = pair.s.stats(), pair.t.stats()
    steps = at_s.output_tokens - before_s.output_tokens  # the one that was handed over included
    assert at_s.computed_tokens - before_s.computed_tokens <= steps + spend
    assert at_t.computed_tokens == before_t.computed_tokens
    assert at_t.received_blocks - before_t.received_blocks == blocks(warm.received)
    assert warm.received in range(size - size % SIZE, size + 1) or before_t.received_blocks
    assert not running.finished, "it runs on meanwhile"
    whole = await pair.go_on(wanted, running)
    assert whole == reference_tokens(wanted, 0, max_len=200)
    later = len(whole) - len(output)
    assert pair.t.stats().computed_tokens - at_t.computed_tokens <= later + SIZE


# ---------------------------------------------------------------------- with its blocks


@pytest.mark.parametrize("cut", [1, 3, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 29])
@pytest.mark.parametrize("prompt", [2 * SIZE, 21])
def test_a_running_sequence_moves_with_its_blocks(prompt, cut):
    play(lambda pair: moves(pair, prompt, cut))


@pytest.mark.parametrize("s", ["aggregated", "decode", "prefill"])
@pytest.mark.parametrize("t", ["aggregated", "decode"])
def test_workers_of_all_modes_give_and_take(s, t):
    play(lambda pair: moves(pair, 21, 12), s, t)


def test_sequences_of_all_lengths_move():
    async def test(pair: Pair) -> None:
        chance = random.Random(7)
        for _ in range(12):
            await moves(pair, chance.randrange(1, 100), chance.randrange(1, 40))

    play(test)


@paired()
async def test_every_choice_moves_by_itself(pair: Pair) -> None:
    wanted = asked(30, n=3, sampling=SamplingParams(max_tokens=40, seed=3, ignore_eos=True))
    running = pair.at_s(wanted)
    await pair.nodes.until(lambda: all(len(running.tokens.get(i, ())) >= 10 for i in range(3)))
    outputs = [list(running.tokens[i]) for i in range(3)]
    for output in outputs:
        assert (await pair.warm(wanted, output)).where == [MOVED]
    outputs = [list(running.tokens[i]) for i in range(3)]
    pair.s.service.engine.abort(running.handle)
    before = pair.t.stats().computed_tokens
    after = pair.at_t(replace(wanted, output=outputs))
    await pair.nodes.until(lambda: after.finished == 3)
    for choice in range(3):
        whole = outputs[choice] + after.tokens[choice]
        assert whole == reference_tokens(wanted, choice, max_len=200)
    produced = sum(map(len, after.tokens.values()))
    assert pair.t.stats().computed_tokens - before <= produced + 3 * (SIZE + 20)


@paired()
async def test_a_worker_that_drains_hands_over(pair: Pair) -> None:
    wanted = asked(40)
    running = pair.at_s(wanted)
    output = await pair.tokens(running, 10)
    pair.s.service.drain()
    assert (await pair.warm(wanted, output)).where == [MOVED]
    assert await pair.go_on(wanted, running) == reference_tokens(wanted, 0, max_len=200)


@paired()
async def test_salts_keep_what_has_moved_apart(pair: Pair) -> None:
    wanted = asked(40, cache_salt="mine")
    output = await pair.tokens(pair.at_s(wanted), 10)
    await pair.warm(wanted, output)
    for salt, computed in (("", 50), ("other", 50), ("mine", SIZE)):
        before = pair.t.stats().computed_tokens
        sampling = replace(wanted.sampling, max_tokens=len(output) + 1)
        again = replace(wanted, output=[output], cache_salt=salt, sampling=sampling)
        await pair.ended(pair.at_t(again))
        assert abs(pair.t.stats().computed_tokens - before - computed) <= SIZE


@paired()
async def test_names_of_blocks_may_differ(pair: Pair) -> None:
    pair.t.service.rekey(b"another secret of this cluster's")
    wanted = named(asked(40), pair.s)
    running = pair.at_s(wanted)
    assert (await pair.warm(wanted, await pair.tokens(running, 10))).where == [MOVED]
    assert await pair.go_on(wanted, running) == reference_tokens(wanted, 0, max_len=200)


@paired()
async def test_who_names_no_source_notices_nothing(pair: Pair) -> None:
    wanted = asked(40)
    sink = pair.at_t(wanted)
    await pair.ended(sink)
    assert sink.where == [""]
    decode = pair.t.agent.decode
    assert decode is not None
    assert (decode.tally.local, decode.tally.remote) == ({}, {})
    assert pair.t.agent.handoffs() is None


@paired()
async def test_an_aggregated_worker_is_no_part_of_queues(pair: Pair) -> None:
    """It moves what runs there; how decode workers decide is nothing to it."""
    card = pair.t.node.card
    assert card is not None
    assert (card.mode, card.transfers) == ("aggregated", ("fake",))
    assert pair.t.agent.decode is not None
    assert pair.t.agent.decode.queue is None
    link = await pair.s.node.link(pair.t.node.id, timeout=1.0)
    with pytest.raises(PdserveError, match="method"):
        await link.request(DISAGG, SetDisagg("never"), timeout=1.0)


# ---------------------------------------------------------------------- or computed here


async def stays(pair: Pair, reason: str, **fields: Any) -> None:
    """It is computed by its new worker, which says why; what comes of it is right all the same."""
    wanted = named(asked(40), pair.t)
    running = pair.at_s(wanted)
    output = await pair.tokens(running, 10)
    fields.setdefault("sampling", wanted.sampling)
    whole = pair.at_t(pair.warm_up(wanted, output, **fields))
    await pair.ended(whole, 60.0)
    assert whole.where == [f"local; node=t; reason={reason}"]
    assert output + whole.output == reference_tokens(wanted, 0, max_len=200)
    decode = pair.t.agent.decode
    assert decode is not None
    assert decode.tally.local == {reason: 1}
    numbers = pair.t.agent.handoffs()
    assert numbers is not None
    assert numbers.local == {reason: 1}
    pair.s.service.engine.abort(running.handle)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"source": "nobody"}, "source_gone"),
        ({"source_epoch": 1}, "source_gone"),
        ({"sampling": SamplingParams(max_tokens=60, seed=5, ignore_eos=True, prompt_logprobs=0)},
         "not_possible"),
    ],
)  # fmt: skip
def test_a_hint_that_leads_nowhere(fields, reason):
    play(lambda pair: stays(pair, reason, **fields))


def test_a_worker_of_another_model_is_not_asked():
    async def test(pair: Pair) -> None:
        card = pair.s.service.cards()["m"]
        other = replace(card, compat_hash="other")
        pair.s.service._cards = {"m": other}
        pair.s.agent.tell()

        def told() -> bool:
            found = pair.t.node.registry.get(pair.s.node.id)
            theirs = None if found is None else found.card
            return theirs is not None and theirs.models[0].compat_hash == "other"

        await pair.nodes.until(told)
        await stays(pair, "source_misfit")

    play(test)


def test_a_worker_of_another_model_refuses(monkeypatch):
    """Its card has not come yet."""

    async def test(pair: Pair) -> None:
        monkeypatch.setattr("pdserve.worker.disagg.decode_handler._may_have", lambda *of: True)
        card = pair.s.service.cards()["m"]
        pair.s.service._cards = {"m": replace(card, compat_hash="other")}
        await stays(pair, "source_misfit")

    play(test)


def test_a_worker_that_hands_over_enough_refuses(monkeypatch):
    monkeypatch.setattr(prefill_side, "MAX_KV_FETCHES", 0)
    play(lambda pair: stays(pair, "source_busy"))


def test_a_worker_whose_engine_restarts_refuses():
    async def test(pair: Pair) -> None:
        engine = pair.s.service.engine
        assert isinstance(engine, VirtualTimeEngine)
        wanted = named(asked(40), pair.t)
        output = await pair.tokens(pair.at_s(wanted), 10)
        engine.die(5.0)
        whole = pair.at_t(pair.warm_up(wanted, output, sampling=wanted.sampling))
        await pair.ended(whole)
        assert whole.where == ["local; node=t; reason=source_unready"]

    play(test)


def test_a_worker_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(PrefillHandler, "_hand_over", answers(HAND_OVER)(lambda *of: None))
    play(lambda pair: stays(pair, "unclaimed"))


def test_what_is_cached_is_not_fetched():
    async def test(pair: Pair) -> None:
        wanted = named(asked(40), pair.t)
        output = await pair.tokens(pair.at_s(wanted), 2)
        await pair.warm(wanted, output)
        again = await pair.warm(wanted, output)
        assert again.where == ["local; node=t; reason=source_short"]

    play(test)


def test_what_its_worker_has_lost_is_computed_once():
    async def test(pair: Pair) -> None:
        wanted = named(asked(60), pair.s)
        before = pair.s.stats().computed_tokens
        whole = pair.at_t(pair.warm_up(wanted, [], sampling=wanted.sampling))
        await pair.ended(whole)
        assert whole.where == ["local; node=t; reason=source_failed"]
        assert whole.output == reference_tokens(wanted, 0, max_len=200)
        assert pair.s.stats().computed_tokens == before

    play(test)


def test_a_wrong_byte_is_seen():
    async def test(pair: Pair) -> None:
        pair.fabric.faults.wrong = 1.0
        await stays(pair, "source_failed")
        assert pair.fabric.counts["wrong"]

    play(test, transfer=TransferSpec(backends=("fake",), verify="all", optional=True))


def test_its_worker_dies_under_it():
    async def test(pair: Pair) -> None:
        wanted = named(asked(40), pair.s)
        output = await pair.tokens(pair.at_s(wanted), 10)
        pair.fabric.faults.delay = (0.4, 0.5)
        whole = pair.at_t(pair.warm_up(wanted, output, sampling=wanted.sampling))
        decode = pair.t.agent.decode
        assert decode is not None
        await pair.nodes.until(
            lambda: decode._in(DecodeState.FILL) + decode._in(DecodeState.VERIFY) > 0
        )
        dead = pair.workers.pop(0)
        await pair.nodes.crash("s")
        await pair.ended(whole, 60.0)
        assert whole.where == ["local; node=t; reason=source_failed"]
        assert output + whole.output == reference_tokens(wanted, 0, max_len=200)
        await dead.close()
        await pair.idle(30.0)

    play(test)


# ---------------------------------------------------------------------- how much, how long


def test_a_worker_hands_over_so_many_at_once(monkeypatch):
    monkeypatch.setattr(prefill_side, "MAX_KV_FETCHES", 2)

    async def test(pair: Pair) -> None:
        pair.fabric.faults.delay = (0.2, 0.3)
        warms = [pair.at_t(pair.warm_up(asked(17 + i, 100), [])) for i in range(6)]
        prefill, decode = pair.s.agent.prefill, pair.t.agent.decode
        assert prefill is not None
        assert decode is not None
        seen = set()
        while not all(warm.finished for warm in warms):
            seen.add(len(prefill))
            await asyncio.sleep(0.005)
        assert max(seen) == 2
        assert decode.tally.remote["source"] >= 2
        assert decode.tally.local["source_busy"] >= 1

    play(test)


@paired()
async def test_what_is_cancelled_leaves_nothing(pair: Pair) -> None:
    pair.fabric.faults.delay = (0.01, 0.05)
    running = pair.at_s(asked(40, 150))
    await pair.tokens(running, 5)
    prefill, decode = pair.s.agent.prefill, pair.t.agent.decode
    assert prefill is not None
    assert decode is not None
    seen = set()
    for step in range(24):
        wanted = replace(asked(40, 150), cache_salt=f"{step}")  # nothing of it is here
        warm = pair.at_t(pair.warm_up(wanted, running.output))
        await asyncio.sleep(0.01 * step)
        seen |= set(decode.numbers().states)
        pair.t.agent.abort(warm.handle)
        took = await pair.nodes.until(lambda: not prefill and not decode, 3.0)
        assert took <= 1.0
        await pair.nodes.until(lambda: not pair.t.stats().blocks_used, 1.0)
    pair.s.service.engine.abort(running.handle)
    assert {"admit", "attempt", "fill"} <= seen
