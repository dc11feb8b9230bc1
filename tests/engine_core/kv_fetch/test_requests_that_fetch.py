"""Requests whose prefix another core has: the same tokens, whatever becomes of the fetch.

The scheduler, the onboarder and the puller work together here; `FetchPair` plays the nodes.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.messages.engine import PeerGone
from pdserve.messages.kv_pull import KvPullGrant
from pdserve.messages.tiers import CachedSource, KvSource, TierSpec
from tests.engine_core.kv_fetch.pair import BLOCK, FetchPair, evict, fetch_pair, server_of
from tests.engine_core.kv_fetch.test_fetches import known, small_parts
from tests.engine_core.kv_transfer.test_handoff import VARIANTS, reference, request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.request import GenerateRequest
    from pdserve.testing.output_checker import OutputChecker

ALWAYS = TierSpec(fetch="always")


def pair(**changes: Any) -> FetchPair:
    return fetch_pair(r={"tiers": ALWAYS} | changes)


def fetching(prompt: Sequence[int], **changes: Any) -> GenerateRequest:
    """A request for which a router has named O."""
    source = KvSource("p", 1, len(prompt) // BLOCK, len(prompt) // BLOCK)
    return replace(request(prompt, **changes), kv_sources=(source,))


def answered(both: FetchPair, wanted: GenerateRequest, rng: Random | None = None) -> OutputChecker:
    """Run a request at R; its tokens are the right ones."""
    ledger = both.r.engine.submit(wanted)
    for _ in range(5_000):
        if ledger.done:
            break
        both.turn(rng)
        if not both.busy:
            both.sleep(0.5)
    assert ledger.error is None
    assert ledger.tokens == reference(replace(wanted, kv_sources=()))
    return ledger


def end(both: FetchPair) -> None:
    for _ in range(2):
        both.run()
        both.sleep(20.0)
    both.run()
    both.check_idle()
    both.close()


@pytest.mark.parametrize("length", [4, 5, 8, 9, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("batch", [6, 2048])
def test_a_fetched_prefix_gives_the_same_tokens(length: int, batch: int, seed: int):
    both = pair(max_batch_tokens=batch, max_sequences=4)
    prompt = known(both, length)
    ledger = answered(both, fetching(prompt), Random(seed))
    blocks = (length - 1) // BLOCK
    assert both.r.stats.pulled_blocks == blocks
    assert both.r.stats.cached_tokens == blocks * BLOCK
    (started,) = ledger.starts
    assert started is not None
    wanted = (CachedSource("peer", blocks * BLOCK, "p"),) if blocks else ()
    assert started.sources == wanted
    end(both)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_request_gives_the_same_tokens(name: str, seed: int):
    both = pair(max_batch_tokens=7, max_sequences=7)
    prompt = known(both, 22, seed=4)
    answered(both, fetching(prompt, **VARIANTS[name]), Random(seed))
    # A prompt whose log probabilities are wanted is computed.
    assert both.r.stats.pulled_blocks == (0 if "prompt logprobs" in name else 5)
    end(both)


@pytest.mark.parametrize("have", [1, 3, 6])
def test_only_what_is_missing_is_fetched(have: int):
    both = pair()
    prompt = known(both, 33)
    both.generate(both.r, request(prompt[: have * BLOCK], max_tokens=1))
    answered(both, fetching(prompt))
    assert both.r.stats.pulled_blocks == 8 - have
    end(both)


def test_requests_with_one_prefix_share_a_fetch(seed: int):
    both = pair()
    prompt = known(both, 33)
    wanted = [fetching(prompt), fetching(prompt[:30]), fetching([*prompt, 9, 9])]
    ledgers = [both.r.engine.submit(one) for one in wanted]
    rng = Random(seed)
    while not all(ledger.done for ledger in ledgers):
        both.turn(rng)
    for one, ledger in zip(wanted, ledgers, strict=True):
        assert ledger.tokens == reference(replace(one, kv_sources=()))
    assert both.r.stats.pulls == 1
    assert both.r.stats.pulled_blocks == 8
    end(both)


@pytest.mark.parametrize("fault", ["lost", "late", "corrupt"])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_fetch_that_fails_is_a_miss(fault: str, place: int, seed: int):
    both = pair()
    server_of(both.o)._limits = small_parts(both)
    prompt = known(both, 33)
    both.net.faults = [""] * place + [fault]
    answered(both, fetching(prompt), Random(seed))
    assert both.r.stats.pulls_failed == 1
    why = "corrupt" if fault == "corrupt" else "gone"
    assert both.r.stats.missed_blocks.keys() == {why, "computed"}
    end(both)


@pytest.mark.parametrize("left", [0, 3])
def test_what_the_owner_has_lost_is_computed(left: int):
    both = pair()
    prompt = known(both, 33)
    evict(both.o, 8 - left)
    answered(both, fetching(prompt))
    assert both.r.stats.missed_blocks == {"absent": 8 - left, "computed": 0}
    (plans,) = both.r.stats.plans
    assert (plans.source, plans.plans) == ("peer", 1)
    assert both.r.stats.pulled_blocks == left
    end(both)


def test_an_owner_that_never_answers_costs_the_deadline():
    both = pair()
    prompt = known(both, 33)
    both.lose_answers = True
    answered(both, fetching(prompt))
    assert both.r.stats.pulled_blocks == 0
    end(both)


@pytest.mark.parametrize("reason", ["busy", "gone", "epoch", "misfit", "unready"])
def test_an_owner_that_refuses_is_a_miss(reason: str):
    both = pair()
    prompt = known(both, 33)
    both.alter = lambda grant: KvPullGrant(refused=reason)
    answered(both, fetching(prompt))
    assert both.r.stats.pulls_failed == 1
    end(both)


@pytest.mark.parametrize("turns", range(1, 22, 3))
def test_a_request_can_be_aborted_while_it_fetches(turns: int):
    both = pair()
    server_of(both.o)._limits = small_parts(both)
    prompt = known(both, 33)
    ledger = both.r.engine.submit(fetching(prompt, max_tokens=30))
    for _ in range(turns):
        both.turn()
    both.r.engine.abort(ledger)
    both.run()
    answered(both, fetching(prompt))
    end(both)


def test_a_life_that_has_ended_is_not_asked():
    """A router names it still; only a later life of the node is asked."""
    both = pair()
    prompt = known(both, 33)
    both.die(both.o)
    both.run()
    answered(both, fetching(prompt))
    assert both.r.stats.pulls == 0
    onboarder = both.r.core._onboarder
    assert onboarder is not None
    assert onboarder._may_pull(KvSource("p", 2, 8))
    end(both)


@pytest.mark.parametrize("returns", [False, True])
def test_a_life_whose_engine_starts_again_is_asked_again(returns: bool):
    both = pair()
    both.r.core.handle(PeerGone("p", 1, returns=returns))
    both.run()
    onboarder = both.r.core._onboarder
    assert onboarder is not None
    assert onboarder._may_pull(KvSource("p", 1, 8)) == returns
    end(both)


@pytest.mark.parametrize("turns", range(1, 22, 3))
def test_the_owner_dies_while_a_request_waits(turns: int):
    both = pair()
    server_of(both.o)._limits = small_parts(both)
    prompt = known(both, 33)
    wanted = fetching(prompt)
    ledger = both.r.engine.submit(wanted)
    for _ in range(turns):
        both.turn()
    both.die(both.o)
    both.run()
    assert ledger.tokens == reference(replace(wanted, kv_sources=()))
    end(both)


def test_never_is_never():
    both = pair(tiers=TierSpec(fetch="never"))
    prompt = known(both, 33)
    answered(both, fetching(prompt))
    assert both.r.stats.pulls == 0
    end(both)


def test_a_full_pool_fetches_and_preempts(seed: int):
    """Many requests that fetch into a pool which is too small for all of them."""
    both = pair(options={"blocks": "30", "layers": "8"}, max_batch_tokens=16, max_sequences=8)
    prompts = [known(both, length, seed=length) for length in (17, 25, 33, 41)]
    rng = Random(seed)
    wanted = [fetching(rng.choice(prompts), max_tokens=rng.randint(1, 30)) for _ in range(12)]
    ledgers = [both.r.engine.submit(one) for one in wanted]
    for _ in range(20_000):
        if all(ledger.done for ledger in ledgers):
            break
        both.turn(rng)
        if not both.busy:
            both.sleep(0.5)
    for one, ledger in zip(wanted, ledgers, strict=True):
        assert ledger.tokens == reference(replace(one, kv_sources=()))
    assert both.r.stats.pulled_blocks
    end(both)


# ---------------------------------------------------------------------- copies that are not kept


def oldest(both: FetchPair) -> list[bytes]:
    """Hashes of R's blocks in the order of their eviction."""
    return [name for _, name in both.r.core.pool.oldest(1000)]


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("own", [1, 3])
def test_a_copy_too_many_is_evicted_first_unless_much_was_added_to_it(retain: bool, own: int):
    """`own`: blocks of the request's own, behind 12 that O has."""
    both = pair()
    answered(both, request(list(range(80, 80 + 3 * BLOCK))))
    both.run()
    before = oldest(both)
    prompt = known(both, 12 * BLOCK + 1)
    longer = [*prompt, *range(50, 50 + own * BLOCK)]
    source = KvSource("p", 1, 12, 12, retain)
    answered(both, replace(request(longer, max_tokens=1), kv_sources=(source,)))
    both.run()
    assert both.r.stats.pulled_blocks == 12
    after = oldest(both)
    assert set(before) < set(after)
    is_first = after[-len(before) :] == before
    assert is_first == (not retain and own == 1)
    end(both)
