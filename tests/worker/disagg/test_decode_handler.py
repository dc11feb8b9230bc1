"""Requests of a decode worker, whatever happens to it and to the prefill workers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.errors import PayloadTooLarge
from pdserve.messages.engine import PathState
from pdserve.messages.handoff import LEASE_SECONDS, AttemptOpened
from pdserve.messages.lora import LoraSummary
from pdserve.messages.node import ModelSummary, NodeCard, summarize_card
from pdserve.messages.tiers import CachedSource, KvSource
from pdserve.net.link import PeerLink
from pdserve.net.link_call import LinkCall
from pdserve.runtime.rpc_methods import NOTIFY
from pdserve.worker.disagg import decode_handler
from pdserve.worker.disagg.decode_handler import DecodeHandler
from pdserve.worker.disagg.policy import DisaggDecision, DisaggInputs, DisaggPolicy
from pdserve.worker.disagg.remote_prefill import MAX_PREFILL_ATTEMPTS
from tests.worker.disagg.cluster import (
    CAPABILITIES,
    CARD,
    Client,
    DisaggCluster,
    on_site,
    play,
    request,
)

if TYPE_CHECKING:
    from pdserve.ids import NodeId
    from pdserve.messages.transfer import TransferTicket

ON_THE_WAY = ["admit", "queue", "attempt", "fill", "verify", "local"]
AT_WORK = ["attempt", "fill", "verify"]
SOON = 1.0
"""Seconds within which both workers are free of what nobody wants."""


async def in_state(site: DisaggCluster, state: str, **fields: object) -> Client:
    """A request that stands still in this state, as long as nothing happens to it."""
    stuck = {"admit": "admit", "attempt": "open", "fill": "prefill", "verify": "send"}
    if state in stuck:
        for host in (site.d, *site.prefills):
            host.script.steps[stuck[state]] = ["hang"]
    if state == "queue":
        site.queue.keeps = True
    if state == "local":
        site.queue.refuses = "displaced"
        site.d.script.steps["prefill"] = ["hang"]
    client = site.ask(request(**fields))  # type: ignore[arg-type]
    await site.reaches(client, state)
    return client


def heal(site: DisaggCluster) -> None:
    """What made it stand still is over."""
    site.queue.keeps, site.queue.refuses = False, ""
    for host in (site.d, *site.prefills):
        host.script.steps.clear()


# ---------------------------------------------------------------- where, and why


@on_site()
async def test_a_prompt_is_prefilled_elsewhere(site: DisaggCluster) -> None:
    client = site.ask(request())
    await site.until(lambda: client.over)
    assert client.where == "remote; node=p1; reason=always"
    assert client.started[0].received_tokens == 100
    assert client.tokens == {0: 3}
    await site.quiet()
    assert site.queue.outcomes == {"done": 1}
    numbers = site.d.decode.numbers()
    assert (numbers.remote, numbers.local) == ({"always": 1}, {})
    assert numbers.ended == {"done": 1}


@on_site()
async def test_a_remote_prefill_says_what_it_found_in_caches(site: DisaggCluster) -> None:
    sources = (CachedSource("disk", 32), CachedSource("peer", 16, "p2"))
    site.p.script.cached, site.p.script.sources = 64, sources
    client = site.ask(request(n=2))
    await site.until(lambda: client.over)
    for started in client.started:
        assert (started.prefill_cached, started.prefill_sources) == (64, sources)
        assert (started.cached_tokens, started.sources) == (0, ())


@on_site()
async def test_a_prefill_worker_is_no_source_of_its_own(site: DisaggCluster) -> None:
    """The router has named sources for the decode worker."""
    named = (KvSource("p1", 1, 9), KvSource("p2", 1, 5))
    client = await in_state(site, "fill", kv_sources=named)
    (prompt,) = site.p.engine.prompts.values()
    assert prompt.request.kv_sources == named[1:]
    site.cancel(client)
    await site.until(lambda: client.cancelled)
    await site.quiet()


@on_site()
async def test_what_a_lost_attempt_found_in_caches_is_not_told(site: DisaggCluster) -> None:
    site.p.script.cached, site.p.script.sources = 64, (CachedSource("disk", 64),)
    for host in (site.d, *site.prefills):
        host.script.steps["send"] = ["fail"] * 9
    client = site.ask(request())
    await site.until(lambda: client.over)
    assert client.where.startswith("local; ")
    assert (client.started[0].prefill_cached, client.started[0].prefill_sources) == (0, ())


@on_site()
async def test_every_choice_says_where(site: DisaggCluster) -> None:
    client = site.ask(request(n=3))
    await site.until(lambda: client.over)
    assert [started.prefill for started in client.started] == ["remote; node=p1; reason=always"] * 3


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda site: setattr(site.d, "chooser", None), "short_prompt"),
        (lambda site: setattr(site.queue, "known", False), "no_prefill_worker"),
        (lambda site: setattr(site.queue, "waiting", 11), "queue_full"),
        (lambda site: setattr(site.d.decode.chooser, "mode", "never"), "never"),
        (
            lambda site: setattr(
                site.d.engine, "capabilities", replace(CAPABILITIES, transfers=())
            ),
            "not_possible",
        ),
    ],
)
def test_what_is_decided_for_here_says_why(prepare, reason):
    async def test(site: DisaggCluster) -> None:
        site.d.decode.chooser = DisaggPolicy("rule", min_tokens=50)
        prepare(site)
        client = site.ask(request(prompt=20 if reason == "short_prompt" else 100))
        await site.until(lambda: client.over)
        assert client.where == f"local; node=d; reason={reason}"
        assert site.d.decode.numbers().local == {reason: 1}
        await site.quiet()

    play(test)


@on_site()
async def test_prompts_of_one_step_count_for_those_that_come_after_them(
    site: DisaggCluster,
) -> None:
    """The engine tells of them only after the step."""
    seen: list[int] = []

    class Noting(DisaggPolicy):
        def decide(self, prospect: DisaggInputs) -> DisaggDecision:
            seen.append(prospect.backlog)
            return super().decide(prospect)

    site.d.decode.chooser = Noting("never")
    clients = [site.ask(request(prompt=100)) for _ in range(4)]
    await site.until(lambda: len(seen) == 4)
    assert seen == [0, 0, 100, 200]
    site.cancel(clients[1])
    await site.until(lambda: all(client.over or client.cancelled for client in clients))
    last = site.ask(request(prompt=100))
    await site.until(lambda: last.over)
    assert seen[-1] == 0
    await site.quiet()


@on_site()
async def test_nobody_waits_for_prefill_workers_that_mean_another_model(
    site: DisaggCluster,
) -> None:
    def offer(compat_hash: str) -> NodeCard:
        same = {"name": CARD.name, "max_model_len": 1000, "vocab_size": 9, "block_size": 4}
        parts = {"tokenizer": b"t" * 16, "tokenizer_config": b"c" * 16}
        one = ModelSummary(**same, **parts, compat_hash=compat_hash)  # type: ignore[arg-type]
        return NodeCard(role="worker", mode="prefill", models=(one,))

    async def all_say(card: NodeCard) -> None:
        for host in site.prefills:
            host.node.publish_card(card, {})
        registry = site.d.node.registry
        seen = [host.node.id for host in site.prefills]
        await site.until(
            lambda: all((one := registry.get(node)) and one.card == card for node in seen)
        )

    async def where(compat_hash: str) -> str:
        await all_say(offer(compat_hash))
        client = site.ask(request())
        await site.until(lambda: client.over)
        return client.where

    assert await where("other") == "local; node=d; reason=no_worker"
    assert await where(CARD.compat_hash) == "remote; node=p1; reason=always"


async def say_adapters(site: DisaggCluster, **revisions: str) -> None:
    """Each prefill worker offers the model, some with the adapter `poet` in this revision."""
    for host in site.prefills:
        node = host.node.id
        loras = (LoraSummary(name="poet", revision=revisions[node]),) if node in revisions else ()
        offered, _ = summarize_card(replace(CARD, loras=loras))
        card = NodeCard(role="worker", mode="prefill", models=(offered,))
        host.node.publish_card(card, {})
        await site.until(partial(knows, site, host.node.id, card))


def knows(site: DisaggCluster, node: NodeId, card: NodeCard) -> bool:
    """The decode worker has the newest card of a node."""
    member = site.d.node.registry.get(node)
    return member is not None and member.card == card


@on_site(prefills=2)
async def test_a_prompt_of_an_adapter_is_for_prefill_workers_that_have_it(
    site: DisaggCluster,
) -> None:
    async def where(lora: str) -> str:
        client = site.ask(request(lora=lora))
        await site.until(lambda: client.over)
        return client.where.removesuffix("; reason=always")

    await say_adapters(site, p2="1")
    assert await where("") == "remote; node=p1"
    assert await where("poet@1") == "remote; node=p2"
    assert await where("poet@2") == "local; node=d; reason=no_worker"
    await say_adapters(site)
    assert await where("poet@1") == "local; node=d; reason=no_worker"


@on_site(prefills=1)
async def test_a_claim_of_a_worker_without_the_adapter_opens_no_attempt(
    site: DisaggCluster,
) -> None:
    """An older router does not read whom the item excludes, or the worker has come later."""
    await say_adapters(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_handler, "_may_prefill", lambda *of: True)
        patch.setattr(DecodeHandler, "lacking", lambda self, lora: [])
        client = site.ask(request(lora="poet@1"))
        await site.until(lambda: client.over)
    assert client.where == "local; node=d; reason=no_worker"
    assert client.started[0].received_tokens == 0
    assert site.queue.outcomes == {"refused": 1}
    await site.quiet()


def cut_off(*nodes: str) -> list[PathState]:
    return [PathState(node=n, epoch=1, backend="none", down="no TLS", degraded="x") for n in nodes]


@on_site(prefills=2)
async def test_who_cannot_be_reached_by_kv_is_not_asked(site: DisaggCluster) -> None:
    async def where() -> str:
        client = site.ask(request())
        await site.until(lambda: client.over)
        return client.where

    everybody = [host.node.id for host in site.prefills]
    registry = site.d.node.registry
    await site.until(lambda: all(registry.get(node) for node in everybody))
    site.d.engine.states = cut_off("p1")
    assert await where() == "remote; node=p2; reason=always"
    site.d.engine.states = cut_off(*everybody)
    assert await where() == "local; node=d; reason=no_way"
    (again, *_) = cut_off("p1")
    site.d.engine.states = [replace(again, down=""), *cut_off(*everybody[1:])]
    assert await where() == "remote; node=p1; reason=always", "it is tried again"


@on_site()
async def test_a_vector_is_computed_where_it_was_asked_for(site: DisaggCluster) -> None:
    client = site.ask(request(pooling="mean"))
    await site.until(lambda: client.over)
    assert client.where == "local; node=d; reason=embedding"
    assert not site.queue.outcomes
    await site.quiet()


@on_site()
async def test_images_are_read_where_they_were_sent(site: DisaggCluster) -> None:
    """Also after a migration, whose source could send the KV."""
    source = str(site.prefills[0].node.id)
    first = site.ask(request(images=(b"a cat",)))
    again = site.ask(request("again", images=(b"a cat",), source=source, source_epoch=1))
    await site.until(lambda: first.over and again.over)
    assert first.where == again.where == "local; node=d; reason=images"
    assert not site.queue.outcomes
    await site.quiet()


@on_site()
async def test_choices_with_different_outputs_are_not_handed_over(site: DisaggCluster) -> None:
    client = site.ask(request(n=2, output=[[1], [1, 2]]))
    await site.until(lambda: client.over)
    assert client.where == "local; node=d; reason=migrated_choices"
    single = site.ask(request(output=[[1, 2]]))
    await site.until(lambda: single.over)
    assert single.where.startswith("remote")
    await site.quiet()


@on_site()
async def test_a_prompt_that_fits_no_message_stays_here(site: DisaggCluster) -> None:
    long = replace(request(), prompt=[70_000] * 1_100_000)
    client = site.ask(long)
    await site.until(lambda: client.over)
    assert client.where == "local; node=d; reason=too_long"
    assert site.d.decode.numbers().local == {"too_long": 1}
    small = site.ask(replace(request("s"), prompt=[7] * 500_000))
    await site.until(lambda: small.over)
    assert small.where.startswith("remote")
    await site.quiet()


@on_site()
async def test_a_ticket_that_cannot_be_sent_is_no_end_of_the_request(site: DisaggCluster) -> None:
    original = LinkCall.reply

    def reply(call: LinkCall, message: object) -> None:
        if isinstance(message, AttemptOpened):
            raise PayloadTooLarge("so many blocks")
        original(call, message)

    LinkCall.reply = reply  # type: ignore[assignment, method-assign]
    try:
        client = site.ask(request())
        await site.until(lambda: client.over, timeout=60.0)
        await site.quiet()
    finally:
        LinkCall.reply = original  # type: ignore[method-assign]
    assert client.where.startswith("local; node=d")
    assert client.tokens == {0: 3}


@on_site()
async def test_what_the_queue_refuses_is_prefilled_here(site: DisaggCluster) -> None:
    site.queue.refuses = "displaced"
    client = site.ask(request())
    await site.until(lambda: client.over)
    assert client.where == "local; node=d; reason=displaced"
    await site.quiet()


@on_site()
async def test_what_nobody_takes_is_prefilled_here(site: DisaggCluster) -> None:
    site.d.decode.chooser.mode = "rule"
    site.queue.keeps = True
    client = site.ask(request(prompt=600))
    took = await site.until(lambda: client.over)
    assert client.where == "local; node=d; reason=unclaimed"
    assert 1.0 < took < 2.0
    await site.quiet()


@on_site()
async def test_the_deadline_bounds_patience(site: DisaggCluster) -> None:
    site.queue.keeps = True
    client = site.ask(request(deadline=1.5))
    await site.until(lambda: client.over)
    assert client.where == "local; node=d; reason=unclaimed"
    await site.quiet()


# ---------------------------------------------------------------- when a prefill worker fails


@pytest.mark.parametrize("step", ["open", "activate", "prefill", "send"])
def test_what_fails_once_is_done_by_another(step):
    async def test(site: DisaggCluster) -> None:
        for host in (site.d, site.p):
            host.script.steps[step] = ["fail"]
        client = site.ask(request())
        await site.until(lambda: client.over)
        assert client.where == "remote; node=p2; reason=always"
        assert client.tokens == {0: 3}
        await site.quiet()
        ended = site.d.decode.numbers().ended
        assert ended == {"failed" if step in ("prefill", "send") else "lost": 1, "done": 1}

    play(test, prefills=2)


@pytest.mark.parametrize("step", ["open", "activate", "prefill", "send"])
def test_what_always_fails_is_prefilled_here(step):
    async def test(site: DisaggCluster) -> None:
        for host in (site.d, *site.prefills):
            host.script.steps[step] = ["fail"] * (MAX_PREFILL_ATTEMPTS if host is site.d else 1)
        client = site.ask(request())
        await site.until(lambda: client.over)
        assert client.where == "local; node=d; reason=attempts_failed"
        await site.quiet()
        assert sum(site.d.decode.numbers().ended.values()) == MAX_PREFILL_ATTEMPTS

    play(test, prefills=4)


@pytest.mark.parametrize("state", AT_WORK)
@pytest.mark.parametrize("prefills", [1, 2])
def test_a_prefill_worker_dies(state, prefills):
    async def test(site: DisaggCluster) -> None:
        site.d.decode.chooser = DisaggPolicy("rule", min_tokens=10)
        client = await in_state(site, state)
        site.p.kill()
        heal(site)
        await site.until(lambda: client.over, timeout=60.0)
        if prefills == 2:
            assert client.where == "remote; node=p2; reason=rule"
        else:
            assert client.where.startswith("local; node=d")
        assert client.tokens == {0: 3}
        await site.quiet()

    play(test, prefills=prefills)


@pytest.mark.parametrize("state", AT_WORK)
def test_a_prefill_worker_stands_still_and_comes_back(state):
    async def test(site: DisaggCluster) -> None:
        client = await in_state(site, state)
        site.p.freeze()
        heal(site)
        took = await site.until(lambda: client.over, timeout=60.0)
        assert client.where == "remote; node=p2; reason=always"
        assert took < LEASE_SECONDS + 2.0
        site.p.thaw()
        await site.quiet()
        assert client.tokens == {0: 3}
        after = site.ask(request("after"))
        await site.until(lambda: after.over)
        await site.quiet()

    play(test, prefills=2)


@on_site(prefills=2)
async def test_a_silent_worker_is_passed_over_for_another_claim(site: DisaggCluster) -> None:
    client = await in_state(site, "fill")
    entry_claim = site.queue.claims[0]
    site.net.partition("d", "p1")
    heal(site)
    site.d.script.steps.clear()
    await site.until(lambda: site.loop.time() > 0 and site.state(client) == "fill")
    await asyncio.sleep(3.0)
    remote = site.d.decode._remote[client.handle]
    assert remote.state.value == "fill"
    from tests.worker.disagg.cluster import Entry, PlayedClaim

    entry = Entry(site.d, site.d.node.epoch, entry_claim.item, remote, site.queue.owner)
    claim = PlayedClaim(site.queue, site.prefills[1], entry, 99)
    site.queue.claims.append(claim)
    site.prefills[1].call_later(0.0, lambda: site.prefills[1].take(claim))
    await site.until(lambda: client.over)
    assert client.where == "remote; node=p2; reason=always"
    assert site.d.decode.numbers().ended == {"superseded": 1, "done": 1}
    site.net.heal()
    await site.quiet(15.0)


@on_site(prefills=2)
async def test_two_workers_claim_one_item(site: DisaggCluster) -> None:
    site.queue.doubles = True
    clients = [site.ask(request(f"r{i}")) for i in range(5)]
    await site.until(lambda: all(client.over for client in clients))
    assert all(client.where.startswith("remote") for client in clients)
    await site.quiet()
    assert site.queue.outcomes == {"done": 5, "refused": 5}


# ---------------------------------------------------------------- when it is not wanted any more


@pytest.mark.parametrize("state", ON_THE_WAY)
def test_a_request_is_cancelled(state):
    async def test(site: DisaggCluster) -> None:
        client = await in_state(site, state)
        site.cancel(client)
        await site.until(lambda: client.cancelled)
        assert await site.quiet() <= SOON

    play(test)


@pytest.mark.parametrize("state", ON_THE_WAY)
def test_its_deadline_passes(state):
    async def test(site: DisaggCluster) -> None:
        site.d.decode.chooser = DisaggPolicy("rule", min_tokens=10)
        site.d.decode.chooser.learnt.there.base = 0.0
        client = await in_state(site, state, deadline=2.0 if state != "admit" else 0.5)
        if state in ("admit", "queue"):  # patience ends earlier, and the prefill here hangs
            site.d.script.steps["prefill"] = ["hang"]
        await site.until(lambda: client.over)
        assert client.outcome == "DeadlineExceeded"
        assert client.error is not None
        assert "deadline passed" in client.error.message
        assert await site.quiet() <= SOON

    play(test)


@pytest.mark.parametrize("state", ON_THE_WAY)
def test_its_engine_dies(state):
    async def test(site: DisaggCluster) -> None:
        client = await in_state(site, state)
        site.d.call_later(0.0, site.d.engine.die)
        await site.until(lambda: client.over)
        assert client.outcome == "EngineDied"
        assert await site.quiet() <= SOON

    play(test)


@pytest.mark.parametrize("state", [*AT_WORK, "queue"])
def test_its_decode_worker_dies(state):
    async def test(site: DisaggCluster) -> None:
        await in_state(site, state)
        site.d.kill()
        site.clients.clear()
        await site.quiet(LEASE_SECONDS + 1.0)

    play(test)


@pytest.mark.parametrize("state", AT_WORK)
def test_its_decode_worker_comes_back_as_another(state):
    """Requests have the same numbers again, and the old attempts are none of theirs."""

    async def test(site: DisaggCluster) -> None:
        await in_state(site, state)
        site.d.kill()
        site.clients.clear()
        heal(site)
        site.d.start()
        await site.until(site.converged, timeout=90.0)
        client = site.ask(request("again"))
        await site.until(lambda: client.over)
        assert client.where == "remote; node=p1; reason=always"
        await site.quiet()

    play(test)


# ---------------------------------------------------------------- what gets lost on the way


@pytest.mark.parametrize("state", AT_WORK)
def test_a_link_breaks(state):
    async def test(site: DisaggCluster) -> None:
        client = await in_state(site, state)
        remote = site.d.decode._remote[client.handle]
        site.net.reset("d", "p1")
        if state == "attempt":  # it asks once more, and is answered
            holder = remote.fence.holder
            assert holder is not None
            await site.until(lambda: len(remote._callers) > 1)
            attempt = holder.attempt
            ticket = _ticket_of(site, client, attempt)
            site.d.call_later(0.0, lambda: remote.on_opened(attempt, ticket))
        elif state == "fill":
            site.p.call_later(0.0, lambda: _finish(site))
        else:
            site.p.call_later(0.0, lambda: _send(site))
        await site.until(lambda: client.over)
        assert client.where == "remote; node=p1; reason=always"
        assert site.d.decode.numbers().ended == {"done": 1}
        await site.quiet()

    play(test)


def _ticket_of(site: DisaggCluster, client: Client, attempt: int) -> TransferTicket:
    from tests.worker.disagg.cluster import _ticket

    return _ticket(client.handle, attempt, client.request)


def _finish(site: DisaggCluster) -> None:
    """The engine comes to itself."""
    from tests.worker.disagg.cluster import _handoff

    for handle, prompt in tuple(site.p.engine.prompts.items()):
        site.p.engine._send(handle, prompt)
        prompt.sink.on_prefilled(_handoff(prompt.request))


def _send(site: DisaggCluster) -> None:
    for handle, prompt in tuple(site.p.engine.prompts.items()):
        site.p.engine._send(handle, prompt)


@pytest.mark.parametrize("lasts", [1.0, 4.0])
def test_nothing_gets_through_for_less_than_a_lease(lasts):
    async def test(site: DisaggCluster) -> None:
        client = await in_state(site, "fill")
        site.net.partition("d", "p1")
        await asyncio.sleep(lasts)
        site.net.heal()
        site.p.call_later(0.0, lambda: _finish(site))
        await site.until(lambda: client.over)
        assert client.where == "remote; node=p1; reason=always"
        assert site.d.decode.numbers().ended == {"done": 1}
        await site.quiet()

    play(test)


@on_site()
async def test_nothing_gets_through_for_longer(site: DisaggCluster) -> None:
    site.d.decode.chooser = DisaggPolicy("rule", min_tokens=10)
    client = await in_state(site, "fill")
    heal(site)
    site.net.partition("d", "p1")
    took = await site.until(lambda: client.over)
    assert client.where.startswith("local; node=d")
    assert LEASE_SECONDS - 1.1 < took < LEASE_SECONDS + 3.0
    await site.quiet()  # the other side, too, though it hears nothing
    site.net.heal()


# ---------------------------------------------------------------- the queue's owner


@on_site()
async def test_the_queue_gets_another_owner(site: DisaggCluster) -> None:
    site.queue.keeps = True
    clients = [site.ask(request(f"r{i}")) for i in range(3)]
    for client in clients:
        await site.reaches(client, "queue")
    site.queue.keeps = False
    site.queue.change_owner()
    await site.until(lambda: all(client.over for client in clients))
    assert all(client.where.startswith("remote") for client in clients)
    await site.quiet()


@on_site()
async def test_a_claim_of_the_former_owner_is_void(site: DisaggCluster) -> None:
    site.queue.delay = 0.5
    client = site.ask(request())
    await site.reaches(client, "queue")
    site.queue.change_owner()
    await site.until(lambda: client.over)
    assert client.where == "remote; node=p1; reason=always"
    await site.quiet()
    assert site.queue.outcomes == {"refused": 1, "done": 1}


@pytest.mark.parametrize("state", AT_WORK)
def test_an_open_attempt_outlives_its_queue(state):
    async def test(site: DisaggCluster) -> None:
        client = await in_state(site, state)
        site.queue.change_owner()
        if state == "attempt":
            heal(site)
        elif state == "fill":
            site.p.call_later(0.0, lambda: _finish(site))
        else:
            site.p.call_later(0.0, lambda: _send(site))
        await site.until(lambda: client.over, timeout=60.0)
        assert client.tokens == {0: 3}
        await site.quiet()

    play(test)


# ---------------------------------------------------------------- its own life


@pytest.mark.parametrize("state", ["queue", *AT_WORK])
def test_the_decode_worker_is_held_for_dead_and_begins_another_life(state):
    async def test(site: DisaggCluster) -> None:
        client = await in_state(site, state)
        heal(site)
        site.net.pause("d")
        epoch = site.d.node.epoch
        await asyncio.sleep(60.0)
        site.net.resume("d")
        await site.until(lambda: site.d.node.epoch != epoch or client.over, timeout=120.0)
        await site.until(lambda: client.over, timeout=60.0)
        assert client.where.startswith("local; node=d")
        await site.quiet()

    play(test)


# ---------------------------------------------------------------- what the prefill worker says


@on_site()
async def test_a_handoff_that_fits_no_message_is_given_up_at_once(site: DisaggCluster) -> None:
    client = await in_state(site, "fill")
    heal(site)
    calls = []

    async def request_(link: Any, method: Any, message: Any, **fields: Any) -> Any:
        if method is NOTIFY:
            calls.append(message)
            raise PayloadTooLarge("so many logprobs")
        return await original(link, method, message, **fields)

    original = PeerLink.request
    PeerLink.request = request_  # type: ignore[assignment, method-assign]
    try:
        site.d.decode.chooser.mode = "rule"
        site.p.call_later(0.0, lambda: _finish(site))
        await site.until(lambda: client.over)
    finally:
        PeerLink.request = original  # type: ignore[method-assign]
    assert len(calls) == 1
    assert client.where.startswith("local")
    await site.quiet()
    assert site.d.decode.numbers().ended == {"failed": 1}
