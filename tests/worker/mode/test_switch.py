"""Workers change their mode under load: real nodes, engine cores, queues and transports in virtual
time. Every token is compared with the only right one."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.errors import Draining, NotReady
from pdserve.ids import NodeLife
from pdserve.messages.handoff import ItemClaimed, OpenAttempt, PrefillItem
from pdserve.messages.mode import ModeReport, SetMode
from pdserve.messages.request import SamplingParams
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.runtime.rpc_methods import MODE, OPEN_ATTEMPT
from pdserve.token_ids import token_ids
from pdserve.worker.disagg.queue.claims import QueueClaimSource
from pdserve.worker.mode import switch as driver
from tests.net.world import virtually
from tests.runtime.cluster import cluster
from tests.worker.disagg.test_end_to_end import Sink, Whole, asked, idle, right
from tests.worker.disagg.test_migration import NAMING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.messages.node import NodeCard
    from pdserve.messages.trace import Trace
    from pdserve.tracing.steps import StepTrace
    from tests.worker.disagg.test_end_to_end import Worker


class Site(Whole):
    """A router, the decode worker `d`, and workers whose mode changes."""

    async def order(self, name: str, mode: str, **fields: Any) -> ModeReport:
        link = await self.router.node.link(self.workers[name].node.id, timeout=1.0)
        return await link.request(MODE, SetMode(mode=mode, **fields), timeout=1.0)

    async def serves(self, name: str) -> ModeReport:
        """Waits until it serves again."""
        switch = self.workers[name].agent.mode
        await self.nodes.until(lambda: switch.report().state == "serving", 90.0)
        return switch.report()

    async def change(self, name: str, mode: str, **fields: Any) -> ModeReport:
        told = await self.order(name, mode, **fields)
        assert not told.refused, told.refused
        return await self.serves(name)

    def card(self, name: str) -> NodeCard:
        card = self.workers[name].node.card
        assert card is not None
        return card

    def at(self, name: str, wanted: Any) -> Sink:
        sink = Sink()
        self.workers[name].agent.submit(wanted, sink)
        return sink

    async def answers(self, name: str, wanted: Any) -> Sink:
        sink = self.at(name, wanted)
        await self.nodes.until(lambda: sink.finished == wanted.n or bool(sink.error), 30.0)
        assert right(sink, wanted)
        return sink

    def count(self, name: str, outcome: str) -> float:
        return self.workers[name].service.metrics.mode_switches.labels(outcome).value


@asynccontextmanager
async def site(*prefills: str, **fields: Any) -> AsyncIterator[Site]:
    async with cluster() as nodes:
        made = Site(nodes)
        await made.begin(*prefills, **fields)
        try:
            yield made
            await nodes.until(lambda: idle(made), 30.0)
        finally:
            await made.close()


def prompt(number: int, length: int = 60) -> list[int]:
    return [(number * 7 + i) % 90 + 3 for i in range(length)]


@virtually
async def test_a_prefill_worker_becomes_a_decode_worker_and_comes_back() -> None:
    async with site("p", "q") as made:
        assert (await made.answers("d", asked("before", prompt(1)))).where[0].startswith("remote")
        report = await made.change("p", "decode")
        assert (report.mode, report.generation, report.failed) == ("decode", 2, "")
        card = made.card("p")
        assert (card.mode, card.mode_generation, card.leaving) == ("decode", 2, False)
        sink = await made.answers("p", asked("here", prompt(2)))
        assert sink.where == ["remote; node=q; reason=rule"]
        report = await made.change("p", "prefill")
        assert (report.mode, report.generation) == ("prefill", 3)
        with pytest.raises(NotReady, match="is a prefill worker"):
            made.at("p", asked("refused", prompt(3)))
        await made.nodes.crash("q")
        await made.workers.pop("q").close()
        sink = await made.answers("d", asked("after", prompt(4)))
        assert sink.where == ["remote; node=p; reason=rule"]
        assert made.count("p", "done") == 2


@virtually
async def test_the_prefix_cache_stays_and_its_blocks_are_used_in_the_new_mode() -> None:
    async with site("p", "q") as made:
        wanted = asked("first", prompt(1, 80))
        sink = await made.answers("d", wanted)
        had = sink.where[0].partition("node=")[2][0]
        worker = made.workers[had]
        cached = worker.stats().blocks_cached
        assert cached >= 9
        leading = worker.agent._kv.leading  # the names that routers are told
        names = _names(worker, prompt(1, 80))
        before = leading(names)
        await made.change(had, "decode")
        assert worker.stats().blocks_cached == cached
        assert leading(names) == before
        again = await made.answers(had, asked("again", prompt(1, 80)))
        assert again.started[0].cached_tokens == 72


@virtually
async def test_blocks_in_quarantine_stay_there() -> None:
    """A peer may still write to them, whatever the worker's mode is."""
    async with site("p", "q") as made:
        core = made.workers["p"].service.engine.core  # type: ignore[attr-defined]
        blocks = core.pool.reserve(2)
        core.pool.quarantine(blocks)
        for mode in ("decode", "both", "prefill"):
            await made.change("p", mode)
            assert core.pool.counts().quarantined == 2
        core.pool.unquarantine(blocks)
        core.pool.check()


