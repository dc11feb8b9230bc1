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

from pdserve.engine.kv_drops import KvDrops
from pdserve.engine.kv_pulls import KvPullController
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
    KvAbsorbed,
    KvChainsListed,
    KvDropped,
    KvEvents,
    KvPullEnded,
    KvPullOpened,
    KvPullServed,
    OpenAttemptBlocks,
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
from pdserve.messages.kv_events import TIERS, PoolCleared
from pdserve.sim.memory_guard import GuardedTransport, MemoryGuard
from pdserve.testing.scripted import ScriptedExecutor
from pdserve.transfer.backends import TransferBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine.port import (
        Answered,
        AskPeer,
        Dropped,
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
        ControlCommand,
        EngineCapabilities,
        EngineSpec,
        Event,
        LoadProgress,
        PathState,
    )
    from pdserve.messages.handoff import Handoff, TransportCall
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.lora import LoraAdapter
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.transfer import TransferTicket
    from pdserve.testing.fake_rdma import FakeFabric, FakeTransport
    from pdserve.transfer.base import CallPeer, Region

__all__ = ["VirtualTimeEngine"]

_NOTHING: Final = EngineStats()


class VirtualTimeEngine:
    """A simulated worker's engine; implements `worker.service.SupervisedEngine`."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        pace: Seconds,
        load_time: Seconds,
        fabric: FakeFabric | None = None,
    ) -> None:
        """`pace`: virtual seconds of each step. `load_time`: virtual seconds of each start.
        `fabric`: the network for KV that all engines of a world share; None: no transfers."""
        self.state = EngineState.NEW
        self.state_reason = "not started"
        self.restarts = 0
        self.stalls = 0
        self.stalled_for: Seconds = 0.0
        self.pid: int | None = None
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
        """Number of choices of each submission that have not ended."""
        self._remotes: dict[Handle, RemotePrefillSink] = {}
        """Sinks of the submissions whose prompt is prefilled elsewhere."""
        self._prefills: dict[Handle, PrefillSink] = {}
        self._transfer_control = TransferController(self._post, self._control)
        self._drops = KvDrops()
        self.kv_pulls = KvPullController(self._post)
        self._fabric = fabric
        self._key: NodeLife | None = None
        """The node's life under which the engine moves KV."""
        self._guard = MemoryGuard()
        """The memory guard of the present core."""
        self._mover: _InlineMover | None = None
        self._ending: list[_InlineMover] = []
        """The movers of earlier lives, which are closing."""
        self._kv_listeners: list[Callable[[Sequence[KvEvent]], None]] = []
        self._timer: asyncio.Handle | None = None
        self._timer_due: Seconds = 0.0
        """The time when `_timer` fires. Kept here, because a timer of uvloop that is due at once
        does not know it."""
        self._reboot: asyncio.TimerHandle | None = None

    def now(self) -> Seconds:
        """The virtual time, in seconds."""
        return self._loop.time()

    @property
    def core(self) -> Core | None:
        """The core; None while it is down."""
        return self._core

    # ------------------------------------------------------------------ life

    def set_model(self, path: str, loras: tuple[LoraAdapter, ...] = ()) -> None:
        """Load the model from this directory, and these adapters, at the next start of the
        core."""
        self._spec = replace(self._spec, model=path, loras=loras)

    async def start(self, on_progress: Callable[[LoadProgress], None] | None = None) -> None:
        """Create the core after `load_time` virtual seconds. `on_progress` is not called."""
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
                say=self._transfer_control.take,
                nudge=self._arm,
                draw=lambda: random.getrandbits(60),
            )
        core = self._make_core(self._spec, self._mover)
        self.capabilities = core.load(self._spec, lambda progress: None)
        self._core = core
        self._guard.core = core if isinstance(core, EngineCore) else None
        self.state, self.state_reason = EngineState.READY, ""
        if self.capabilities.transfers:
            self._transfer_control.begin()
            self.kv_pulls.begin()

    def _make_core(self, spec: EngineSpec, mover: KvConnector | None) -> Core:
        return EngineCore(ScriptedExecutor(), self, mover)

    def die(self, restart_after: Seconds) -> bool:
        """End the core as if its process died; it restarts after `restart_after` seconds. False if
        there was none."""
        if self._core is None:
            return False
        self._drop_core()
        self.state, self.state_reason = EngineState.RESTARTING, "it died"
        self.restarts += 1
        self._reboot = self._loop.call_later(restart_after, self._boot)
        self._fail_all(EngineDied("the engine died", retry_after=1.0))
        self._tell_listeners([PoolCleared(tier) for tier in TIERS])
        return True

    async def stop(self) -> None:
        """Close the core and fail every submission with `Draining`; ends the transports of all
        lives."""
        self._drop_core()
        if self._reboot is not None:
            self._reboot.cancel()
            self._reboot = None
        self.state, self.state_reason = EngineState.STOPPED, "stopped"
        self._fail_all(Draining("the engine is stopping"))
        while self._ending:
            await self._ending.pop().closed()

    async def drain(self, timeout: Seconds) -> bool:
        """Wait until no submission is in flight; False if `timeout` came first. New ones are still
        accepted."""
        until = self._loop.time() + timeout
        while self._owed and self._loop.time() < until:  # noqa: ASYNC110  no event
            await asyncio.sleep(self._pace)
        return not self._owed

    def free(self) -> None:
        """Free the core's memory, as the kernel does with a killed process. Sinks are not
        called."""
        if self.state is EngineState.NEW:
            return
        # A peer's write may have set the timer, which is then not among the timers of this node.
        self._disarm()
        self._cut_off()
        self._guard.core = None
        if self._mover is not None:
            self._mover.dead = True
        if self._core is not None:
            core, self._core = self._core, None
            _ = core.close()

    def _cut_off(self) -> None:
        """Its fake devices send nothing more."""
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
        self._transfer_control.end(error)
        self._drops.end(error)
        self.kv_pulls.end()
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
        """Post a request. Errors: `NotReady` while the core is down, `Overloaded`."""
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
        """Abort a submission; its sink gets no further call. Ignores unknown handles."""
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

    def _control(self, command: ControlCommand) -> None:
        """Tell the transports, past the core, as the socket beside a real core's does."""
        if self._mover is not None and self._core is not None:
            self._mover.take(command)

    # ------------------------------------------------------------------ remote prefill

    def submit_remote(self, request: GenerateRequest, sink: RemotePrefillSink) -> Handle:
        """Post a request whose prompt another engine prefills. Errors: those of `submit`, and
        `TransferRefused`."""
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
        """Prefill a prompt for a peer and send its KV. Errors: those of `submit`, and
        `TransferRefused`."""
        handle = self._admit_transfer()
        self._prefills[handle] = sink
        self._post(
            PrefillForPeer(handle=handle, request=request, ticket=ticket, node=node, epoch=epoch)
        )
        return handle

    def _admit_transfer(self) -> Handle:
        handle = self._admit()
        if self.capabilities is None or not self.capabilities.transfers:
            raise TransferRefused("this engine has no KV transfer")
        return handle

    def open_attempt(self, handle: Handle, attempt: int, node: NodeId, epoch: Epoch) -> None:
        """Let (node, epoch) fill the request's blocks. Ignores unknown handles."""
        if handle in self._remotes:
            self._post(OpenAttemptBlocks(handle=handle, attempt=attempt, node=node, epoch=epoch))

    def activate(self, handle: Handle, attempt: int, handoff: Handoff) -> None:
        """Start to decode once the attempt's KV has arrived. Ignores unknown handles."""
        if handle in self._remotes:
            self._post(Activate(handle=handle, attempt=attempt, handoff=handoff))

    def give_up(self, handle: Handle, attempt: int) -> None:
        """Abort an attempt. Ignores unknown handles."""
        if handle in self._remotes:
            self._post(AbortAttempt(handle=handle, attempt=attempt))

    def prefill_here(self, handle: Handle) -> None:
        """Compute the prompt in this engine after all. Ignores unknown handles."""
        if handle in self._remotes:
            self._post(PrefillLocally(handle=handle))

    def attach(self, node: NodeId, epoch: Epoch) -> None:
        """Exchange KV as (node, epoch) from now on, also after a restart of the core."""
        self._key = NodeLife(node, epoch)
        self._transfer_control.attach(node, epoch)

    def peer_gone(self, node: NodeId, epoch: Epoch, *, returns: bool = False) -> None:
        """End the transfers with a peer that gossip calls dead, and fence its writes. `returns`:
        only its engine is dead, and starts again."""
        self._transfer_control.peer_gone(node, epoch, returns=returns)

    def make_path(self, node: NodeId, epoch: Epoch) -> None:
        """Make the KV path to (node, epoch) before a transfer needs it, so that `paths` says its
        rate. Ignored without an engine that has transports of its own."""
        self._transfer_control.make_path(node, epoch)

    def transfer_call(
        self, node: NodeId, epoch: Epoch, ask: TransportCall, reply: Answered
    ) -> None:
        """Pass a peer's control call to the core's transports; `reply` is called once."""
        self._transfer_control.call(node, epoch, ask, reply)

    def on_transfer(self, ask: AskPeer) -> None:
        """Set the function by which the core's transports call their peers."""
        self._transfer_control.on_transfer(ask)

    def paths(self) -> Sequence[PathState]:
        """The state of every KV path, as last reported by the core."""
        return self._transfer_control.paths

    def drop_kv(self, owners: tuple[str, ...] | None, older: Seconds, done: Dropped) -> None:
        """Forget reusable blocks; `done` is called once. Errors: `NotReady`, `Overloaded`."""
        if self._core is None:
            raise NotReady(f"the engine is {self.state.value}", retry_after=1.0)
        self._drops.order(self._post, owners, older, done)

    # ------------------------------------------------------------------ the rest of the port

    @property
    def full(self) -> bool:
        """`submit` would raise `Overloaded`."""
        return self._owed >= self._spec.max_sequences + self._spec.max_waiting

    def stats(self) -> EngineStats:
        """The core's present stats; zeros while it is down."""
        core = self._core
        return core.stats() if isinstance(core, EngineCore) else _NOTHING

    def rekey(self, hash_secret: bytes) -> None:
        """Hash blocks with this secret from now on, also after a restart."""
        self._spec = replace(self._spec, hash_secret=hash_secret)
        self._post(SetHashSecret(hash_secret=hash_secret))

    def subscribe_kv(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        """Call `listener` with every later batch of KV cache events; a death of the core is a
        `PoolCleared`."""
        self._kv_listeners.append(listener)

    def _tell_listeners(self, events: Sequence[KvEvent]) -> None:
        for listener in self._kv_listeners:
            listener(events)

    # ------------------------------------------------------------------ steps

    def _arm(self) -> None:
        """Set the timer of the next step; a later one, such as for a deadline, does not delay new
        work."""
        core = self._core
        if core is None:
            return
        due = self._loop.time() + self._pace if core.has_work else core.wake_at()
        if due is None or (self._timer is not None and self._timer_due <= due):
            return
        self._disarm()
        self._timer, self._timer_due = self._loop.call_at(due, self._step), due

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
        elif isinstance(event, KvDropped):
            self._drops.take(event)
        elif isinstance(
            event, KvPullOpened | KvPullEnded | KvPullServed | KvAbsorbed | KvChainsListed
        ):
            self.kv_pulls.take(event)
        elif isinstance(event, Admitted | AttemptBlocksOpened | AttemptLost):
            assert not self._spoilt(event), f"bytes were wrong and no fault changed them: {event}"
            remote = self._remotes.get(event.handle)
            if remote is not None:
                deliver_remote_event(remote, event)
        elif isinstance(event, Prefilled | PrefillSent):
            self._tell_prefill(event)

    def _spoilt(self, event: Event) -> bool:
        """True if a transfer has brought wrong bytes although no fault was injected."""
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
            # An earlier delta of this step led to the abort of this request.
            return
        if delta.finish is not None:
            self._choices[delta.handle] -= 1
            if self._choices[delta.handle] == 0:
                self._forget(delta.handle)
        sink.on_delta(delta)


class _InlineMover(LoopKvConnector):
    dead = False
    """True once its process was killed: it does nothing any more."""

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
