"""An engine inline: the real core, scheduler and pool, stepped by the world's clock.

What `CoreClient` and its child process are to a worker, this is to a worker in a world. A step
takes `pace` seconds of virtual time and no real ones. It can be killed, and comes back as a
restarted core does. The executor is the scripted one, whose tokens depend on every block it reads,
so that each output can be checked against `reference_tokens`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.engine.api import EngineState
from pdserve.engine.core import EngineCore
from pdserve.engine.rejection import error_of
from pdserve.errors import Draining, EngineDied, NotReady, Overloaded, PdserveError
from pdserve.messages.engine import Abort, EngineStats, KvEvents, Rejected, Rekey, Step, Submit
from pdserve.messages.kv import PoolCleared
from pdserve.testing.scripted import ScriptedExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine.api import Handle, TokenSink
    from pdserve.engine.core import Core
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineCapabilities, EngineSpec, Event, Progress
    from pdserve.messages.kv import KvEvent
    from pdserve.messages.request import GenerateRequest, TokenDelta

__all__ = ["InlineEngine"]

_NOTHING: Final = EngineStats()


class InlineEngine:
    """See `worker.service.SupervisedEngine`."""

    def __init__(self, spec: EngineSpec, *, pace: Seconds, load_time: Seconds) -> None:
        self.state = EngineState.NEW
        self.state_reason = "not started"
        self.restarts = 0
        self.capabilities: EngineCapabilities | None = None
        self.leaked = 0
        """Blocks that closed cores could not account for."""
        self._spec = spec
        self._pace = pace
        self._load_time = load_time
        self._loop = asyncio.get_running_loop()
        self._core: Core | None = None
        self._handles = 0
        self._sinks: dict[Handle, TokenSink] = {}
        self._choices: dict[Handle, int] = {}
        """Of each submission, those that have not ended."""
        self._kv_listeners: list[Callable[[Sequence[KvEvent]], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._reboot: asyncio.TimerHandle | None = None

    def now(self) -> Seconds:
        """See `clock.Clock`."""
        return self._loop.time()

    @property
    def core(self) -> Core | None:
        """None while it is down."""
        return self._core

    # ------------------------------------------------------------------ life

    async def start(self, on_progress: Callable[[Progress], None] | None = None) -> None:
        """See `engine.api.Engine`."""
        self.state, self.state_reason = EngineState.LOADING, "loading"
        await asyncio.sleep(self._load_time)
        self._boot()

    def _boot(self) -> None:
        self._reboot = None
        core = self._make_core(self._spec)
        self.capabilities = core.load(self._spec, lambda progress: None)
        self._core = core
        self.state, self.state_reason = EngineState.READY, ""

    def _make_core(self, spec: EngineSpec) -> Core:
        return EngineCore(ScriptedExecutor(), self)

    def die(self, restart_after: Seconds) -> bool:
        """The core's process is gone; False if there was none."""
        if self._core is None:
            return False
        self._drop_core()
        self.state, self.state_reason = EngineState.RESTARTING, "it died"
        self.restarts += 1
        self._reboot = self._loop.call_later(restart_after, self._boot)
        self._fail_all(EngineDied("the engine died", retry_after=1.0))
        self._tell_listeners([PoolCleared()])
        return True

    async def stop(self) -> None:
        """See `engine.api.Engine`."""
        self._drop_core()
        if self._reboot is not None:
            self._reboot.cancel()
            self._reboot = None
        self.state, self.state_reason = EngineState.STOPPED, "stopped"
        self._fail_all(Draining("the engine is stopping"))

    async def drain(self, timeout: Seconds) -> bool:
        """See `engine.api.Engine`."""
        until = self._loop.time() + timeout
        while self._sinks and self._loop.time() < until:  # noqa: ASYNC110  as a core is polled
            await asyncio.sleep(self._pace)
        return not self._sinks

    def free(self) -> None:
        """Its process was killed: give the memory back, as a kernel does."""
        if self._core is not None:
            core, self._core = self._core, None
            _ = core.close()

    def _drop_core(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._core is not None:
            core, self._core = self._core, None
            self.capabilities = None
            self.leaked += core.close()

    def _fail_all(self, error: PdserveError) -> None:
        sinks, self._sinks = self._sinks, {}
        self._choices.clear()
        for sink in sinks.values():
            sink.on_error(error)

    # ------------------------------------------------------------------ requests

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """See `engine.api.Engine`."""
        if self._core is None:
            raise NotReady(f"the engine is {self.state.value}", retry_after=1.0)
        if len(self._sinks) >= self._spec.max_sequences + self._spec.max_waiting:
            raise Overloaded(f"{len(self._sinks)} requests are in flight", retry_after=1.0)
        self._handles += 1
        self._sinks[self._handles] = sink
        self._choices[self._handles] = request.n
        self._core.handle(Submit(handle=self._handles, request=request))
        self._arm()
        return self._handles

    def abort(self, handle: Handle) -> None:
        """See `engine.api.Engine`."""
        if self._forget(handle) is not None and self._core is not None:
            self._core.handle(Abort(handle=handle))
            self._arm()

    def _forget(self, handle: Handle) -> TokenSink | None:
        self._choices.pop(handle, None)
        return self._sinks.pop(handle, None)

    def statistics(self) -> EngineStats:
        """See `engine.api.Engine`."""
        core = self._core
        return core.statistics() if isinstance(core, EngineCore) else _NOTHING

    def rekey(self, hash_secret: bytes) -> None:
        """See `engine.api.Engine`."""
        self._spec = replace(self._spec, hash_secret=hash_secret)
        if self._core is not None:
            self._core.handle(Rekey(hash_secret=hash_secret))
            self._arm()

    def subscribe_kv(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        """See `engine.api.Engine`; a death reaches it as `PoolCleared`."""
        self._kv_listeners.append(listener)

    def _tell_listeners(self, events: Sequence[KvEvent]) -> None:
        for listener in self._kv_listeners:
            listener(events)

    # ------------------------------------------------------------------ steps

    def _arm(self) -> None:
        core = self._core
        if self._timer is not None or core is None:
            return
        if core.has_work:
            self._timer = self._loop.call_later(self._pace, self._step)
        elif (due := core.wake_at()) is not None:
            self._timer = self._loop.call_at(due, self._step)

    def _step(self) -> None:
        self._timer = None
        assert self._core is not None
        for event in self._core.step():
            self._tell(event)
        self._arm()

    def _tell(self, event: Event) -> None:
        if isinstance(event, Step):
            for delta in event.deltas:
                self._deliver(delta)
        elif isinstance(event, Rejected):
            sink = self._forget(event.handle)
            if sink is not None:
                sink.on_error(error_of(event))
        elif isinstance(event, KvEvents):
            self._tell_listeners(event.events)

    def _deliver(self, delta: TokenDelta) -> None:
        sink = self._sinks.get(delta.handle)
        if sink is None:
            return  # aborted by what an earlier delta of this step caused
        if delta.finish is not None:
            self._choices[delta.handle] -= 1
            if self._choices[delta.handle] == 0:
                self._forget(delta.handle)
        sink.on_delta(delta)