def _names(worker: Worker, ids: list[int]) -> bytes:
    card = worker.service.cards()["m"]
    return NAMING.of_one(card, "", token_ids(ids)).hashes


@virtually
async def test_streams_stay_where_both_modes_take_requests() -> None:
    async with site("p") as made:
        wanted = [asked(f"r{i}", prompt(i, 12)) for i in range(4)]
        sinks = [made.at("d", one) for one in wanted]
        report = await made.change("d", "aggregated", last=True)
        assert report.mode == "aggregated"
        await made.nodes.until(lambda: all(s.finished for s in sinks))
        assert all(right(s, one) for s, one in zip(sinks, wanted, strict=True))
        sink = await made.answers("d", asked("alone", prompt(9)))
        assert sink.where == [""]  # an aggregated worker decides nothing


@virtually
async def test_a_change_waits_for_prompts_on_their_way() -> None:
    async with site("p") as made:
        wanted = [asked(f"r{i}", prompt(i, 100)) for i in range(6)]
        sinks = [made.at("d", one) for one in wanted]
        await made.order("d", "aggregated", last=True)
        card, load = made.card("d"), made.d.agent.load()  # both modes take requests
        assert (card.leaving, card.going, load.ready) == (True, False, True)
        assert card.models
        wanted.append(asked("new", prompt(8)))
        sinks.append(made.at("d", wanted[-1]))
        await made.serves("d")
        assert all(sink.started for sink in sinks[:-1])
        await made.nodes.until(lambda: all(s.finished for s in sinks))
        assert all(right(s, one) for s, one in zip(sinks, wanted, strict=True))
        assert sinks[-1].where == ["local; node=d; reason=mode_change"]


@pytest.mark.parametrize("mode", ["decode", "aggregated", "both"])
@virtually
async def test_computed_prompts_are_sent_in_the_new_mode(mode: str) -> None:
    """A slow network does not hold a prefill worker back, and nobody computes its prompts again."""
    async with site("p", "q") as made:
        p, q = made.workers["p"], made.workers["q"]
        claims, others = p.agent.prefill, q.agent.prefill
        assert claims is not None
        assert others is not None
        others.paused = True  # so that all go to p
        others.changed()
        await made.answers("d", asked("before", prompt(9)))  # its path is made
        life = NodeLife(p.node.id, p.node.epoch)
        made.fabric.hold(life)
        wanted = [asked(f"r{i}", prompt(i, 60)) for i in range(2)]
        sinks = [made.at("d", one) for one in wanted]
        await made.nodes.until(lambda: len(claims) == 2 and not claims.waiting, 30.0)
        others.paused = False
        others.changed()
        before = made.nodes.loop.time()
        report = await made.change("p", mode, **({"share": 0.5} if mode == "both" else {}))
        assert (report.mode, report.failed, len(claims)) == (mode, "", 2)
        assert made.nodes.loop.time() - before < 5.0
        await asyncio.sleep(5.0)
        assert not any(sink.started for sink in sinks)
        made.fabric.release(life)
        await made.nodes.until(lambda: all(s.finished for s in sinks), 30.0)
        assert all(right(s, one) for s, one in zip(sinks, wanted, strict=True))
        assert [s.where for s in sinks] == [["remote; node=p; reason=rule"]] * 2
        assert q.stats().computed_tokens == 0
        assert others.numbers().ended == {}
        await made.nodes.until(lambda: not len(claims), 30.0)
        assert claims.numbers().ended == {"done": 3}


