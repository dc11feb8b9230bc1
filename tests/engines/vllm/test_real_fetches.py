"""A prefix that one real vLLM has comes to another one, by host frames of both.

The test plays the nodes: it carries questions and answers, and bytes move when it says so. vLLM's
own counters say what was computed; answers are those of an engine that had nothing cached.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.messages.engine import (
    ClearCache,
    KvPullAnswer,
    KvPullEnded,
    KvPullOpened,
    KvPullServed,
    PeerGone,
    ServeKvPull,
    StopKvPull,
    TransferSpec,
)
from pdserve.messages.tiers import CachedSource, KvSource
from pdserve.testing.fake_mover import FakeMover, FakeNet
from tests.engines.vllm import real
from tests.engines.vllm.real_pair import D, P
from tests.engines.vllm.real_tiers import BLOCK, FULL, PROMPT, Tiered, cached, host, sources

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.tiers import TierSpec
    from pdserve.testing.output_checker import OutputChecker

real.require_vllm()
pytestmark = real.MARKS
engines_of_this_file = real.keeps(P, D)

OWNER = KvSource("owner", 1, 5, 0)


def aggregated(spec: EngineSpec) -> EngineSpec:
    """The spec of a worker that hands no prompts over."""
    return msgspec.structs.replace(spec, transfer=TransferSpec(verify="all", optional=True))


class Pair:
    """`asker` fetches from `owner`."""

    def __init__(self, asker: TierSpec, owner: TierSpec) -> None:
        self.net = FakeNet()
        self.asker = Tiered(asker, aggregated(P), FakeMover(self.net))
        self.owner = Tiered(owner, aggregated(D), FakeMover(self.net))
        self.ended: list[KvPullEnded] = []
        self.expected: list[list[int]] = []
        """The asker's answer to the prompt."""
        self.silent = False
        """The owner gets no questions."""

    def turn(self) -> None:
        for event in self.asker.step() if self.asker.core.has_work else ():
            match event:
                case KvPullOpened() if not self.silent:
                    self.owner.core.handle(
                        ServeKvPull(
                            number=event.number,
                            node="asker",
                            epoch=1,
                            hashes=event.hashes,
                            ticket=event.ticket,
                            timeout=event.timeout,
                        )
                    )
                case KvPullEnded():
                    self.ended.append(event)
                    self.owner.core.handle(StopKvPull(event.number))
        for event in self.owner.step() if self.owner.core.has_work else ():
            if isinstance(event, KvPullServed):
                self.asker.core.handle(KvPullAnswer(event.number, event.grant))
        self.net.step()

    def run(self) -> None:
        until = time.monotonic() + 60.0
        while self.asker.active or self.owner.active or self.net.under_way:
            self.turn()
            assert time.monotonic() < until, "the two make no progress"

    def ask(self, **changes: Any) -> OutputChecker:
        """Ask the asker, which knows that the owner has the prompt."""
        ledger = self.begin(**changes)
        self.run()
        assert ledger.error is None, ledger.error
        return ledger

    def begin(self, **changes: Any) -> OutputChecker:
        fields: dict[str, Any] = {"max_tokens": 4, "kv_sources": (OWNER,)} | changes
        return self.asker.inline.submit(real.request(PROMPT, **fields))

    def settled(self) -> None:
        """Nothing is held, at either end."""
        for end in (self.asker, self.owner):
            counts = end.tiers.lower.host.counts()
            assert (counts.filling, counts.claimed, counts.leaving) == (0, 0, 0)
            assert end.stats.blocks_used == 0

    def close(self) -> None:
        for end in (self.asker, self.owner):
            end.close()


@pytest.fixture
def opened() -> Iterator[Any]:
    pairs: list[Pair] = []

    def make(asker: TierSpec | None = None, owner: TierSpec | None = None) -> Pair:
        pairs.append(Pair(asker or host(60), owner or host(60)))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def reference(pair: Pair) -> list[list[int]]:
    """The asker's answer with nothing cached."""
    tokens = pair.asker.ask(PROMPT).tokens
    pair.asker.core.handle(ClearCache())
    pair.run()
    return tokens


def there(pair: Pair) -> None:
    """The owner has the prompt, and the asker knows its answer."""
    pair.expected = reference(pair)
    pair.owner.ask(PROMPT)


