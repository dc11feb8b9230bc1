"""Blocks fetched from another core's pool: the same tokens, and nothing of it is computed."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.engine_core.kv_fetch.server import ServeLimits
from pdserve.messages.engine import SetHashSecret
from pdserve_engines.sim.core import SimCore
from pdserve_engines.sim.executor import SimExecutor
from tests.engine_core.kv_fetch.pair import (
    BLOCK,
    SPEC,
    FetchPair,
    fetch_pair,
    names_of,
    puller_of,
    server_of,
)
from tests.engine_core.kv_transfer.test_handoff import prompt_of, reference, request

if TYPE_CHECKING:
    from pdserve.messages.request import GenerateRequest
    from tests.support.disagg_pair import PairedCore


def known(both: FetchPair, length: int, seed: int = 0) -> list[int]:
    """A prompt that O has computed."""
    prompt = prompt_of(length, seed)
    both.generate(both.o, request(prompt, max_tokens=1))
    both.run()
    return prompt


def check_reused(both: FetchPair, wanted: GenerateRequest, cached: int) -> None:
    """R answers rightly and has taken so many tokens from its cache."""
    before = both.r.stats
    assert both.generate(both.r, wanted) == reference(wanted)
    assert both.r.stats.cached_tokens - before.cached_tokens == cached


@pytest.mark.parametrize("length", [5, 9, 16, 31, 64])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_pulled_prefix_gives_the_same_tokens(length: int, first: int, seed: int):
    both = fetch_pair()
    prompt = known(both, length)
    full = (length - 1) // BLOCK
    first = min(first, full - 1)
    if first:
        both.generate(both.r, request(prompt[: first * BLOCK], max_tokens=1))
    one = both.pull(prompt[: full * BLOCK], first=first)
    both.run(Random(seed))
    assert one.ended == (full - first, "")
    assert not one.fences
    check_reused(both, request(prompt), full * BLOCK)
    both.run()
    both.check_idle()
    stats, sent = both.r.stats, both.o.stats
    assert (stats.pulls, stats.pulls_failed) == (1, 0)
    assert stats.pulled_blocks == sent.served_blocks == full - first
    assert stats.pulled_bytes == sent.served_bytes == both.net.bytes_applied
    both.close()


def test_many_pulls_at_once_share_the_connector(seed: int):
    both = fetch_pair(o={"options": {"blocks": "200", "layers": "8"}})
    server_of(both.o)._limits = small_parts(both)
    prompts = [known(both, 17, seed=number) for number in range(6)]
    for prompt in prompts:
        both.pull(prompt[:16])
    both.run(Random(seed))
    assert [one.ended for one in both.wanted] == [(4, "")] * 6
    assert {grant.parts for grant in both.grants} == {4}
    for prompt in prompts:
        check_reused(both, request(prompt), 16)
    both.run()
    both.check_idle()
    both.close()


def small_parts(both: FetchPair) -> ServeLimits:
    block = both.o.engine.capabilities.block_bytes
    return ServeLimits(part=block, in_flight=2 * block, in_flight_busy=block, share=0.5)


def test_what_is_absorbed_is_cached_and_announced(seed: int):
    both = fetch_pair(r={"options": {"blocks": "100", "layers": "8"}})
    prompt = known(both, 29)
    both.generate(both.r, request(prompt[:8], max_tokens=1))
    stored = len(both.r.engine.kv_events)
    both.absorb(prompt[:28])
    both.run(Random(seed))
    (result,) = both.absorbed
    assert (result.blocks, result.pulled, result.error) == (7, 5, "")
    new = [
        name for event in both.r.engine.kv_events[stored:] for name in getattr(event, "hashes", ())
    ]
    assert new == names_of(both.r, prompt)[2:]
    check_reused(both, request(prompt), 28)
    both.absorb(prompt[:28])
    both.run()
    assert (both.absorbed[1].blocks, both.absorbed[1].pulled) == (7, 0)
    both.check_idle()
    both.close()


def test_an_order_that_finds_little_room_brings_its_leading_blocks():
    both = fetch_pair()
    prompt = known(both, 61)
    both.absorb(prompt[:60])
    both.absorb(prompt[:60])
    both.run()
    assert [(one.pulled, one.error) for one in both.absorbed] == [(0, "busy"), (10, "busy")]
    both.absorb(prompt[:60])
    both.run()
    assert both.absorbed[2].blocks == 15
    check_reused(both, request(prompt), 60)
    both.close()


def test_an_order_without_the_blocks_before_it_is_refused():
    both = fetch_pair()
    prompt = known(both, 29)
    both.absorb(prompt[:28], first=2)
    both.run()
    assert [(one.blocks, one.error) for one in both.absorbed] == [(0, "misfit")]
    both.close()


def test_orders_end_when_the_hashes_change():
    both = fetch_pair()
    prompt = known(both, 29)
    both.absorb(prompt[:28])
    both.step_r()
    both.r.core.handle(SetHashSecret(b"another"))
    both.run()
    assert [(one.pulled, one.error) for one in both.absorbed] == [(0, "cancelled")]
    assert both.r.core.pool.counts().cached == 0
    both.check_idle()
    both.close()


def test_sim_cores_fetch_during_their_steps(seed: int):
    """In simulated time, with content: wrong bytes would change the tokens."""
    both = sim_pair()
    prompt = prompt_of(41, seed=9)
    wanted = request(prompt, max_tokens=12)
    alone = sim_generate(both, both.o, wanted)
    other = both.r.engine.submit(request(prompt_of(30, seed=3), max_tokens=40))
    one = both.pull(prompt[:40])
    rng = Random(seed)
    for _ in range(2_000):
        both.turn(rng)
        sim_sleep(both)
        if one.ended is not None and other.done:
            break
    assert one.ended == (10, "")
    before = both.r.stats.cached_tokens
    assert sim_generate(both, both.r, wanted) == alone
    assert both.r.stats.cached_tokens - before == 40
    both.close()


def sim_pair() -> FetchPair:
    spec = msgspec.structs.replace(
        SPEC,
        engine="sim",
        options={"vocab": "300", "blocks": "80", "max_len": "200", "content": "on"},
    )
    return fetch_pair(spec, executor=SimExecutor, core=SimExecutor.make_core)


def sim_sleep(both: FetchPair) -> None:
    """Let steps end that are under way."""
    for end in (both.r, both.o):
        assert isinstance(end.core, SimCore)
        if end.core._flight is not None:
            end.sleep()


def sim_generate(both: FetchPair, end: PairedCore, wanted: GenerateRequest) -> list[list[int]]:
    ledger = end.engine.submit(wanted)
    for _ in range(2_000):
        both.turn()
        sim_sleep(both)
        if ledger.done:
            return ledger.tokens
    raise AssertionError("no end")


def test_an_idle_core_sends_more_at_once_than_a_busy_one():
    both = fetch_pair()
    server_of(both.o)._limits = small_parts(both)
    prompt = known(both, 41)
    both.pull(prompt[:40])
    both.step_r()
    both.net.run()
    both.step_r()
    both.net.run()
    both.step_o()
    block = both.o.engine.capabilities.block_bytes
    assert server_of(both.o)._in_flight == 2 * block
    both.o.engine.submit(request(prompt_of(9, seed=8), max_tokens=30))
    while both.o.core.scheduler.has_work:
        both.turn()
        assert server_of(both.o)._in_flight <= 2 * block
    both.run()
    assert both.wanted[0].ended == (10, "")
    assert puller_of(both.r).pulled_blocks == 10
    both.close()