@virtually
async def test_who_will_take_no_requests_takes_none_meanwhile() -> None:
    async with site("p", "q") as made:
        made.workers["p"].agent.left_for = lambda mode: 1  # type: ignore[method-assign]
        await made.change("q", "decode")
        await asyncio.sleep(1.0)  # all know of it
        wanted = asked("long", prompt(1, 12))
        sink = made.at("d", wanted)
        await made.order("d", "prefill", timeout=2.0)
        with pytest.raises(Draining, match="changes its mode"):
            made.at("d", asked("new", prompt(8)))
        card, load = made.card("d"), made.d.agent.load()
        assert (card.leaving, card.going, load.ready) == (True, True, False)
        assert card.models  # it still serves them
        await made.nodes.until(lambda: bool(sink.finished))
        assert right(sink, wanted)
        await made.serves("d")


@virtually
async def test_an_engine_without_room_for_a_test_proves_itself_by_its_streams() -> None:
    async with site("p") as made:
        long = SamplingParams(max_tokens=120, seed=5, ignore_eos=True)
        wanted = [replace(asked(f"r{i}", prompt(i, 12)), sampling=long) for i in range(8)]
        sinks = [made.at("d", one) for one in wanted]
        await made.nodes.until(lambda: all(s.started for s in sinks))
        report = await made.change("d", "aggregated", last=True)
        assert (report.mode, report.failed) == ("aggregated", "")
        assert not any(s.finished for s in sinks)
        await made.nodes.until(lambda: all(s.finished for s in sinks), 60.0)
        assert all(right(s, one) for s, one in zip(sinks, wanted, strict=True))


@virtually
async def test_a_worker_that_is_needed_refuses() -> None:
    async with site("p") as made:
        told = await made.order("p", "decode")
        assert "no other ready worker of model 'm' computes prompts" in told.refused
        assert (told.mode, told.state, told.generation) == ("prefill", "serving", 1)
        assert "takes requests" not in (await made.order("d", "both")).refused
        for words, fields in (
            ("stale", {"generation": 7}),
            ("knows no mode", {"mode": "sometimes"}),
            ("a share of 0", {"mode": "both", "share": 0.0}),
        ):
            order = SetMode(**{"mode": "decode", **fields})  # type: ignore[arg-type]
            assert words in made.workers["p"].agent.mode._refusal(order)
        assert made.count("p", "refused") == 1
        assert (await made.change("p", "decode", last=True)).mode == "decode"
        await asyncio.sleep(1.0)
        sink = await made.answers("d", asked("r", prompt(1)))
        assert sink.where == ["local; node=d; reason=no_prefill_worker"]


@virtually
async def test_of_two_that_leave_together_one_stays() -> None:
    async with site("p", "q") as made:
        told = [await made.order(name, "decode") for name in ("p", "q")]
        for name in ("p", "q"):
            await made.serves(name)
        modes = sorted(made.card(name).mode for name in ("p", "q"))
        assert (modes, [one.refused == "" for one in told].count(True)) in (
            (["decode", "prefill"], 1),
            (["decode", "prefill"], 2),
        )
        assert (made.count("p", "last"), made.count("q", "last")) in ((0, 1), (0, 0))


@virtually
async def test_nobody_counts_on_a_worker_that_leaves_for_sure() -> None:
    """The greater name stays if both are asked at the same moment, unless its order says `last`."""
    async with site("p", "q") as made:
        lent = made.workers["q"].agent.left_for
        made.workers["q"].agent.left_for = lambda mode: 1  # type: ignore[method-assign]
        told = [await made.order(n, "decode", last=n == "q", timeout=20.0) for n in ("q", "p")]
        assert [one.refused for one in told] == ["", ""]  # the news had not come
        await asyncio.sleep(5.0)
        assert [made.workers[n].agent.mode.report().state for n in "pq"] == ["leaving"] * 2
        made.workers["q"].agent.left_for = lent  # type: ignore[method-assign]
        assert (await made.serves("q")).mode == "decode"
        report = await made.serves("p")
        assert (report.mode, made.count("p", "last")) == ("prefill", 1)
        assert "no other ready worker" in report.failed
    async with site("p", "q") as made:
        made.workers["q"].agent.left_for = lambda mode: 1  # type: ignore[method-assign]
        await made.order("q", "decode", timeout=5.0)
        await asyncio.sleep(1.0)
        assert "no other ready worker" in (await made.order("p", "decode")).refused
        await made.serves("q")


@virtually
async def test_an_order_waits_for_news_of_a_change_just_before() -> None:
    async with site("p", "q") as made:
        await made.change("q", "decode")
        await asyncio.sleep(1.0)
        for name, target in (("d", "prefill"), ("d", "decode"), ("q", "prefill")) * 4:
            assert (await made.change(name, target)).mode == target
            if name == "q":
                await made.change(name, "decode")