def test_a_prefix_of_another_worker_is_fetched(opened: Any) -> None:
    pair = opened()
    assert pair.asker.inline.capabilities.fetches == ("fake",)
    assert pair.asker.inline.capabilities.transfers == ()
    there(pair)
    before = pair.asker.stats
    ledger = pair.ask()
    after = pair.asker.stats
    assert ledger.tokens == pair.expected
    assert sources(ledger) == (CachedSource("peer", 5 * BLOCK, "owner"),)
    assert cached(ledger) == 5 * BLOCK
    computed = after.computed_tokens - before.computed_tokens
    assert computed == FULL - 5 * BLOCK + len(ledger.tokens[0]) - 1
    assert (after.pulled_blocks, after.pulls, after.pulls_failed) == (5, 1, 0)
    assert pair.owner.stats.served_blocks == 5
    measured = {lane.lane for lane in after.lanes if lane.bandwidth or lane.latency}
    assert measured >= {"fetch", "h2d"}
    pair.settled()
    pair.asker.forget()
    assert sources(pair.ask()) == (CachedSource("host", 5 * BLOCK),)
    assert pair.asker.stats.pulls == 1


def test_the_owner_serves_from_its_device_and_its_disk(opened: Any, tmp_path: Path) -> None:
    """Of five blocks, its host has one, its disk another, its device the rest."""
    spec = msgspec.structs.replace(host(60), disk_path=str(tmp_path), disk_bytes=64 << 20)
    pair = opened(owner=msgspec.structs.replace(spec, disk_admission="all"))
    there(pair)
    pair.run()
    tiers = pair.owner.tiers
    names = pair.owner.core.names.chain(PROMPT, pair.owner.core.names.salt("", ""))[:5]
    assert all(name in tiers.lower.disk for name in names)
    for name in names[1:]:
        tiers.lower.host.drop(name)
    tiers.view._places.pop(names[1])
    ledger = pair.ask()
    assert ledger.tokens == pair.expected
    assert sources(ledger) == (CachedSource("peer", 5 * BLOCK, "owner"),)
    assert pair.owner.stats.tiers[1].read_bytes == tiers.lower._tiers.block_bytes
    pair.settled()


def test_two_requests_for_one_prefix_pull_it_once(opened: Any) -> None:
    pair = opened()
    there(pair)
    ledgers = [pair.begin(), pair.begin()]
    pair.run()
    assert [ledger.tokens for ledger in ledgers] == [pair.expected] * 2
    assert pair.asker.stats.pulled_blocks == 5
    pair.settled()


def test_a_flipped_byte_is_a_miss(opened: Any) -> None:
    pair = opened()
    there(pair)
    pair.net.faults.append("corrupt")
    ledger = pair.ask()
    assert ledger.tokens == pair.expected
    assert pair.net.counts["corrupted"] == 1
    assert [each.error for each in pair.ended] == ["corrupt"]
    pair.settled()


@pytest.mark.parametrize("how", ["late", "gone", "aborted", "cleared"])
def test_a_pull_that_does_not_come_costs_a_computation(opened: Any, how: str) -> None:
    """Its frames are in use until the owner cannot write to them any more."""
    pair = opened()
    there(pair)
    pair.silent = True
    if how == "late":
        pair.asker.tiers.loads.planner.deadline = 0.05
    ledger = pair.begin()
    while not pair.asker.stats.pulls or pair.net.under_way:
        pair.turn()
    assert pair.asker.tiers.lower.host.counts().filling == 5
    assert not ledger.done
    match how:
        case "gone":
            pair.asker.core.handle(PeerGone("owner", 1))
        case "aborted":
            pair.asker.inline.abort(ledger)
        case "cleared":
            pair.asker.core.handle(ClearCache())
    until = time.monotonic() + 30.0
    while not pair.net.under_way:
        pair.asker.step()
        assert time.monotonic() < until
    assert pair.asker.tiers.lower.host.counts().filling == 5, "the fence has not come"
    pair.run()
    if how != "aborted":
        assert ledger.tokens == pair.expected
        assert sources(ledger) == ()
    assert pair.asker.stats.pulls_failed == 1
    pair.settled()


def test_private_prompts_are_not_pulled(opened: Any) -> None:
    pair = opened()
    there(pair)
    assert pair.ask(cache_scope="never").tokens == pair.expected
    assert pair.asker.stats.pulls == 0
