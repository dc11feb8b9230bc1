"""Two torch engines with host and disk tiers, whose blocks lie where a test wants them.

A *layout* has a letter for each leading block of a prompt:

    D  on the device of the engine that is asked      P  at the other engine
    H  in its host memory                             .  nowhere: it is computed
    S  on its disk

D comes first, P last. Whatever lies where, the tokens are those of a third engine, which keeps
nothing, and the counters say that each block came from its place and nothing else was computed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.tiers.onboarder import FetchPlan
from pdserve.kv.tiers.virtual_io import VirtualTierIo
from pdserve.messages.engine import ClearCache
from pdserve.messages.tiers import KvSource, TierSpec
from pdserve.testing.inline_engine import InlineEngine
from pdserve_engines.torch.executor import TorchExecutor
from tests.engine_core.kv_fetch.pair import FetchPair, evict, names_of
from tests.support.disagg_pair import DisaggPair, PairedCore, make_pair

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from random import Random

    from pdserve.kv.tiers.lower_tiers import LowerTiers
    from pdserve.messages.engine import EngineSpec, Event
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.tiers import SourceName
    from pdserve.testing.output_checker import OutputChecker

SOURCES: Mapping[str, SourceName] = {"H": "host", "S": "disk", "P": "peer"}


class FetchAll:
    """Fetches every block that lies anywhere, from here if it is here."""

    def choose(
        self,
        device: int,
        local: Sequence[SourceName],
        peers: Sequence[KvSource],
        blocks: int,
        wait: float,
        *,
        early: bool = False,
    ) -> FetchPlan:
        """As `FetchChooser.choose`."""
        rest = min(peers[0].blocks, blocks) - device - len(local) if peers else 0
        source = peers[0] if rest > 0 else None
        return FetchPlan(len(local), max(0, rest), source, deadline=5.0)


@dataclass(frozen=True)
class Counted:
    """What an engine has computed, and taken from elsewhere, in tokens."""

    computed: int
    cached: int
    host: int
    disk: int
    peer: int
    received: int

    def since(self, before: Counted) -> Counted:
        """What came after `before`."""
        return Counted(
            *(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__)
        )


def counted(end: PairedCore) -> Counted:
    """An engine's present counters."""
    stats, size = end.stats, end.core.pool.block_size
    host, disk = (tier.hit_tokens for tier in stats.tiers)
    return Counted(
        stats.computed_tokens,
        stats.cached_tokens,
        host,
        disk,
        stats.pulled_blocks * size,
        stats.received_tokens,
    )


