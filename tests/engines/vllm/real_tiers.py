"""Cores with the real vLLM and tiers, in a test's own thread."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.engine_core.tiers.onboarder import FetchPlan
from pdserve.messages.engine import KvEvents
from pdserve.messages.tiers import CachedSource, TierSpec
from tests.engines.vllm import real
from tests.engines.vllm.real_pair import P
from tests.engines.vllm.vllm_pool import Router

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.messages.engine import EngineSpec, EngineStats, Event
    from pdserve.testing.fake_mover import FakeMover
    from pdserve.testing.output_checker import OutputChecker

BLOCK = real.BLOCK
FULL = 5 * BLOCK + 10
"""Tokens of a prompt of five full blocks."""
DEVICE = 40
"""Blocks of the pool."""


class Everything:
    """Fetches whatever is there, also where computing would be sooner."""

    deadline = 30.0

    def choose(self, device: int, local: Any, peers: Any, blocks: int, wait: float) -> FetchPlan:
        here = device + len(local)
        peer = max(0, min(peers[0].blocks, blocks) - here) if peers else 0
        source = peers[0] if peer else None
        return FetchPlan(len(local), peer, source, deadline=self.deadline)


class Tiered:
    """A core with tiers, stepped by the test."""

    def __init__(
        self, spec: TierSpec, engine: EngineSpec = P, mover: FakeMover | None = None
    ) -> None:
        """`mover` moves blocks of its host tier to other cores and back."""
        self.inline = real.inline(msgspec.structs.replace(engine, tiers=spec), mover)
        core: Any = self.inline.core
        self.core = core
        self.tiers = core.tiers
        self.tiers.loads.planner = Everything()
        # Looks at others' directories never end, and there is no other here.
        self.tiers.lower._tiers.shared = None
        self.router = Router()

    def step(self) -> list[Event]:
        events = self.inline.step()
        for event in events:
            if isinstance(event, KvEvents):
                self.router.hear(event.events)
        self.tiers.lower.check()
        return events

    @property
    def active(self) -> bool:
        """Whether something is left to do, writes to disk included."""
        writes = any(tier.blocks_filling for tier in self.stats.tiers)
        return self.core.has_work or writes or self.core.wake_at() is not None

    def run(self) -> None:
        deadline = time.monotonic() + 60.0
        while self.active:
            if self.core.has_work:
                self.step()
            else:
                time.sleep(0.002)
            assert time.monotonic() < deadline, "the core makes no progress"

    def ask(self, prompt: list[int], **changes: Any) -> OutputChecker:
        ledger = self.inline.submit(real.request(prompt, **({"max_tokens": 4} | changes)))
        self.run()
        assert ledger.error is None, ledger.error
        return ledger

    def forget(self) -> None:
        """Have vLLM lose what it has cached, as if it had evicted all of it."""
        assert self.core.engine.reset_prefix_cache()

    def evict(self) -> None:
        """Fill vLLM's pool with other prompts."""
        for number in range(DEVICE // 5 + 1):
            self.ask(prompt_of(1000 + number), max_tokens=1)

    @property
    def stats(self) -> EngineStats:
        stats: EngineStats = self.core.stats()
        return stats

    def close(self) -> None:
        assert self.core.close() == 0


def prompt_of(seed: int, length: int = FULL) -> list[int]:
    return random.Random(seed).choices(range(10, 1200), k=length)


PROMPT = prompt_of(1)


def host(frames: int) -> TierSpec:
    size = real.loaded(P).engine.capabilities.block_bytes
    return TierSpec(host_bytes=frames * size, host_admission="all")


def disk(folder: Path) -> TierSpec:
    return TierSpec(disk_path=str(folder), disk_bytes=64 << 20, disk_admission="all")


def sources(ledger: OutputChecker) -> tuple[CachedSource, ...]:
    assert ledger.starts[0] is not None
    return ledger.starts[0].sources


def cached(ledger: OutputChecker) -> int:
    assert ledger.finishes[0] is not None
    return ledger.finishes[0].cached_tokens