@virtually
async def test_the_same_order_again_joins_the_change() -> None:
    async with site("p") as made:
        made.d.agent.left_for = lambda mode: 1  # type: ignore[method-assign]
        await made.order("d", "both", last=True, share=0.25, timeout=2.0)
        again = await made.order("d", "both", share=0.25)
        assert (again.refused, again.state, again.left) == ("", "leaving", 1)
        assert "changes to both already" in (await made.order("d", "both", share=0.5)).refused
        report = await made.serves("d")
        assert (report.mode, made.count("d", "timed_out")) == ("decode", 1)


@virtually
async def test_queue_clients_that_cannot_be_made_are_no_end() -> None:
    async with site("p", "q") as made:
        agent, told = made.workers["p"].agent, []
        use_queues, tell = agent.use_queues, agent.tell

        def cannot(mode: Any, generation: int, share: float) -> None:
            if mode == "decode":
                raise RuntimeError("planted")
            use_queues(mode, generation, share)

        def note() -> None:
            tell()
            told.append(agent.mode.report().state)
            assert made.card("p").mode == "prefill", "a card names no mode before its parts work"

        agent.use_queues, agent.tell = cannot, note  # type: ignore[method-assign]
        report = await made.change("p", "decode")
        assert (report.mode, report.generation) == ("prefill", 3)
        assert "cannot be replaced" in report.failed
        states = [state for state, _ in itertools.groupby(told)]
        assert states == ["leaving", "flipping", "returning", "serving"]


@virtually
async def test_what_cannot_leave_in_time_keeps_its_mode_and_its_streams() -> None:
    async with site("p") as made:
        wanted = asked("long", prompt(1, 12))
        sink = made.at("d", wanted)
        lent = made.d.agent.left_for
        made.d.agent.left_for = lambda mode: 1  # type: ignore[method-assign]
        report = await made.change("d", "prefill", last=True, timeout=2.0)
        assert (report.mode, report.generation) == ("decode", 1)
        assert "were left when the time had passed" in report.failed
        made.d.agent.left_for = lent  # type: ignore[method-assign]
        await made.nodes.until(lambda: bool(sink.finished))
        assert right(sink, wanted)
        assert made.count("d", "timed_out") == 1
        assert (await made.answers("d", asked("r", prompt(2)))).where[0].startswith("remote")


@virtually
async def test_failures_of_two_workers_in_one_process_do_not_hide_each_other() -> None:
    async with site("p") as made:
        shared = Degradations(Metrics())
        for name in ("d", "p"):
            agent = made.workers[name].agent
            agent.left_for = lambda mode: 1  # type: ignore[method-assign]
            agent.mode._degradations = shared
        await made.change("d", "prefill", last=True, timeout=1.0)
        await made.change("p", "decode", last=True, timeout=1.0)
        told = dict(shared.reasons())
        assert told.keys() == {"decode_mode_switch", "prefill_mode_switch"}
        assert told["decode_mode_switch"].startswith("d is decode still, not prefill: 1 requests")
        del made.workers["p"].agent.left_for
        await made.change("p", "decode", last=True)
        await made.change("p", "prefill", last=True)
        assert list(shared.reasons()) == ["decode_mode_switch"]
        del made.d.agent.left_for


@virtually
async def test_an_operator_takes_the_order_back() -> None:
    async with site("p") as made:
        made.d.agent.left_for = lambda mode: 1  # type: ignore[method-assign]
        assert (await made.order("d", "prefill", last=True)).state == "leaving"
        assert "already" in (await made.order("d", "aggregated")).refused
        assert (await made.order("d", "decode")).refused == ""
        report = await made.serves("d")
        assert (report.mode, report.generation, report.failed) == ("decode", 1, "")
        assert made.count("d", "cancelled") == 1
        assert (await made.answers("d", asked("r", prompt(2)))).where[0].startswith("remote")


@virtually
async def test_a_late_order_of_a_planner_is_refused_and_an_operators_is_not() -> None:
    async with site("p", "q") as made:
        assert (await made.change("p", "decode", term=7, number=3)).mode == "decode"
        for stale in ({"term": 7, "number": 2}, {"term": 6, "number": 9}):
            late = await made.order("p", "prefill", **stale)
            assert late.refused.startswith(
                "stale: a later planner has ordered it (plan 3 of term 7"
            )
            assert late.newest == 7
        assert made.count("p", "refused") == 2
        assert (await made.order("p", "decode", term=7, number=3)).refused == ""  # repeated
        assert (await made.change("p", "prefill")).mode == "prefill"
        assert (await made.order("p", "decode", term=7, number=2)).refused
        assert (await made.change("p", "decode", term=8, number=1)).mode == "decode"


