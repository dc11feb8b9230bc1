"""Two `ToyEngine`s, one of which prefills for the other, in one process; see `disagg_pair`.

Their staging blocks are in host memory or, with `MEMORY` set, in that of a fake CUDA device.
`make_transport_pair` connects the two by a real transport instead of a `FakeNet`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.clock import ManualClock
from pdserve.engine_core.kv_transfer.thread_connector import ThreadKvConnector
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import (
    EngineSpec,
    SetNodeLife,
    TransferSpec,
)
from pdserve.testing.fake_mover import FakeMover, FakeNet, FreeGuard
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.transfer_support import CallCarrier
from pdserve.transfer.backends import TransferBackend
from pdserve.transfer.base import Region
from tests.support.disagg_pair import DisaggPair, PairedCore
from tests.support.fake_cuda import FakeCuda
from tests.support.staged_engine import ToyEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.messages.engine import Event
    from pdserve.transfer.cuda.driver import CudaDriver

MEMORY = "host"
"""Where new pairs have their staging blocks: `host` or `device`."""
PATIENCE = 30.0
"""Seconds for a real transport to do anything."""

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
    mover, clock, device = FakeMover(net), ManualClock(), None
    if MEMORY == "device":
        mover, device = DeviceMover(net), FakeCuda(Random(1))
    core = ToyEngine(clock, device)
    core.use_connector(mover)
    engine = InlineEngine(core, msgspec.structs.replace(SPEC, **changes))
    return StagedEnd(engine, mover, FreeGuard(core.staging.blocks, mover), clock)


class DeviceMover(FakeMover):
    """Moves the bytes of a fake device, whose memory is the host's. The core sees no view of it."""

    def start(self, region: Region, wake: Callable[[], None]) -> tuple[str, ...]:
        assert region.view is None
        memory = (ctypes.c_char * region.size).from_address(region.address)
        view = memoryview(memory).cast("B")
        seen = Region(region.layout, region.blocks, view, address=region.address)
        return FakeMover.start(self, seen, wake)


# ------------------------------------------------------------------ over real transports


class TransportEnd(StagedEnd):
    """One of two engines that a real transport connects: free blocks cannot be watched."""

    def step(self) -> list[Event]:
        events = self.engine.step()
        self.core.cache.check()
        self.core.staging.blocks.check()
        return events


class TransportPair(StagedPair):
    """P and D over a real transport."""

    moved: threading.Event
    """Set by the transports' threads."""

    carriers: list[CallCarrier]
    """What carries the transports' control calls, as nodes do."""

    def close(self) -> None:
        super().close()
        for carrier in self.carriers:
            carrier.end.close()

    def until(self, met: Callable[[], bool]) -> None:
        """Take turns until it is so. Raises AssertionError if that takes too long."""
        end = time.monotonic() + PATIENCE
        while not met():
            self.moved.clear()
            self.turn()
            if not (met() or self.d.core.has_work or self.p.core.has_work):
                assert self.moved.wait(end - time.monotonic()), "the transport does nothing"


def make_transport_pair(
    backends: Sequence[TransferBackend | Sequence[TransferBackend]],
    devices: Sequence[CudaDriver | None],
    spec: EngineSpec = SPEC,
) -> TransportPair:
    """Create P and D, each with its back end, or several, best first, and the driver of its device;
    None: it is in host memory."""
    moved = threading.Event()
    ends = []
    carriers = [CallCarrier(NodeLife(NodeId(name), 1)) for name in "pd"]
    for carrier, given, device in zip(carriers, backends, devices, strict=True):
        own = [given] if isinstance(given, TransferBackend) else given
        mover = ThreadKvConnector(own, moved.set, carrier.end.theirs)
        clock = ManualClock()
        core = ToyEngine(clock, device)
        core.use_connector(mover)
        engine = InlineEngine(core, spec)
        core.handle(SetNodeLife(*carrier.life))
        ends.append(TransportEnd(engine, mover, None, clock))  # type: ignore[arg-type]
    pair = TransportPair(FakeNet(), ends[0], ends[1])
    pair.moved, pair.carriers = moved, carriers
    carriers[0].join(carriers[1])
    return pair
