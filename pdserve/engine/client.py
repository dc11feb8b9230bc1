"""Implements the engine port over an engine core that runs elsewhere: `CoreClient`.

It starts the core (a child process), posts submissions to it, passes each event to the sink of its
submission, and restarts the core when it dies. One supervisor task owns each run of the core from
launch to exit; everything else is synchronous and runs on the event loop's thread.

When the core dies, every submission in flight and every prompt computed for a peer ends with one
`EngineDied` that names the exit and the last line of its stderr. Its KV is reported as cleared.
Until the next core is ready `submit` raises `NotReady`; after too many deaths it raises
`EngineDied` for good. A core that has work but makes no progress for `stall_timeout` is killed, and
its submissions end with `EngineStalled` at once.

It knows neither HTTP nor text, nor what a token means. A worker owns one client per engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.clock import SystemClock
from pdserve.engine.core_run import CoreRun, CoreTimeouts
from pdserve.engine.kv_drops import KvDrops
from pdserve.engine.kv_pulls import KvPullController
from pdserve.engine.launcher import CoreLauncher, ProcessLauncher
from pdserve.engine.oom_recovery import with_less_kv
from pdserve.engine.port import EngineState
from pdserve.engine.restart import CoreRestartPolicy, RestartBackoff
from pdserve.engine.transfer_control import TransferController, deliver_remote_event
from pdserve.errors import (
    ConfigError,
    Draining,
    EngineDied,
    EngineError,
    EngineStalled,
    NotReady,
    NoWorker,
    Overloaded,
    PayloadTooLarge,
    PdserveError,
    ProtocolError,
    TransferRefused,
)
from pdserve.limits.memory import available, oom_kills
from pdserve.limits.sizes import approximate_size
from pdserve.messages.engine import (
    Abort,
    AbortAttempt,
    Activate,
    Admitted,
    AttemptBlocksOpened,
    AttemptLost,
    BlocksFreed,
    CoreFailed,
    CoreReady,
    CoreStopped,
    EngineStats,
    InboundControlReply,
    KvAbsorbed,
    KvChainsListed,
    KvDropped,
    KvEvents,
    KvPullEnded,
    KvPullOpened,
    KvPullServed,
    LoadProgress,
    OpenAttemptBlocks,
    OutboundControl,
    PathStates,
    Prefilled,
    PrefillForPeer,
    PrefillLocally,
    PrefillSent,
    QueryStats,
    Rejected,
    SetHashSecret,
    Stats,
    StepOutput,
    Submit,
    SubmitRemote,
)
from pdserve.messages.engine_errors import error_of
from pdserve.messages.kv_events import TIERS, PoolCleared
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.observe.logs import about
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.clock import Clock
    from pdserve.engine.port import (
        Answered,
        AskPeer,
        Dropped,
        Handle,
        PrefillSink,
        RemotePrefillSink,
        TokenSink,
    )
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.engine import (
        Command,
        ControlCommand,
        ControlEvent,
        EngineCapabilities,
        EngineSpec,
        Event,
        PathState,
    )
    from pdserve.messages.handoff import Handoff, TransportCall
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.lora import LoraAdapter
    from pdserve.messages.transfer import TransferTicket

__all__ = ["CoreClient", "CoreClientOptions"]

_log = logging.getLogger(__name__)

_CANARY = GenerateRequest(
    request_id="canary",
    model="",
    prompt=token_ids([0]),
    sampling=SamplingParams(max_tokens=1, temperature=0.0),
)

_CANCELLED = 1 << 16
"""Most aborts whose time until the blocks are free is measured at once."""

_Escalation = list[tuple["Callable[[CoreRun], None]", "Seconds"]]
"""Each action that ends a core, and how long to wait for its effect before the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreClientOptions(CoreTimeouts):
    """How a core is run and watched; nothing here changes what it computes."""

    log_format: str = "text"
    log_level: str = "info"
    """Log level of the child process, whose log lines go to this process's stderr."""
    restart: CoreRestartPolicy = field(default_factory=CoreRestartPolicy)
    canary_interval: Seconds = 0.0
    """Seconds without requests after which the core gets a one-token request, which detects a core
    that cannot compute before a user's request meets it. 0: never."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """One submission whose sink still waits for its end."""

    sink: TokenSink
    choices: int
    """Number of choices that have not ended."""
    remote: RemotePrefillSink | None = None
    """The sink again if another worker prefills the prompt, else None."""


class CoreClient:
    """An `Engine` whose core runs in a process of its own."""

    def __init__(
        self,
        spec: EngineSpec,
        options: CoreClientOptions | None = None,
        *,
        on_state: Callable[[EngineState, str], None] | None = None,
        on_cancelled: Callable[[str, Seconds], None] | None = None,
        on_news: Callable[[], None] = lambda: None,
        make_launcher: Callable[[], CoreLauncher] | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        oom_kills: Callable[[], int] = oom_kills,
    ) -> None:
        """`on_state` is called at every change of state with the reason in words. `on_cancelled` is
        called when the blocks of an aborted submission are free, with what it was doing and how
        many seconds that took. `on_news` is called when the core reports new statistics or paths,
        just before those count.
        `make_launcher` makes the launcher of each run of the core; by
        default the core gets a process of its own. `oom_kills` returns how many processes the
        kernel's OOM killer has ended."""
        # Configuration
        self._spec = spec
        self._options = options or CoreClientOptions()
        self._on_state = on_state
        self._on_cancelled = on_cancelled
        self._on_news = on_news
        self._make_launcher = make_launcher or self._default_launcher
        self._clock = clock or SystemClock()
        self._oom_kills = oom_kills
        # The client's life
        self.state = EngineState.NEW
        self.state_reason = "not started"
        self._restarts = RestartBackoff(self._options.restart, rng or random.Random())
        self._supervisor: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._stop: asyncio.Event = asyncio.Event()
        self._draining = False
        self._idle: asyncio.Event = asyncio.Event()
        self._on_progress: Callable[[LoadProgress], None] | None = None
        self._kv_listeners: list[Callable[[Sequence[KvEvent]], None]] = []
        self._in_flight: dict[Handle, _InFlight] = {}
        self._prefills: dict[Handle, PrefillSink] = {}
        self._cancelled: dict[Handle, Seconds] = {}
        """Time of the abort of each submission whose blocks the core has not freed yet."""
        self._transfer_control = TransferController(self._post, self._control)
        self._drops = KvDrops()
        self.kv_pulls = KvPullController(self._post)
        self._last_handle = 0
        self._worked_at: Seconds = self._clock.now()
        """The last time at which the core was known to have work."""
        # One life of the core
        self._life: CoreRun | None = None
        self._secret = spec.hash_secret
        """Hash secret with which this run of the core started."""
        self._capabilities: EngineCapabilities | None = None
        self._had: EngineCapabilities | None = None
        """Capabilities of the last core that became ready."""
        self._oom_kills_before = 0
        self._stats = EngineStats()
        self.stalls = 0
        """Number of cores that were killed because they stalled."""
        self.leaked_blocks = 0
        """Blocks still held when the last core stopped in order; anything but 0 is a bug."""

    # ------------------------------------------------------------------ the port: life

    @property
    def capabilities(self) -> EngineCapabilities | None:
        """None until the core is ready, and again while it restarts."""
        return self._capabilities

    @property
    def restarts(self) -> int:
        """Number of restarts of the core."""
        return self._restarts.total

    @property
    def pid(self) -> int | None:
        """The id of the core's process; None: it has none at the moment."""
        return None if self._life is None else self._life.pid

    @property
    def stalled_for(self) -> Seconds:
        """Seconds without progress although the core has work; 0 while it makes progress."""
        return 0.0 if self._life is None else self._life.stalled_for

    def set_model(self, path: str, loras: tuple[LoraAdapter, ...] = ()) -> None:
        """Load the model in this directory, and these adapters; before `start`, if the spec names
        none."""
        self._spec = replace(self._spec, model=path, loras=loras)

    async def start(self, on_progress: Callable[[LoadProgress], None] | None = None) -> None:
        """Launch the core and load the model; returns when it is ready. `on_progress` also gets the
        progress of later restarts.

        Errors: the core's own error if it cannot load (`ConfigError`, …), `EngineDied` if it died
        or took longer than `load_timeout`. A first load that fails is not repeated. Cancellation:
        kills the core first.
        """
        if self._supervisor is not None:
            raise RuntimeError("a client starts once")
        loop = asyncio.get_running_loop()
        self._on_progress = on_progress
        self._worked_at = self._clock.now()
        self._ready = loop.create_future()
        self._supervisor = loop.create_task(self._supervise(), name="engine-supervisor")
        try:
            await self._ready
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the core: by a command, then by SIGKILL. Idempotent; any number of callers may wait.
        Cancellation: only the wait stops; the core still ends."""
        self._stop.set()
        if self.state not in (EngineState.FAILED, EngineState.STOPPED):
            self._set_state(EngineState.STOPPED, "stopped")
        self._fail_all(Draining("the engine is stopping"))
        supervisor = self._supervisor
        if supervisor is None or supervisor.done():
            return
        for action, patience in self._escalation():
            if self._life is not None:
                action(self._life)
            await asyncio.wait({supervisor}, timeout=patience)
            if supervisor.done():
                return
        _log.error("the engine core cannot be ended; it is left behind")
        supervisor.cancel()
        await asyncio.wait({supervisor})

    def _escalation(self) -> _Escalation:
        """The actions that end the core. A core that still loads reads no commands, so it is killed
        at once."""
        options = self._options
        orderly: _Escalation = [(CoreRun.ask_to_stop, options.stop_timeout)]
        force: _Escalation = [(CoreRun.kill, 2 * options.kill_timeout)]
        return force if self._capabilities is None else orderly + force

    async def drain(self, timeout: Seconds) -> bool:
        """Refuse new submissions and wait for those in flight; False if `timeout` came first. The
        client stays draining afterwards."""
        self._draining = True
        if not self._owes:
            return True
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # ------------------------------------------------------------------ the port: work

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """Post a request. Errors: those of `Engine.submit`; `Overloaded` if more submissions are in
        flight than the core may run and queue; `PayloadTooLarge` if no frame can hold it."""
        life = self._usable_life()
        self._check_lora(request)
        handle = self._admit(life)
        _post_request(life, Submit(handle=handle, request=request))
        self._in_flight[handle] = _InFlight(sink, len(request.live))
        return handle

    def _admit(self, life: CoreRun) -> Handle:
        """Return the handle of a new submission. Raises `Overloaded`."""
        spec, owed = self._spec, len(self._in_flight) + len(self._prefills)
        if owed >= spec.max_sequences + spec.max_waiting:
            raise Overloaded(f"{owed} requests are in flight", retry_after=1.0)
        if life.congested:
            raise Overloaded("the engine does not keep up with new requests", retry_after=1.0)
        self._last_handle += 1
        return self._last_handle

    def _check_lora(self, request: GenerateRequest) -> None:
        """Raises `NoWorker` if the request names an adapter that was not loaded here: the card by
        which it came is that of an earlier life."""
        if request.lora and all(one.id != request.lora for one in self._spec.loras):
            raise NoWorker(f"this worker has no adapter {request.lora!r}", retry_after=1.0)

    def _usable_life(self) -> CoreRun:
        if self._draining:
            raise Draining("the engine takes no new requests")
        return self._ready_life()

    def _ready_life(self) -> CoreRun:
        if self.state is EngineState.STOPPED:
            raise Draining("the engine has stopped")
        if self.state is EngineState.FAILED:
            raise EngineDied(f"the engine has failed and is not restarted: {self.state_reason}")
        if self._life is None or self.state is not EngineState.READY:
            raise NotReady(f"the engine is not ready: {self.state_reason}", retry_after=1.0)
        return self._life

    def abort(self, handle: Handle) -> None:
        """Abort a submission: its sink gets no further call, and its blocks are free within one
        step. Ignores unknown handles."""
        submission = self._in_flight.pop(handle, None)
        if submission is None and self._prefills.pop(handle, None) is None:
            return
        self._note_idle()
        if len(self._cancelled) < _CANCELLED:
            self._cancelled[handle] = self._clock.now()
        self._post(Abort(handle=handle))

    def stats(self) -> EngineStats:
        """The newest snapshot; zeros while no core is ready."""
        return self._stats

    def query_stats(self) -> None:
        """Ask the core for a new snapshot, which `stats` returns once it has come."""
        if self._life is not None and self.state is EngineState.READY:
            self._life.post(QueryStats())

    def rekey(self, hash_secret: bytes) -> None:
        """Hash blocks with this secret from now on, also after a restart. A core that is loading
        gets it before its first request."""
        if hash_secret != self._spec.hash_secret:
            self._spec = replace(self._spec, hash_secret=hash_secret)
            if self._life is not None:
                self._life.post(SetHashSecret(hash_secret=hash_secret))

    def subscribe_kv(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        """Call `listener` with every later batch of KV cache events; it must neither block nor
        raise. The death of a core is reported as `PoolCleared`."""
        self._kv_listeners.append(listener)

    # ------------------------------------------------------------------ the port: remote prefill

    def submit_remote(self, request: GenerateRequest, sink: RemotePrefillSink) -> Handle:
        """Post a request whose prompt another worker prefills. Errors: those of `submit`, and
        `TransferRefused` if the engine cannot move KV."""
        life = self._moving(self._usable_life())
        self._check_lora(request)
        handle = self._admit(life)
        _post_request(life, SubmitRemote(handle=handle, request=request))
        self._in_flight[handle] = _InFlight(sink, len(request.live), sink)
        return handle

    def prefill(
        self,
        request: GenerateRequest,
        ticket: TransferTicket,
        node: NodeId,
        epoch: Epoch,
        sink: PrefillSink,
    ) -> Handle:
        """Compute a prompt and send its KV to the ticket's blocks at (node, epoch). A draining
        engine still does this, since the request goes on at the peer. Errors: those of `submit`
        except `Draining`, and `TransferRefused`."""
        life = self._moving(self._ready_life())
        self._check_lora(request)
        handle = self._admit(life)
        command = PrefillForPeer(
            handle=handle, request=request, ticket=ticket, node=node, epoch=epoch
        )
        _post_request(life, command)
        self._prefills[handle] = sink
        return handle

    def _moving(self, life: CoreRun) -> CoreRun:
        """Return `life`. Raises `TransferRefused` if its engine cannot move KV."""
        capabilities = self._capabilities
        if capabilities is None or not capabilities.transfers:
            raise TransferRefused("this engine moves no KV")
        return life

    def open_attempt(self, handle: Handle, attempt: int, node: NodeId, epoch: Epoch) -> None:
        """Let (node, epoch) fill the blocks of the request."""
        if handle in self._in_flight:
            self._post(OpenAttemptBlocks(handle=handle, attempt=attempt, node=node, epoch=epoch))

    def activate(self, handle: Handle, attempt: int, handoff: Handoff) -> None:
        """Start to decode with the attempt's KV as soon as all of it has arrived."""
        if handle in self._in_flight:
            self._post(Activate(handle=handle, attempt=attempt, handoff=handoff))

    def give_up(self, handle: Handle, attempt: int) -> None:
        """Abort an attempt; the request itself stays."""
        if handle in self._in_flight:
            self._post(AbortAttempt(handle=handle, attempt=attempt))

    def prefill_here(self, handle: Handle) -> None:
        """Compute the prompt in this engine instead of waiting for another worker."""
        if handle in self._in_flight:
            self._post(PrefillLocally(handle=handle))

    def attach(self, node: NodeId, epoch: Epoch) -> None:
        """Exchange KV as this (node, epoch) from now on, also after a restart."""
        self._transfer_control.attach(node, epoch)

    def peer_gone(self, node: NodeId, epoch: Epoch, *, returns: bool = False) -> None:
        """End all transfers with (node, epoch), which gossip says is dead. `returns`: only its
        engine is, and starts again."""
        self._transfer_control.peer_gone(node, epoch, returns=returns)

    def make_path(self, node: NodeId, epoch: Epoch) -> None:
        """Make the KV path to (node, epoch) before a transfer needs it, so that `paths` says its
        rate. Ignored without an engine that has transports of its own."""
        self._transfer_control.make_path(node, epoch)

    def transfer_call(
        self, node: NodeId, epoch: Epoch, ask: TransportCall, reply: Answered
    ) -> None:
        """Pass a control call of (node, epoch) to the core's transports. `reply` is called once:
        with the answer, or with `NotReady`, `Overloaded` or `EngineDied`."""
        self._transfer_control.call(node, epoch, ask, reply)

    def on_transfer(self, ask: AskPeer) -> None:
        """Set the function by which the core's transports call their peers; before `start`."""
        self._transfer_control.on_transfer(ask)

    def paths(self) -> Sequence[PathState]:
        """State of every KV path to a peer, as of the core's last report."""
        return self._transfer_control.paths

    def drop_kv(self, owners: tuple[str, ...] | None, older: Seconds, done: Dropped) -> None:
        """Forgets reusable blocks, see `DropKv`. `done` is called once: with the blocks that are
        gone by tier, or with the reason why there are none. Errors: `NotReady`, `EngineDied`,
        `Overloaded`."""
        life = self._ready_life()
        self._drops.order(life.post, owners, older, done)

    def _post(self, command: Command) -> None:
        if self._life is not None:
            self._life.post(command)

    def _control(self, command: ControlCommand) -> None:
        if self._life is not None:
            self._life.control(command)

    # ------------------------------------------------------------------ events of the core

    def _on_event(self, event: Event | ControlEvent) -> None:
        if type(event) is StepOutput:
            self._fan_out(event)
            return
        match event:
            case Rejected():
                self._reject(event)
            case KvEvents():
                self._tell_listeners(event.events)
            case Stats():
                self._on_news()
                self._stats = event.stats
            case LoadProgress():
                self._progress(event)
            case CoreReady():
                self._become_ready(event)
            case CoreStopped():
                self._note_stopped(event)
            case Admitted() | AttemptBlocksOpened() | AttemptLost():
                self._tell_remote(event)
            case Prefilled():
                self._tell_prefill(event)
            case PrefillSent():
                self._sent(event)
            case OutboundControl() | InboundControlReply():
                self._transfer_control.take(event)
            case PathStates():
                self._on_news()
                self._transfer_control.take(event)
            case KvPullOpened() | KvPullEnded() | KvPullServed() | KvAbsorbed() | KvChainsListed():
                self.kv_pulls.take(event)
            case BlocksFreed():
                self._note_freed(event)
            case KvDropped():
                self._drops.take(event)
            case CoreFailed():
                # `CoreRun.run` returns this error once the core has ended.
                pass

    def _fan_out(self, step: StepOutput) -> None:
        """Pass each delta to its sink. Hot path: one dictionary look-up and one call per delta."""
        in_flight = self._in_flight
        for delta in step.deltas:
            entry = in_flight.get(delta.handle)
            if entry is None:
                # The request was aborted here, and the core has not read the abort yet.
                continue
            try:
                entry.sink.on_delta(delta)
            except Exception as error:
                self._drop(delta.handle, entry.sink, error)
                continue
            if delta.finish is not None:
                entry.choices -= 1
                if not entry.choices and in_flight.pop(delta.handle, None) is not None:
                    self._note_idle()

    def _reject(self, event: Rejected) -> None:
        entry = self._in_flight.pop(event.handle, None)
        sink = self._prefills.pop(event.handle, None) if entry is None else entry.sink
        if sink is not None:
            _deliver(sink, error_of(event))
            self._note_idle()

    def _tell_remote(self, event: Admitted | AttemptBlocksOpened | AttemptLost) -> None:
        entry = self._in_flight.get(event.handle)
        if entry is None or entry.remote is None:
            return
        try:
            deliver_remote_event(entry.remote, event)
        except Exception as error:
            self._drop(event.handle, entry.sink, error)

    def _tell_prefill(self, event: Prefilled) -> None:
        sink = self._prefills.get(event.handle)
        if sink is None:
            return
        try:
            sink.on_prefilled(event.handoff)
        except Exception as error:
            self._drop(event.handle, sink, error)

    def _drop(self, handle: Handle, sink: TokenSink | PrefillSink, error: Exception) -> None:
        """Abort the request of a sink that has raised, and try to report the error to the sink."""
        _log.error("a sink raised; its request is dropped", exc_info=error)
        self.abort(handle)
        _deliver(sink, EngineError(f"{type(error).__name__} in the worker"))

    def _sent(self, event: PrefillSent) -> None:
        sink = self._prefills.pop(event.handle, None)
        if sink is None:
            return
        if event.kind:
            _deliver(sink, error_of(event))
        else:
            try:
                sink.on_sent()
            except Exception:
                _log.exception("a sink raised")
        self._note_idle()

    def _note_freed(self, event: BlocksFreed) -> None:
        now = self._clock.now()
        for handle, phase in event.handles:
            since = self._cancelled.pop(handle, None)
            if since is not None and phase and self._on_cancelled is not None:
                self._on_cancelled(phase, now - since)

    def _tell_listeners(self, events: Sequence[KvEvent]) -> None:
        for listener in self._kv_listeners:
            try:
                listener(events)
            except Exception:
                _log.exception("a KV listener raised")

    def _progress(self, event: LoadProgress) -> None:
        if self.state is not EngineState.STOPPED:
            self.state_reason = event.stage
        if self._on_progress is not None:
            self._on_progress(event)

    def _become_ready(self, event: CoreReady) -> None:
        if self._stop.is_set():
            return
        self._capabilities = self._had = event.capabilities
        # A core reports when something has changed: until then its pool is known, and free.
        blocks = event.capabilities.num_blocks
        self._stats = EngineStats(blocks_total=blocks, blocks_free=blocks)
        if self._life is not None and self._spec.hash_secret != self._secret:
            self._life.post(SetHashSecret(hash_secret=self._spec.hash_secret))
        if event.capabilities.transfers or event.capabilities.fetches:
            self._transfer_control.begin(transports=event.transports)
            self.kv_pulls.begin()
        self._set_state(EngineState.READY, "ready")
        if self._restarts.total:
            _log.info("the engine is ready again, after restart %d", self._restarts.total)
        self._settle(None)

    def _note_stopped(self, event: CoreStopped) -> None:
        self.leaked_blocks = event.leaked_blocks
        if event.leaked_blocks:
            _log.error("the engine core stopped with %d KV blocks leaked", event.leaked_blocks)

    @property
    def _owes(self) -> bool:
        """Return whether any sink waits for output."""
        return bool(self._in_flight or self._prefills)

    def _note_idle(self) -> None:
        if not self._owes:
            self._idle.set()

    def _fail_all(self, error: PdserveError) -> None:
        self._transfer_control.end(error)
        self._drops.end(error)
        self.kv_pulls.end()
        in_flight, self._in_flight = self._in_flight, {}
        prefills, self._prefills = self._prefills, {}
        for entry in in_flight.values():
            _deliver(entry.sink, error)
        for sink in prefills.values():
            _deliver(sink, error)
        self._note_idle()

    def _set_state(self, state: EngineState, reason: str) -> None:
        self.state, self.state_reason = state, reason
        if self._on_state is not None:
            self._on_state(state, reason)

    # ------------------------------------------------------------------ supervision

    async def _supervise(self) -> None:
        """Run the core again and again, until it is stopped or restarts no more."""
        try:
            while not self._stop.is_set():
                died = await self._live()
                delay = None if self._stop.is_set() else self._after_death(died)
                if delay is None:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._stop.wait()
        except Exception as error:
            # Even a bug here must not leave requests waiting.
            _log.exception("the engine's supervisor broke down")
            self._give_up(EngineDied(f"the engine's supervisor broke down: {error}"))
        finally:
            self._settle(Draining("the engine is stopping"))

    async def _live(self) -> PdserveError:
        """Run the core once, from launch to exit; returns the error that ended it."""
        loaded_before = self._ready is not None and self._ready.done()
        state = EngineState.RESTARTING if loaded_before else EngineState.LOADING
        self._set_state(state, "starting")
        life = self._life = CoreRun(
            self._make_launcher(),
            self._options,
            self._clock,
            on_event=self._on_event,
            on_lost=self._lost,
            on_look=self._send_canary,
            most_rest=self._options.canary_interval / 4 or float("inf"),
        )
        self._secret = self._spec.hash_secret
        self._oom_kills_before = self._oom_kills()
        try:
            return await life.run(self._spec)
        finally:
            self._life = None
            self._lost(None)

    def _send_canary(self) -> None:
        """Send the canary request if the core has been idle for `canary_interval`. Its output is
        ignored: the watchdog sees whether the core computes it."""
        now, interval = self._clock.now(), self._options.canary_interval
        if self._owes or self._life is None:
            self._worked_at = now
        if not interval or now - self._worked_at < interval or self._life is None:
            return
        self._worked_at = now
        self._last_handle += 1
        self._life.post(Submit(handle=self._last_handle, request=_CANARY, counted=False))

    def _lost(self, stalled: EngineStalled | None) -> None:
        """The core sends no more events. The reason is not known yet, unless it stalled."""
        self._capabilities = None
        self._stats = EngineStats()
        self._cancelled.clear()
        self._transfer_control.end(EngineDied("the engine process ended", retry_after=1.0))
        self.kv_pulls.end()
        if self.state is EngineState.READY:
            reason = "the engine process ended" if stalled is None else stalled.message
            self._set_state(EngineState.RESTARTING, reason)
        if stalled is not None:
            self.stalls += 1
            self._bury(stalled)

    def _after_death(self, died: PdserveError) -> Seconds | None:
        """Return the seconds until the restart, or None if the core is not restarted."""
        first_load = self._ready is not None and not self._ready.done()
        smaller, hopeless = self._spec, first_load
        if _was_killed(died) and self._oom_kills() > self._oom_kills_before:
            died, smaller = self._out_of_memory(died)
            hopeless |= isinstance(died, ConfigError)
        # Any other `ConfigError` comes from a restart. The model has loaded before, so it may load
        # again: memory, say, may have been short only for a moment.
        delay = None if hopeless else self._restarts.next_delay(self._clock.now())
        if delay is None:
            policy = self._restarts.policy
            deaths = "" if hopeless else f" after {policy.max_restarts + 1} deaths"
            self._give_up(died, deaths and f"{deaths} within {policy.window:g} s")
            return None
        self._spec = smaller
        _log.warning("%s; starting it again in %.1f s", _explained(died), delay)
        self._set_state(EngineState.RESTARTING, died.message)
        self._bury(died)
        return delay

    def _out_of_memory(self, died: PdserveError) -> tuple[PdserveError, EngineSpec]:
        """Return the error of an OOM kill and the spec of the next run. The same spec would be
        killed again, so the next core gets less KV. `ConfigError` if its pool cannot shrink."""
        bound = available()
        why = (
            f"{died.message}: memory ran out ({approximate_size(bound.limit)} are the limit of "
            f"{bound.name})"
        )
        smaller = None if self._had is None else with_less_kv(self._spec, self._had)
        if smaller is None:
            remedy = "give it more memory, or lower --kv-memory and --max-model-len, or take a "
            return ConfigError(f"{why}; {remedy}smaller model"), self._spec
        if smaller.kv_cap:
            size = approximate_size(int(smaller.kv_cap * smaller.kv_share))
            why += f"; the KV pool is {size} from now on"
        return EngineDied(why), smaller

    def _give_up(self, died: PdserveError, deaths: str = "") -> None:
        # While `start` waits, it raises this error, which is then not logged here.
        if self._ready is None or self._ready.done():
            _log.error("the engine is not restarted%s: %s", deaths, _explained(died))
        self._set_state(EngineState.FAILED, died.message)
        self._settle(died)
        self._bury(died)

    def _bury(self, died: PdserveError) -> None:
        """End all submissions with this error and report the KV as cleared."""
        self._fail_all(died)
        self._tell_listeners([PoolCleared(tier) for tier in TIERS])

    def _settle(self, error: PdserveError | None) -> None:
        """Release the caller of `start`; later calls change nothing."""
        if self._ready is None or self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    def _default_launcher(self) -> CoreLauncher:
        options = self._options
        return ProcessLauncher(log_format=options.log_format, log_level=options.log_level)


def _was_killed(died: PdserveError) -> bool:
    return isinstance(died, EngineDied) and "killed by SIGKILL" in died.message


def _explained(died: PdserveError) -> str:
    """The error for the operator's log. An unexplained SIGKILL is nearly always the OOM killer."""
    if not _was_killed(died) or "memory ran out" in died.message:
        return died.message
    return (
        f"{died.message} (if no one killed it on purpose, memory ran out: see the "
        "system's log, and try a smaller --kv-memory)"
    )


def _post_request(life: CoreRun, command: Submit | SubmitRemote | PrefillForPeer) -> None:
    try:
        life.post(command)
    except ProtocolError as error:
        raise PayloadTooLarge(f"the request is too large: {error.message}") from error
    if _log.isEnabledFor(logging.DEBUG):
        request, handle = command.request, command.handle
        # Lines of the engine have only the handle where they do not know the request.
        _log.debug("request %s is handle %d here", request.request_id, handle, extra=about(request))


def _deliver(sink: TokenSink | PrefillSink, error: PdserveError) -> None:
    try:
        sink.on_error(error)
    except Exception:
        _log.exception("a token sink raised")
