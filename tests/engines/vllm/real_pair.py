"""Two cores with the real vLLM, one of which computes prompts for the other; see `disagg_pair`."""

from __future__ import annotations

import random
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.clock import SystemClock
from pdserve.messages.engine import TransferSpec
from pdserve.testing.fake_mover import FakeMover, FakeNet, FreeGuard
from pdserve.testing.inline_engine import InlineEngine
from tests.engines.vllm import real
from tests.support.disagg_pair import DisaggPair, PairedCore

if TYPE_CHECKING:
    from pdserve.messages.engine import EngineSpec, Event
    from pdserve.messages.request import GenerateRequest

P = msgspec.structs.replace(real.MAIN, transfer=TransferSpec(verify="all"), seed=1)
D = msgspec.structs.replace(P, seed=2)
"""Engines of other seeds, so that the two are not one."""
BLOCK = real.BLOCK


class RealEnd(PairedCore):
    """One of the two cores; everything is checked after every step."""

    @property
    def core(self) -> Any:
        return self.engine.core

    @cached_property
    def staging(self) -> Any:
        return self.core._staging

    def step(self) -> list[Event]:
        events = self.engine.step()
        self.staging.pool.blocks.check()
        self.guard.check()
        return events

    def sleep(self) -> bool:
        """vLLM has a clock of its own, so nothing is skipped."""
        return bool(self.core.has_work)


class RealPair(DisaggPair):
    p: RealEnd
    d: RealEnd

    def close(self) -> None:
        for end in (self.d, self.p):
            assert end.staging.holds.held == 0
            assert end.core.close() == 0
            counts = end.staging.pool.blocks.counts()
            assert counts.used == counts.quarantined == 0


def _end(net: FakeNet, spec: EngineSpec) -> RealEnd:
    core, mover = real.SharedCore(), FakeMover(net)
    core.use_connector(mover)
    engine = InlineEngine(core, spec)
    guard = FreeGuard(core._staging.pool.blocks, mover)
    return RealEnd(engine, mover, guard, SystemClock())  # type: ignore[arg-type]


def make_pair(p: EngineSpec, d: EngineSpec) -> RealPair:
    """Two cores around engines that stay loaded."""
    net = FakeNet()
    return RealPair(net, _end(net, p), _end(net, d))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(10, 1200), k=length)


def asked(length: int, seed: int = 0, **changes: Any) -> GenerateRequest:
    return real.request(prompt_of(length, seed), **changes)


def alone(both: RealPair, request: GenerateRequest) -> list[list[int]]:
    """The answer of one engine, which has nothing cached."""
    both.d.core.clear_cache()
    tokens = both.d.engine.generate([request])[0]
    both.d.core.clear_cache()
    return tokens
