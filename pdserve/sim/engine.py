"""Simulates an engine process in place: the real engine core, stepped by the virtual clock.

It replaces `CoreClient` and its child process for a simulated worker. A step takes `pace` seconds
of virtual time and no real time. The engine can be killed, and comes back as a restarted core does.
It uses the scripted executor, whose tokens depend on every KV block read, so that each output can
be checked against `reference_tokens`. KV moves over the simulated fabric.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.engine.port import EngineState
from pdserve.engine.transfer_control import TransferController, deliver_remote_event
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.kv_transfer.loop_connector import LoopKvConnector
from pdserve.errors import (
    Draining,
    EngineDied,
    NotReady,
    Overloaded,
    PdserveError,
    TransferCorrupt,
    TransferRefused,
)
from pdserve.ids import NodeLife
from pdserve.messages.engine import (
    Abort,
    AbortAttempt,
    Activate,
    Admitted,
    AttemptBlocksOpened,
    AttemptLost,
    EngineStats,
    InboundControlReply,
    KvEvents,
    OpenAttemptBlocks,
    OutboundControl,
    PathStates,
    Prefilled,
    PrefillForPeer,
    PrefillLocally,
    PrefillSent,
    Rejected,
    SetHashSecret,
    StepOutput,
    Submit,
    SubmitRemote,
)
from pdserve.messages.engine_errors import error_of
from pdserve.messages.kv_events import PoolCleared
from pdserve.sim.memory_guard import GuardedTransport, MemoryGuard
from pdserve.testing.scripted import ScriptedExecutor
from pdserve.transfer.backends import TransferBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine.port import (
        Answered,
        AskPeer,
        Handle,
        PrefillSink,
        RemotePrefillSink,
        TokenSink,
    )
    from pdserve.engine_core.kit import Core
    from pdserve.engine_core.kv_transfer.connector import AttemptKey, KvConnector
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.engine import (
        Command,
        EngineCapabilities,
        EngineSpec,
        Event,
        LoadProgress,
        PathState,
    )
    from pdserve.messages.handoff import Handoff, TransportCall
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.transfer import TransferTicket
    from pdserve.testing.fake_rdma import FakeFabric, FakeTransport
    from pdserve.transfer.base import CallPeer, Region

__all__ = ["VirtualTimeEngine"]

_NOTHING: Final = EngineStats()


class VirtualTimeEngine:
    """See `worker.service.SupervisedEngine`."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        pace: Seconds,
        load_time: Seconds,
        fabric: FakeFabric | None = None,
    ) -> None:
        """`fabric` is what all engines of a world that move KV have in common."""
        self.state = EngineState.NEW
        self.state_reason = "not started"
        self.restarts = 0
        self.stalls = 0
        self.stalled_for: Seconds = 0.0
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
        self._remotes: dict[Handle, RemotePrefillSink] = {}
        """Those sinks whose prompt is prefilled elsewhere."""
        self._prefills: dict[Handle, PrefillSink] = {}
        self._desk = TransferController(self._post)
        self._fabric = fabric
        self._key: NodeLife | None = None
        """In whose name it moves KV."""
        self._guard = MemoryGuard()
        """Of the present core."""
        self._mover: _InlineMover | None = None
        self._ending: list[_InlineMover] = []
        """Of earlier lives."""
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

    async def start(self, on_progress: Callable[[LoadProgress], None] | None = None) -> None:
        """See `engine.port.Engine`."""
        self.state, self.state_reason = EngineState.LOADING, "loading"
        await asyncio.sleep(self._load_time)
        self._boot()

    def _boot(self) -> None:
        self._reboot = None
        if self._fabric is not None and self._spec.transfer is not None:
            random = self._fabric.random
            self._guard = MemoryGuard()
            self._mover = _InlineMover(
                [_fake(self._fabric, self._guard)],
                nudge=self._arm,
                draw=lambda: random.getrandbits(60),
            )
        core = self._make_core(self._spec, self._mover)
        self.capabilities = core.load(self._spec, lambda progress: None)
        self._core = core
        self._guard.core = core if isinstance(core, EngineCore) else None
        self.state, self.state_reason = EngineState.READY, ""
        if self.capabilities.transfers:
            self._desk.begin()

    def _make_core(self, spec: EngineSpec, mover: KvConnector | None) -> Core:
        return EngineCore(ScriptedExecutor(), self, mover)

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
        """See `engine.port.Engine`."""
        self._drop_core()
        if self._reboot is not None:
            self._reboot.cancel()
            self._reboot = None
        self.state, self.state_reason = EngineState.STOPPED, "stopped"
        self._fail_all(Draining("the engine is stopping"))
        while self._ending:
            await self._ending.pop().closed()

    async def drain(self, timeout: Seconds) -> bool:
        """See `engine.port.Engine`."""
        until = self._loop.time() + timeout
        while self._owed and self._loop.time() < until:  # noqa: ASYNC110  as a core is polled
            await asyncio.sleep(self._pace)
        return not self._owed

    def free(self) -> None:
        """Its process was killed: give the memory back, as a kernel does."""
        self._disarm()  # by a peer's write, perhaps: then the timer is not among its own
        self._cut_off()
        self._guard.core = None
        if self._mover is not None:
            self._mover.dead = True
        if self._core is not None:
            core, self._core = self._core, None
            _ = core.close()

    def _cut_off(self) -> None:
        """What its devices had not sent is not sent any more."""
        if self._fabric is not None and self._key is not None:
            self._fabric.kill(self._key)

    def _drop_core(self) -> None:
        self._disarm()
        if self._core is not None:
            core, self._core = self._core, None
            self.capabilities = None
            self._cut_off()
            self._guard.core = None
            self.leaked += core.close()
            if self._mover is not None:
                self._ending.append(self._mover)
                self._mover = None

    def _fail_all(self, error: PdserveError) -> None:
        self._desk.end(error)
        sinks, self._sinks = self._sinks, {}
        prefills, self._prefills = self._prefills, {}
        self._choices.clear()
        self._remotes.clear()
        for sink in sinks.values():
            sink.on_error(error)
        for prefill in prefills.values():
            prefill.on_error(error)

    @property
    def _owed(self) -> int:
        return len(self._sinks) + len(self._prefills)

    # ------------------------------------------------------------------ requests

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """See `engine.port.Engine`."""
        handle = self._admit()
        self._sinks[handle] = sink
        self._choices[handle] = len(request.live)
        self._post(Submit(handle=handle, request=request))
        return handle

    def _admit(self) -> Handle:
        if self._core is None:
            raise NotReady(f"the engine is {self.state.value}", retry_after=1.0)
        if self.full:
            raise Overloaded(f"{self._owed} requests are in flight", retry_after=1.0)
        self._handles += 1
        return self._handles

    def abort(self, handle: Handle) -> None:
        """See `engine.port.Engine`."""
        if self._forget(handle) is not None or self._prefills.pop(handle, None) is not None:
            self._post(Abort(handle=handle))

    def _forget(self, handle: Handle) -> TokenSink | None:
        self._choices.pop(handle, None)
        self._remotes.pop(handle, None)
        return self._sinks.pop(handle, None)

    def _post(self, command: Command) -> None:
        if self._core is not None:
            self._core.handle(command)
            self._arm()

    # ------------------------------------------------------------------ handing prompts over

    def submit_remote(self, request: GenerateRequest, sink: RemotePrefillSink) -> Handle:
        """See `engine.port.Engine`."""
        handle = self._admit_transfer()
        self._sinks[handle] = self._remotes[handle] = sink
        self._choices[handle] = len(request.live)
        self._post(SubmitRemote(handle=handle, request=request))
        return handle

    def prefill(
        self,
        request: GenerateRequest,
        ticket: TransferTicket,
        node: NodeId,
        epoch: Epoch,
        sink: PrefillSink,
    ) -> Handle:
        """See `engine.port.Engine`."""
        handle = self._admit_transfer()
        self._prefills[handle] = sink
        self._post(
            PrefillForPeer(handle=handle, request=request, ticket=ticket, node=node, epoch=epoch)
        )
        return handle

    def _admit_transfer(self) -> Handle:
        handle = self._admit()
        if self.capabilities is None or not self.capabilities.transfers:
            raise TransferRefused("this engine moves no KV")
        return handle

    def open_attempt(self, handle: Handle, attempt: int, node: NodeId, epoch: Epoch) -> None:
        """See `engine.port.Engine`."""
        if handle in self._remotes:
            self._post(OpenAttemptBlocks(handle=handle, attempt=attempt, node=node, epoch=epoch))

    def activate(self, handle: Handle, attempt: int, handoff: Handoff) -> None:
        """See `engine.port.Engine`."""
        if handle in self._remotes:
            self._post(Activate(handle=handle, attempt=attempt, handoff=handoff))

    def give_up(self, handle: Handle, attempt: int) -> None:
        """See `engine.port.Engine`."""
        if handle in self._remotes:
            self._post(AbortAttempt(handle=handle, attempt=attempt))

    def prefill_here(self, handle: Handle) -> None:
        """See `engine.port.Engine`."""
        if handle in self._remotes:
            self._post(PrefillLocally(handle=handle))

    def attach(self, node: NodeId, epoch: Epoch) -> None:
        """See `engine.port.Engine`."""
        self._key = NodeLife(node, epoch)
        self._desk.attach(node, epoch)

    def peer_gone(self, node: NodeId, epoch: Epoch) -> None:
        """See `engine.port.Engine`."""
        self._desk.peer_gone(node, epoch)

    def transfer_call(
        self, node: NodeId, epoch: Epoch, ask: TransportCall, reply: Answered
    ) -> None:
        """See `engine.port.Engine`."""
        self._desk.call(node, epoch, ask, reply)

    def on_transfer(self, ask: AskPeer) -> None:
        """See `engine.port.Engine`."""
        self._desk.on_transfer(ask)

    def paths(self) -> Sequence[PathState]:
        """See `engine.port.Engine`."""
        return self._desk.paths

    # ------------------------------------------------------------------ the rest of the port

    @property
    def full(self) -> bool:
        """It takes no more requests for now."""
        return self._owed >= self._spec.max_sequences + self._spec.max_waiting

    def statistics(self) -> EngineStats:
        """See `engine.port.Engine`."""
        core = self._core
        return core.statistics() if isinstance(core, EngineCore) else _NOTHING

    def rekey(self, hash_secret: bytes) -> None:
        """See `engine.port.Engine`."""
        self._spec = replace(self._spec, hash_secret=hash_secret)
        self._post(SetHashSecret(hash_secret=hash_secret))

    def subscribe_kv(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        """See `engine.port.Engine`; a death reaches it as `PoolCleared`."""
        self._kv_listeners.append(listener)

    def _tell_listeners(self, events: Sequence[KvEvent]) -> None:
        for listener in self._kv_listeners:
            listener(events)

    # ------------------------------------------------------------------ steps

    def _arm(self) -> None:
        """A timer that is set for later, such as for a deadline, does not hold up new work."""
        core = self._core
        if core is None:
            return
        due = self._loop.time() + self._pace if core.has_work else core.wake_at()
        if due is None or (self._timer is not None and self._timer.when() <= due):
            return
        self._disarm()
        self._timer = self._loop.call_at(due, self._step)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self) -> None:
        self._timer = None
        assert self._core is not None
        for event in self._core.step():
            self._tell(event)
        self._arm()

    def _tell(self, event: Event) -> None:
        if isinstance(event, StepOutput):
            for delta in event.deltas:
                self._deliver(delta)
        elif isinstance(event, Rejected):
            self._reject(event)
        elif isinstance(event, KvEvents):
            self._tell_listeners(event.events)
        elif isinstance(event, OutboundControl | InboundControlReply | PathStates):
            self._desk.take(event)
        elif isinstance(event, Admitted | AttemptBlocksOpened | AttemptLost):
            assert not self._spoilt(event), f"bytes were wrong and nobody spoilt them: {event}"
            remote = self._remotes.get(event.handle)
            if remote is not None:
                deliver_remote_event(remote, event)
        elif isinstance(event, Prefilled | PrefillSent):
            self._tell_prefill(event)

    def _spoilt(self, event: Event) -> bool:
        """A transfer has brought other bytes than it was given."""
        wrong = isinstance(event, AttemptLost) and event.kind == TransferCorrupt.__name__
        return wrong and self._fabric is not None and not self._fabric.counts["wrong"]

    def _reject(self, event: Rejected) -> None:
        sink = self._forget(event.handle) or self._prefills.pop(event.handle, None)
        if sink is not None:
            sink.on_error(error_of(event))

    def _tell_prefill(self, event: Prefilled | PrefillSent) -> None:
        sink = self._prefills.get(event.handle)
        if sink is None:
            return
        if isinstance(event, Prefilled):
            sink.on_prefilled(event.handoff)
            return
        del self._prefills[event.handle]
        if event.kind:
            sink.on_error(error_of(event))
        else:
            sink.on_sent()

    def _deliver(self, delta: TokenDelta) -> None:
        sink = self._sinks.get(delta.handle)
        if sink is None:
            return  # aborted by what an earlier delta of this step caused
        if delta.finish is not None:
            self._choices[delta.handle] -= 1
            if self._choices[delta.handle] == 0:
                self._forget(delta.handle)
        sink.on_delta(delta)


class _InlineMover(LoopKvConnector):
    dead = False
    """Its process was killed: nothing of it runs any more."""

    def revoke(self, key: AttemptKey) -> None:
        if not self.dead:
            super().revoke(key)

    def withdraw(self, handle: int, peer: NodeLife, ticket: TransferTicket) -> None:
        if not self.dead:
            super().withdraw(handle, peer, ticket)

    def close(self) -> None:
        if not self.dead:
            super().close()


def _fake(fabric: FakeFabric, guard: MemoryGuard) -> TransferBackend:
    def make(key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> FakeTransport:
        transport = GuardedTransport(key.node, key.epoch, regions, ask, fabric, key=key)
        transport.guard = guard
        return transport

    return TransferBackend(name="fake", make=make)
