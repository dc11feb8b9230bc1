"""Simulates an engine in a replay: its timing model gives each step's duration in virtual time.

`sim.engine` gives every step one length; here the core says when its next results are due. The
worker gets the same `Stats` events as from a core in another process.

Nothing may know an output's length before it ends: trace clients ask for up to a bound, as real
clients do. The true length travels in the seed, which the router does not see and greedy requests
do not use. This engine applies it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.engine_core.engine_loader import load_core
from pdserve.messages.engine import EngineStats, Stats
from pdserve.sim.engine import VirtualTimeEngine

if TYPE_CHECKING:
    from pdserve.engine.port import Handle, RemotePrefillSink, TokenSink
    from pdserve.engine_core.kit import Core
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineSpec, Event
    from pdserve.messages.request import GenerateRequest
    from pdserve.testing.fake_rdma import FakeFabric

__all__ = ["TimedEngine"]


class TimedEngine(VirtualTimeEngine):
    """A simulated engine that takes as long per step as its timing model says."""

    def __init__(self, spec: EngineSpec, fabric: FakeFabric | None = None) -> None:
        super().__init__(spec, pace=0.0, load_time=0.0, fabric=fabric)
        self._stats = EngineStats()
        self._due: Seconds | None = None
        """The time of the core's next step."""

    @property
    def spec(self) -> EngineSpec:
        """What its next core loads."""
        return self._spec

    def _make_core(self, spec: EngineSpec, mover: KvConnector | None) -> Core:
        return load_core(spec.engine, self, mover)

    def stats(self) -> EngineStats:
        """The core's stats as of the last `Stats` event."""
        return self._stats

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """Post a request, with its output length from the trace. Errors: as the base class."""
        return super().submit(_at_length(request), sink)

    def submit_remote(self, request: GenerateRequest, sink: RemotePrefillSink) -> Handle:
        """Post a request whose prompt another engine prefills, with its output length from the
        trace. Errors: as the base class."""
        return super().submit_remote(_at_length(request), sink)

    def _arm(self) -> None:
        core = self._core
        if core is None:
            return
        due = self._loop.time() if core.has_work else core.wake_at()
        if self._timer is not None:
            if due == self._due:
                return
            self._timer.cancel()
        self._due = due
        self._timer = None if due is None else self._loop.call_at(due, self._step)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Stats):
            self._stats = event.stats
        else:
            super()._tell(event)


def _at_length(request: GenerateRequest) -> GenerateRequest:
    sampling = replace(request.sampling, max_tokens=max(1, request.sampling.seed))
    return replace(request, sampling=sampling)