@dataclass
class TieredPair(DisaggPair):
    """D has tiers and fetches from P. P may compute prompts for D."""

    cold: InlineEngine = field(kw_only=True)
    """Keeps nothing."""
    plain: GenerateRequest = field(kw_only=True)
    """A request for one token."""
    bitwise: bool = field(kw_only=True)
    """Whether probabilities do not depend on what is computed together."""
    pace: float = 0.0
    """Seconds that a turn takes; 0: copies end only when nothing is left to compute."""
    fetches: FetchPair = field(init=False)

    def __post_init__(self) -> None:
        self.fetches = FetchPair(self.d, self.p)
        for end in (self.d, self.p):
            assert end.core._onboarder is not None
            end.core._onboarder._planner = FetchAll()
            # Looks at others' directories never end, and there is no other here.
            lower_of(end)._tiers.shared = None

    # ------------------------------------------------------------------ both kinds of traffic

    def step_d(self) -> list[Event]:
        """Step D; both nodes take note."""
        events = super().step_d()
        self.fetches.note_r(events)
        return events

    def step_p(self) -> list[Event]:
        """Step P; both nodes take note."""
        events = super().step_p()
        self.fetches.note_o(events)
        return events

    def turn(self, rng: Random | None = None) -> None:
        """As ever; it takes `pace` seconds."""
        super().turn(rng)
        self._advance(self.pace)

    def run(self, rng: Random | None = None) -> None:
        """Take turns until nothing happens any more, also on lower tiers."""
        for _ in range(100_000):
            if not self.busy and not self._sleep():
                break
            self.turn(rng)
        else:
            raise AssertionError("the two make no progress")
        for end in (self.d, self.p):
            lower_of(end).check()

    def _sleep(self) -> bool:
        """Let time pass until something is due at either end. False: nothing ever is."""
        waits = [
            due - end.clock.now()
            for end in (self.d, self.p)
            if (due := end.core.wake_at()) is not None
        ]
        self._advance(max(0.0, min(waits, default=0.0)))
        return bool(waits)

    def _advance(self, seconds: float) -> None:
        for end in (self.d, self.p):
            end.clock.advance(seconds)

    def bring_up(self, handle: int) -> None:
        """Step D alone until it has admitted a request and has its blocks from below."""
        while handle not in self.admitted or self.d.core.wake_at() is not None:
            before = self.d.clock.now()
            self.step_d()
            self.d.sleep()
            self.p.clock.advance(self.d.clock.now() - before)

    # ------------------------------------------------------------------ places

    def forget(self) -> None:
        """No engine has any block."""
        self.run()
        for end in (self.d, self.p):
            end.core.handle(ClearCache())
        self.run()

    def place(self, tokens: Sequence[int], layout: str, end: PairedCore | None = None) -> None:
        """Have the leading blocks of these tokens where the layout says, for `end`, else D."""
        end = self.d if end is None else end
        size = end.core.pool.block_size
        layout = layout[: len(tokens) // size]
        here = layout.rstrip(".").rstrip("P")
        if here:
            self._compute(end, tokens[: len(here) * size])
            settle(end, names_of(end, tokens)[: len(here)], here)
        if "P" in layout:
            self._compute(self.p, tokens[: (layout.rindex("P") + 1) * size])

    def _compute(self, end: PairedCore, tokens: Sequence[int]) -> None:
        """Compute all of these tokens, and let what follows from it happen."""
        request = replace(self.plain, prompt=list(tokens))
        ledger = end.engine.submit(request)
        self.run()
        assert ledger.done

    # ------------------------------------------------------------------ answers

    def expected(self, wanted: GenerateRequest) -> tuple[OutputChecker, int]:
        """What the cold engine answers, and how many tokens it computes for that."""
        before = self._cold_computed
        ledger = self.cold.submit(replace(wanted, kv_sources=()))
        self.cold.run()
        assert ledger.error is None
        return ledger, self._cold_computed - before

    @property
    def _cold_computed(self) -> int:
        assert isinstance(self.cold.core, EngineCore)
        return self.cold.core.stats().computed_tokens

    def answer(self, wanted: GenerateRequest, rng: Random | None = None) -> OutputChecker:
        """Run a request at D to its end."""
        ledger = self.d.engine.submit(wanted)
        self.run(rng)
        assert ledger.error is None
        assert ledger.done
        return ledger

    def check(self, wanted: GenerateRequest, layout: str, rng: Random | None = None) -> None:
        """With its blocks where they are, D answers as if nothing were anywhere, and each block
        that can be used comes from its place."""
        cold, computed = self.expected(wanted)
        before = counted(self.d)
        ledger = self.answer(named(wanted, layout), rng)
        self.compare(ledger, cold)
        size = self.d.core.pool.block_size
        tokens = len(wanted.prompt) + len(wanted.output[0] if wanted.output else ())
        usable = layout.rstrip(".")[: (tokens - 1) // size]
        came = counted(self.d).since(before)
        by_source = Counter(usable)
        assert came == Counted(
            computed=computed - len(usable) * size,
            cached=min(len(usable) * size, len(wanted.prompt)),
            host=by_source["H"] * size,
            disk=by_source["S"] * size,
            peer=by_source["P"] * size,
            received=0,
        ), (layout, came)
        check_sources(ledger, usable, size)

    def compare(self, ledger: OutputChecker, cold: OutputChecker) -> None:
        """Both answers are the same."""
        assert ledger.error is None
        assert ledger.tokens == cold.tokens
        assert [one and one.reason for one in ledger.finishes] == [
            one and one.reason for one in cold.finishes
        ]
        if self.bitwise:
            assert ledger.logprobs == cold.logprobs

    def check_idle(self) -> None:
        """Nothing is held, here or there."""
        self.fetches.check_idle()
        for end in (self.d, self.p):
            counts = lower_of(end).host.counts()
            assert counts.claimed == counts.filling == counts.leaving == 0, counts

    def close(self) -> None:
        """Close the three engines: they hold nothing."""
        self.run()
        self.check_idle()
        super().close()
        assert self.cold.close() == 0


def check_sources(ledger: OutputChecker, usable: str, size: int) -> None:
    """The first token says from where the prompt came."""
    started = ledger.starts[0]
    assert started is not None
    told = Counter({source.source: source.tokens for source in started.sources})
    by_place = Counter(usable)
    assert told == {SOURCES[key]: by_place[key] * size for key in SOURCES if by_place[key]}
    assert all(source.node == "p" for source in started.sources if source.source == "peer")


def named(wanted: GenerateRequest, layout: str) -> GenerateRequest:
    """The request as a router passes it on, which knows what P has."""
    reach = layout.rindex("P") + 1 if "P" in layout else 0
    return replace(wanted, kv_sources=(KvSource("p", 1, reach),) if reach else ())


def lower_of(end: PairedCore) -> LowerTiers:
    """The tiers below an engine's device."""
    assert end.core._tiers is not None
    return end.core._tiers.lower


def settle(end: PairedCore, names: Sequence[bytes], layout: str) -> None:
    """Leave each of these blocks in its place alone. The device has them all and nothing else."""
    lower = lower_of(end)
    assert lower.disk is not None
    evict(end, len(layout) - layout.count("D"))
    for name, place in zip(names, layout, strict=True):
        assert name in lower.host, "it has not been stored"
        assert name in lower.disk, "it has not been written"
        assert (name in end.core.pool) is (place == "D")
        if place != "H":
            lower.host.drop(name)
        if place != "S":
            lower.disk.drop(name)
    end.step()


def tiered_pair(
    spec: EngineSpec, folder: Path, plain: GenerateRequest, **changes: Any
) -> TieredPair:
    """The two engines and the cold one. `changes` are D's; P is as `spec` says."""
    tiers = {
        name: TierSpec(
            host_bytes=1 << 20,
            disk_path=str(folder / name),
            disk_bytes=61 << 20,
            # The usual budget is a disk a day: the cases of a module share these engines.
            disk_write_budget=1 << 40,
            disk_owner=name,
            host_admission="all",
            disk_admission="all",
            fetch="always",
        )
        for name in ("d", "p")
    }
    for name in tiers:
        (folder / name).mkdir()
    pair = make_pair(
        TorchExecutor,
        spec,
        d={"tiers": tiers["d"]} | changes,
        p={"tiers": tiers["p"]},
        core=_core,
    )
    cold = InlineEngine.of(TorchExecutor(), replace(spec, transfer=None, prefix_cache=False))
    bitwise = spec.options["kernels"] == "native"
    return TieredPair(pair.net, pair.p, pair.d, cold=cold, plain=plain, bitwise=bitwise)


def _core(executor: Any, clock: Any, mover: Any) -> EngineCore:
    core = EngineCore(executor, clock, mover)
    core.make_tier_io = lambda runner, block_bytes, disk: VirtualTierIo(clock, block_bytes, runner)
    return core
