"""An engine whose steps take the time that its own model says, on the loop's virtual clock.

`sim.engine` gives every step one length; here the core says when its next results are due. What the
worker hears of its state is what a worker hears of a core in another process: the `Stats` events.

How long an answer becomes is nobody's business before it ends: callers ask for up to some bound, as
clients do, and the true length travels where no router looks, in the seed, which greedy requests
have no use for. It is put in force here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.engine.load import load_core
from pdserve.messages.engine import EngineStats, Stats
from pdserve.sim.engine import InlineEngine

if TYPE_CHECKING:
    from pdserve.engine.api import Handle, RemoteSink, TokenSink
    from pdserve.engine.core import Core
    from pdserve.engine.mover import Mover
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineSpec, Event
    from pdserve.messages.request import GenerateRequest
    from pdserve.transfer.fake import FakeFabric

__all__ = ["TimedEngine"]


class TimedEngine(InlineEngine):
    """See above."""

    def __init__(self, spec: EngineSpec, fabric: FakeFabric | None = None) -> None:
        super().__init__(spec, pace=0.0, load_time=0.0, fabric=fabric)
        self.spec = spec
        self._stats = EngineStats()
        self._due: Seconds | None = None
        """When the core is stepped next."""

    def _make_core(self, spec: EngineSpec, mover: Mover | None) -> Core:
        return load_core(spec.engine, self, mover)

    def statistics(self) -> EngineStats:
        """As of the last `Stats` event."""
        return self._stats

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """See `engine.api.Engine`."""
        return super().submit(_at_length(request), sink)

    def submit_remote(self, request: GenerateRequest, sink: RemoteSink) -> Handle:
        """See `engine.api.Engine`."""
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
