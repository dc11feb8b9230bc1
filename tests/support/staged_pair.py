"""Two `ToyEngine`s, one of which prefills for the other, in one process; see `disagg_pair`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.clock import ManualClock
from pdserve.messages.engine import EngineSpec, TransferSpec
from pdserve.testing.fake_mover import FakeMover, FakeNet, FreeGuard
from pdserve.testing.inline_engine import InlineEngine
from tests.support.disagg_pair import DisaggPair, PairedCore
from tests.support.staged_engine import ToyEngine

if TYPE_CHECKING:
    from pdserve.messages.engine import Event

SPEC = EngineSpec(
    engine="tests.support.staged_engine:create",
    model="",
    block_size=4,
    max_model_len=96,
    transfer=TransferSpec(verify="all"),
)


class StagedEnd(PairedCore):
    """One of the two engines."""

    @property
    def core(self) -> Any:
        return self.engine.core

    def step(self) -> list[Event]:
        """Run one step, with all checks of the staging blocks."""
        events = self.engine.step()
        self.core.cache.check()
        self.core.staging.blocks.check()
        self.guard.check()
        return events


class StagedPair(DisaggPair):
    """P prefills, D decodes, both by staging blocks."""

    p: StagedEnd
    d: StagedEnd

    def close(self) -> None:
        """Close both engines and assert that they hold nothing."""
        for end in (self.d, self.p):
            assert end.core.close() == 0
            counts = end.core.staging.blocks.counts()
            assert counts.used == counts.quarantined == 0


def make_staged_pair(
    p: dict[str, Any] | None = None, d: dict[str, Any] | None = None
) -> StagedPair:
    """Create two engines for `SPEC`, each with its own changes; those of `options` are added."""
    net = FakeNet()
    ends = [_end(net, changes or {}) for changes in (p, d)]
    return StagedPair(net, ends[0], ends[1])


def _end(net: FakeNet, changes: dict[str, Any]) -> StagedEnd:
    mover, clock = FakeMover(net), ManualClock()
    core = ToyEngine(clock)
    core.use_connector(mover)
    engine = InlineEngine(core, msgspec.structs.replace(SPEC, **changes))
    return StagedEnd(engine, mover, FreeGuard(core.staging.blocks, mover), clock)
