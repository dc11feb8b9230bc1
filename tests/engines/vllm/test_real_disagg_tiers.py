"""Prefill and decode apart with the real vLLM and tiers.

The prefill worker pulls a prefix that another worker has instead of computing it; the decode
worker loads what its own tiers have, and the rest is sent. Counters at the receiver say so, and
answers are those of an engine that had nothing cached.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.engine_core.staged_kv.port import HeldFrames
from pdserve.messages.engine import (
    ClearCache,
    KvPullAnswer,
    KvPullEnded,
    KvPullOpened,
    KvPullServed,
    ServeKvPull,
    StopKvPull,
)
from pdserve.messages.tiers import CachedSource, KvSource
from pdserve.testing.fake_mover import FakeNet
from tests.engines.vllm import real, real_pair
from tests.engines.vllm.real_pair import BLOCK, D, P, RealPair, asked
from tests.engines.vllm.real_tiers import Everything, host

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve.messages.engine import EngineSpec, Event
    from pdserve.messages.request import FirstTokenStats, GenerateRequest
    from pdserve.messages.tiers import TierSpec
    from pdserve.testing.output_checker import OutputChecker

real.require_vllm()
pytestmark = real.MARKS
engines_of_this_file = real.keeps(P, D)

LENGTH = 4 * BLOCK + 10
"""Tokens of a prompt of four full blocks, which its last token follows."""


class TieredPair(RealPair):
    """P pulls from D, whose node is `owner` to it."""

    ended: list[KvPullEnded]

    def step_p(self) -> list[Event]:
        events = super().step_p()
        for event in events:
            match event:
                case KvPullOpened():
                    self.d.core.handle(
                        ServeKvPull(
                            number=event.number,
                            node="p",
                            epoch=1,
                            hashes=event.hashes,
                            ticket=event.ticket,
                            timeout=event.timeout,
                        )
                    )
                case KvPullEnded():
                    self.ended.append(event)
                    self.d.core.handle(StopKvPull(event.number))
        self.p.core.tiers.lower.check()
        return events

    def step_d(self) -> list[Event]:
        events = super().step_d()
        for event in events:
            if isinstance(event, KvPullServed):
                self.p.core.handle(KvPullAnswer(event.number, event.grant))
        self.d.core.tiers.lower.check()
        return events

    def settled(self) -> None:
        """Nothing is held or under way, at either end."""
        for end in (self.p, self.d):
            counts = end.core.tiers.lower.host.counts()
            assert (counts.filling, counts.claimed, counts.leaving) == (0, 0, 0)
            assert end.core.tiers.holds.held == 0
            assert end.staging.pool.blocks.counts().used == 0

    def until_quiet(self) -> None:
        """Until reads and writes of the disk have ended, too."""
        deadline = time.monotonic() + 30.0
        while self.busy or self.p.core.wake_at() or self.d.core.wake_at() or self._writes:
            self.run()
            time.sleep(0.002)
            assert time.monotonic() < deadline, "the tiers do not come to rest"

    @property
    def _writes(self) -> bool:
        return any(each.blocks_filling for each in self.d.stats.tiers)

    def forget(self, end: Any) -> None:
        """Have vLLM lose what it has cached, as if it had evicted all of it."""
        self.until_quiet()
        assert end.core.engine.reset_prefix_cache()


def _end(net: FakeNet, spec: EngineSpec, tiers: TierSpec) -> Any:
    end = real_pair._end(net, msgspec.structs.replace(spec, tiers=tiers))
    end.core.tiers.loads.planner = Everything()
    # Looks at others' directories never end, and there is no other here.
    end.core.tiers.lower._tiers.shared = None
    return end


@pytest.fixture
def opened() -> Iterator[Any]:
    pairs: list[TieredPair] = []

    def make(d: TierSpec | None = None) -> TieredPair:
        net = FakeNet()
        pair = TieredPair(net, _end(net, P, host(60)), _end(net, D, d or host(60)))
        pair.ended = []
        pairs.append(pair)
        return pair

    yield make
    for pair in pairs:
        pair.settled()
        pair.close()


def cold(pair: TieredPair, request: GenerateRequest) -> list[list[int]]:
    """The answer of one engine, which has nothing cached on any tier."""
    tokens = pair.d.engine.generate([request])[0]
    pair.d.core.handle(ClearCache())
    pair.run()
    return tokens


def started(ledger: OutputChecker) -> FirstTokenStats:
    assert ledger.starts[0] is not None
    return ledger.starts[0]


def test_both_ends_say_that_they_fetch(opened: Any) -> None:
    pair = opened()
    for end in (pair.p, pair.d):
        found = end.engine.capabilities
        assert (found.transfers, found.fetches, found.tiers) == (("fake",), ("fake",), ("host",))


def test_the_prefill_worker_pulls_a_prefix_before_it_computes(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is D, which makes no use of the prefix itself here."""
    pair = opened()
    wanted = asked(LENGTH, kv_sources=(KvSource("owner", 1, 3, 3),))
    expected = cold(pair, asked(LENGTH))
    pair.d.engine.generate([asked(LENGTH, max_tokens=1)])
    pair.until_quiet()
    monkeypatch.setattr(pair.d.core, "cached_blocks", lambda request: 0)
    monkeypatch.setattr(pair.d.core, "hold_prefix", lambda request: [])
    monkeypatch.setattr(pair.d.core, "hold_frames", lambda *_: HeldFrames())
    before = pair.p.stats
    (ledger,) = pair.generate([wanted])
    after = pair.p.stats
    assert ledger.tokens == expected
    assert after.computed_tokens - before.computed_tokens == LENGTH - 3 * BLOCK
    assert (after.pulled_blocks, after.pulls, after.pulls_failed) == (3, 1, 0)
    assert pair.d.stats.served_blocks == 3
    assert pair.d.stats.received_blocks == 5
    (handoff,) = pair.handoffs.values()
    assert handoff.handoff.cached_tokens == 3 * BLOCK
    assert handoff.handoff.started.sources == (CachedSource("peer", 3 * BLOCK, "owner"),)
    assert [each.error for each in pair.ended] == [""]