@virtually
async def test_a_refused_order_makes_no_later_one_late() -> None:
    async with site("p") as made:
        assert (await made.order("p", "decode", term=7, number=3)).refused  # the last one
        assert (await made.order("p", "prefill", term=7, number=2)).refused == ""


@virtually
async def test_the_last_worker_that_does_something_is_needed() -> None:
    async with site("p", "q") as made:
        assert made.workers["p"].agent.mode.needed() == ""
        assert "no other ready worker" in made.d.agent.mode.needed()
        await made.change("p", "decode")
        await made.nodes.until(lambda: not made.d.agent.mode.needed())
        assert "computes prompts" in made.workers["q"].agent.mode.needed()


@virtually
async def test_a_mode_that_does_not_work_is_given_up() -> None:
    async with site("p", "q") as made:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "unreachable_decode", lambda *args: "no KV can reach d")
            patch.setattr(driver, "jobs_of", lambda mode: frozenset(("requests", "prompts")))
            report = await made.change("p", "decode")
        assert (report.mode, report.generation) == ("prefill", 3)
        assert report.failed == "decode: no KV can reach d"
        assert made.count("p", "failed") == 1
        await made.nodes.crash("q")
        await made.workers.pop("q").close()
        sink = await made.answers("d", asked("r", prompt(2)))
        assert sink.where == ["remote; node=p; reason=rule"]


@virtually
async def test_the_engine_dies_while_it_proves_itself() -> None:
    async with site("p", "q") as made:
        engine: Any = made.workers["p"].service.engine
        submit, failures = engine.submit, iter([NotReady("it restarts"), NotReady("it restarts")])

        def once(request: Any, sink: Any) -> Any:
            for error in failures:
                raise error
            return submit(request, sink)

        engine.submit = once
        report = await made.change("p", "decode")
        assert (report.mode, report.failed) == ("decode", "")


@virtually
async def test_a_drain_ends_a_change() -> None:
    async with site("p", "q") as made:
        worker = made.workers["p"]
        worker.agent.left_for = lambda mode: 1  # type: ignore[method-assign]
        await made.order("p", "decode")
        assert await worker.drain(5.0)
        report = await made.serves("p")
        assert (report.mode, report.failed) == ("prefill", "")
        assert (await made.order("p", "decode")).refused == "it drains"


@virtually
async def test_both_takes_requests_and_a_share_of_prompts() -> None:
    async with site("p") as made:
        report = await made.change("p", "both", share=0.25)
        assert (report.mode, report.share) == ("both", 0.25)
        card = made.card("p")
        assert (card.mode, card.prompt_share) == ("aggregated", 0.25)
        sink = await made.answers("p", asked("own", prompt(1)))
        assert sink.where == [""]
        sink = await made.answers("d", asked("for d", prompt(2)))
        assert sink.where == ["remote; node=p; reason=rule"]
        prefill = made.workers["p"].agent.prefill
        assert prefill is not None
        assert prefill.credits == 1  # a quarter of a step holds none: one at a time
        assert (await made.change("p", "both", share=1.0)).generation == 3
        assert prefill.credits > 1


@virtually
async def test_claims_and_attempts_of_another_generation_are_stale() -> None:
    async with site("p", "q") as made:
        await made.change("p", "decode")
        await made.change("p", "prefill")
        taken: list[int] = []
        claims = made.workers["p"].agent.prefill._queue  # type: ignore[union-attr]
        assert isinstance(claims, QueueClaimSource)
        claims._take = lambda claim: taken.append(claim.number)
        await made.nodes.until(lambda: bool(claims._offers) and bool(claims._routers))
        router = next(iter(claims._routers.values()))
        item = made_item(made.d.service.cards()["m"].compat_hash)
        await made.nodes.until(lambda: claims._offers["m"].credits > 0)
        for number, generation in enumerate((1, 2, 3, 0), 1):
            claims.on_message(
                router.connection,
                ItemClaimed(
                    claim=number, decode=made.d.node.id, decode_epoch=1, item=item,
                    generation=generation,
                ),
            )  # fmt: skip
        got, returned = tuple(taken), claims.returned
        for number in got:
            claims.end(router.claims[number], "cancelled")
        # And at a decode worker
        sink = Sink()
        handle = made.d.agent.submit(asked("r", prompt(5)), sink)
        link = await made.router.node.link(made.d.node.id, timeout=1.0)
        stale = OpenAttempt(
            request=handle, round=1, owner=made.router.node.id, owner_epoch=1, generation=9
        )
        with pytest.raises(Exception, match="changed its mode"):
            await link.request(OPEN_ATTEMPT, stale, timeout=1.0)
        await made.nodes.until(lambda: bool(sink.finished))
    assert got[:1] == (3,)
    assert returned >= 2