def test_what_the_prefill_worker_evicted_comes_from_its_host(opened: Any) -> None:
    pair = opened()
    wanted = asked(LENGTH)
    expected = cold(pair, wanted)
    pair.p.engine.generate([asked(LENGTH, max_tokens=1)])
    pair.forget(pair.p)
    before = pair.p.stats.computed_tokens
    (ledger,) = pair.generate([wanted])
    assert ledger.tokens == expected
    assert pair.p.stats.computed_tokens - before == LENGTH - 4 * BLOCK
    (handoff,) = pair.handoffs.values()
    assert handoff.handoff.started.sources == (CachedSource("host", 4 * BLOCK),)


@pytest.mark.parametrize("on_device", [0, 1])
def test_the_decode_worker_loads_what_its_host_has(opened: Any, on_device: int) -> None:
    """P sends the rest alone, though it computes all of it."""
    pair = opened()
    wanted = asked(LENGTH)
    expected = cold(pair, wanted)
    pair.d.engine.generate([asked(LENGTH, max_tokens=1)])
    pair.forget(pair.d)
    if on_device:
        short = real.request(wanted.prompt[: BLOCK + 1], max_tokens=1, cache_scope="never")
        pair.d.engine.generate([short])
    before = pair.d.stats
    (ledger,) = pair.generate([wanted])
    after = pair.d.stats
    assert ledger.tokens == expected
    assert after.computed_tokens - before.computed_tokens == len(ledger.tokens[0])
    assert after.received_blocks - before.received_blocks == 1
    assert started(ledger).cached_tokens == 4 * BLOCK
    assert after.cached_tokens - before.cached_tokens == 4 * BLOCK
    assert after.received_tokens - before.received_tokens == LENGTH - 4 * BLOCK
    assert started(ledger).sources == (CachedSource("host", (4 - on_device) * BLOCK),)
    hits = after.tiers[0].hit_tokens - before.tiers[0].hit_tokens
    assert hits >= (4 - on_device) * BLOCK


def test_the_decode_worker_reads_its_disk_while_the_prompt_is_computed(
    opened: Any, tmp_path: Path
) -> None:
    spec = msgspec.structs.replace(host(60), disk_path=str(tmp_path), disk_bytes=64 << 20)
    pair = opened(d=msgspec.structs.replace(spec, disk_admission="all"))
    wanted = asked(LENGTH)
    expected = cold(pair, wanted)
    pair.d.engine.generate([asked(LENGTH, max_tokens=1)])
    pair.forget(pair.d)
    tiers, names = pair.d.core.tiers, pair.d.core._prefix_hashes(wanted)
    assert len(names) == 4
    assert all(name in tiers.lower.disk for name in names)
    for name in names[1:]:
        tiers.lower.host.drop(name)
    handle, ledger = pair.submit(wanted)
    pair.step_d()
    deadline = time.monotonic() + 30.0
    while not all(name in tiers.lower.host for name in names):
        pair.step_d()
        assert time.monotonic() < deadline, "nothing comes from disk"
    pair.open(handle)  # P claims the prompt
    pair.run()
    assert handle in pair.handoffs
    assert ledger.tokens == expected
    disk = CachedSource("disk", 3 * BLOCK)
    assert started(ledger).sources == (CachedSource("host", BLOCK), disk)
    assert pair.d.stats.received_blocks == 1


def test_what_came_from_a_peer_is_stored_when_it_is_evicted(opened: Any) -> None:
    """Blocks of prompts that P has computed go down as any others do."""
    pair = opened()
    wanted = asked(LENGTH)
    (ledger,) = pair.generate([wanted])
    pair.forget(pair.d)
    names = pair.d.core._prefix_hashes(wanted)
    assert all(name in pair.d.core.tiers.lower.host for name in names)
    before = pair.d.stats.computed_tokens
    assert pair.d.engine.generate([wanted])[0] == ledger.tokens
    assert pair.d.stats.computed_tokens - before == LENGTH - 4 * BLOCK + len(ledger.tokens[0]) - 1