def made_item(compat_hash: str) -> PrefillItem:
    return PrefillItem(request=999, round=1, model="m", compat_hash=compat_hash, prompt_tokens=40)


@pytest.mark.parametrize("seed", range(3))
def test_many_changes_under_load(seed: int, long: bool) -> None:
    @virtually
    async def run() -> None:
        await _many(random.Random(seed), rounds=200 if long else 8)

    run()


async def _many(draw: random.Random, rounds: int) -> None:
    """Requests go to whoever takes them, as routers do; a refused one is asked elsewhere."""
    async with site("p", "q", "s") as made:
        wanted, sinks = [], []
        for number in range(rounds):
            name = draw.choice(("d", "p", "q", "s"))
            mode = draw.choice(("aggregated", "decode", "prefill", "both"))
            await made.order(name, mode, share=draw.choice((0.25, 1.0)), timeout=20.0)
            for part in range(3):
                one = asked(f"r{number}-{part}", prompt(draw.randrange(20), draw.randrange(8, 120)))
                for taker in draw.sample(("d", "p", "q", "s"), 4):
                    try:
                        sink = made.at(taker, one)
                    except (Draining, NotReady):
                        continue
                    wanted.append(one)
                    sinks.append(sink)
                    break
            await asyncio.sleep(draw.choice((0.0, 0.05, 0.3, 1.0)))
        await made.nodes.until(lambda: all(s.finished or s.error for s in sinks), 120.0)
        assert all(right(s, one) for s, one in zip(sinks, wanted, strict=True))
        assert len(sinks) > 2 * rounds
        for name in ("d", "p", "q", "s"):
            await made.serves(name)
            assert made.count(name, "failed") == 0
        assert sum(made.count(name, "done") for name in ("d", "p", "q", "s")) > rounds / 8


@pytest.mark.parametrize("after", [0.0, 0.2, 0.8, 1.2])
@pytest.mark.parametrize("target", ["decode", "both"])
def test_a_worker_is_closed_in_the_middle_of_a_change(
    target: str, after: float, caplog: pytest.LogCaptureFixture
) -> None:
    @virtually
    async def run() -> None:
        async with site("p", "q") as made:
            engine: Any = made.workers["p"].service.engine

            def never(request: Any, sink: Any) -> Any:
                raise NotReady("it restarts")

            engine.submit = never  # it proves itself until it is closed
            assert not (await made.order("p", target)).refused
            await asyncio.sleep(after)
            await made.workers.pop("p").close()
            made.nodes.nodes.pop("p")
            await asyncio.sleep(15.0)

    run()
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


@virtually
async def test_each_change_has_a_trace_with_its_states() -> None:
    async with site("p", "q") as made:
        traces: list[Trace] = []
        switch = made.workers["p"].agent.mode

        def keep(steps: StepTrace, outcome: str, failed: str) -> None:
            now = made.workers["p"].node.now()
            traces.append(steps.built(now, now, random.Random(1), error=failed, result=outcome))

        switch.on_traced = keep
        await made.change("p", "decode")
        switch._parts.left_for = lambda mode: 1  # type: ignore[method-assign]
        await made.change("p", "prefill", last=True, timeout=1.0)
        del made.workers["p"].agent.left_for
        done, failed = traces
        assert [one.name for one in done.spans] == [
            "pdserve.mode_switch",
            *(f"pdserve.mode_switch.{step}" for step in ("leaving", "flipping", "proving")),
        ]
        assert done.spans[0].attributes["pdserve.result"] == "done"
        (ordered,) = done.spans[0].events
        assert ordered.attributes == {"pdserve.mode": "decode", "pdserve.was": "prefill"}
        assert (failed.spans[0].attributes["pdserve.result"], len(failed.spans)) == ("timed_out", 2)
        assert failed.spans[0].error.startswith("1 requests or prompts were left")
        assert failed.spans[0].end == pytest.approx(1.0, abs=0.3)
