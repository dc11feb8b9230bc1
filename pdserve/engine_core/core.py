"""Runs the scheduler, the block pool and an executor, one step at a time: `EngineCore`.

It is synchronous and does no I/O: the `CoreLoop` (in a process or a thread) passes commands in and
carries events out, and a simulation calls it inline with a clock of its own. It alone uses its
scheduler, pool and executor.

A step that fails ends the requests in it with `StepFailed`, since their blocks may be half written;
blocks committed earlier stay. A retry on another worker may help, because the cause is not known.
If the executor names the sequences at fault, only those fail. An executor that raises `EngineDied`,
or fails three steps in a row, is broken: the core reports `CoreFailed` and must be closed.

With a `KvConnector`, other workers may prefill prompts for this core (`KvReceiver`) and it may
prefill for others (`KvSender`); it fetches blocks from other workers' pools and serves its own
(`KvFetches`). The connector's events are handled between steps, like commands.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import msgspec

from pdserve.blocks.hashing import hash_secret_id
from pdserve.engine_core.kit import STATS_INTERVAL, kv_transfer_unsupported
from pdserve.engine_core.kv_fetch.fetches import KvFetches
from pdserve.engine_core.kv_fetch.ports import refusal_of
from pdserve.engine_core.kv_fetch.uses import DeviceUses
from pdserve.engine_core.kv_transfer.connector import PartDelivered
from pdserve.engine_core.kv_transfer.receiver import KvReceiver
from pdserve.engine_core.kv_transfer.sender import KvSender
from pdserve.engine_core.loras import check_loras
from pdserve.engine_core.pool_sizing import size_pool
from pdserve.engine_core.scheduler.block_hasher import BlockHasher
from pdserve.engine_core.scheduler.mixed_step_budget import MixedStepBudget
from pdserve.engine_core.scheduler.prefill_budget import PrefillBudget
from pdserve.engine_core.scheduler.scheduler import Scheduler
from pdserve.engine_core.scheduler.scheduler_state import SchedulerLimits
from pdserve.engine_core.scheduler.step_pipeline import StepPipeline
from pdserve.engine_core.tiers.core_tiers import CoreTiers, open_storage, threads
from pdserve.engine_core.tiers.drops import drop_kv
from pdserve.engine_core.tiers.early_starts import EarlyStarts
from pdserve.engine_core.tiers.fetch_lane import FetchLane
from pdserve.engine_core.tiers.fetch_planner import FetchPlanner
from pdserve.engine_core.tiers.onboarder import Onboarder
from pdserve.engine_core.tiers.plan_tally import PlanTally
from pdserve.engine_core.tiers.prefill_cost import StepCost
from pdserve.engine_core.tiers.stager import Stager
from pdserve.engine_core.tiers.step_gate import StepGate
from pdserve.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDied,
    EngineError,
    InvalidRequest,
    PdserveError,
    StepFailed,
    TransferRefused,
)
from pdserve.ids import NodeId, NodeLife
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.tiers.layer_groups import LayerGroups
from pdserve.messages.engine import (
    Abort,
    AbortAttempt,
    AbsorbKv,
    Activate,
    ClearCache,
    Command,
    DropKv,
    EngineCapabilities,
    EngineSpec,
    EngineStats,
    Event,
    KvEvents,
    KvPullAnswer,
    ListKvChains,
    LoadProgress,
    OpenAttemptBlocks,
    PeerGone,
    PrefillForPeer,
    PrefillLocally,
    QueryStats,
    ServeKvPull,
    SetHashSecret,
    SetNodeLife,
    Stats,
    StepOutput,
    StopKvPull,
    Submit,
    SubmitRemote,
)
from pdserve.messages.engine_errors import failed_event, rejected_event
from pdserve.messages.tiers import TierSpec
from pdserve.observe.logs import about

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pdserve.clock import Clock
    from pdserve.engine_core.executor import (
        Executor,
        ModelInfo,
        StepPlan,
        StepResult,
        SupportsGrammarPrefetch,
        SupportsHealthChecks,
        SupportsRunAhead,
    )
    from pdserve.engine_core.kv_fetch.ports import FetchCommand
    from pdserve.engine_core.kv_fetch.puller import KvPuller
    from pdserve.engine_core.kv_transfer.connector import ConnectorEvent, KvConnector
    from pdserve.engine_core.pool_sizing import PoolSizing
    from pdserve.engine_core.scheduler.sequence import Sequence as EngineSequence
    from pdserve.engine_core.tiers.core_tiers import MakeTierIo, TierStorage
    from pdserve.engine_core.tiers.onboarder import BlockFetch
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.lanes import LaneEstimate
    from pdserve.kv.tiers.lower_tiers import LowerTiers
    from pdserve.messages.request import SamplingParams, TokenDelta
    from pdserve.messages.tiers import LaneLoad, LaneName, SourceName, TierStats
    from pdserve.transfer.base import Region

__all__ = ["EngineCore"]

_log = logging.getLogger(__name__)

_BREATH: Seconds = 0.005
"""Longest wait for a grammar, in seconds, while nothing else can be computed; a command may wait as
long."""

_FAILURES_IN_A_ROW = 3
_NEWEST = 0.1
"""Weight of one step in the mean time between tokens, which so follows the last 10 to 20 steps."""


class EngineCore:
    """A `Core` around pdserve's scheduler and any `Executor`.

    A step takes as long as the executor's `execute` does. A core that knows beforehand when its
    steps end (the sim engine's) is derived from this class and calls its parts.
    """

    def __init__(self, executor: Executor, clock: Clock, mover: KvConnector | None = None) -> None:
        """`mover` None: the core neither sends nor receives KV."""
        self.wake: Callable[[], None] = lambda: None
        """Called from any thread when `has_work` has become true without a command."""
        self.tick: Callable[[int], None] | None = None
        """Passed to the executor with every plan; see `StepPlan.tick`."""
        self.on_freed: Callable[[int, str], None] = lambda handle, phase: None
        """Called once for every abort, when the submission holds nothing any more, with what it was
        doing when it was aborted."""
        self.make_tier_io: MakeTierIo = threads
        """Makes what copies blocks between tiers."""
        self._aborted: dict[int, str] = {}
        """Aborted submissions that still hold blocks, with what they were doing."""
        self._executor = executor
        self._clock = clock
        self._mover = mover
        self._incoming: KvReceiver | None = None
        self._outgoing: KvSender | None = None
        self._fetches: KvFetches | None = None
        self._uses: DeviceUses | None = None
        """How cached blocks were used. None if lower tiers keep that, or KV is not transferred."""
        self._region: Region | None = None
        """The KV storage that the connector reads and writes."""
        self._moved = False
        """Whether the connector has events."""
        self._tiers: CoreTiers | None = None
        self._onboarder: Onboarder | None = None
        self._early: EarlyStarts | None = None
        self._pipeline: StepPipeline | None = None
        """Begins steps before the last one has ended; None: every step is computed at once."""
        self._fetch_lane: FetchLane | None = None
        self._step_cost = StepCost()
        self._copied = False
        """Whether the lower tiers have something to take in."""
        self._events: list[Event] = []
        self._deltas: list[TokenDelta] = []
        self._steps = 0
        self._step_seconds: Seconds = 0.0
        self._itl: Seconds = 0.0
        self._failures = 0
        self._broken = ""
        """Why the executor cannot go on; empty: it can."""
        self._stats_at: Seconds = clock.now()
        self._changed = False

    # ------------------------------------------------------------------ loading

    def load(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Load the model, size the KV pool and allocate it. Raises `ConfigError`, or what the
        executor raises."""
        check_loras(spec, able=getattr(self._executor, "loads_loras", False))
        info = self._executor.load(
            spec, lambda stage, fraction: progress(LoadProgress(stage=stage, fraction=fraction))
        )
        sizing = size_pool(spec, info)
        limits = SchedulerLimits(
            max_model_len=sizing.max_model_len,
            vocab_size=info.vocab_size,
            max_batch_tokens=spec.max_batch_tokens,
            max_sequences=spec.max_sequences,
            max_waiting=spec.max_waiting,
            unfilled=spec.transfer.unfilled if spec.transfer is not None else 0.0,
            embeds=info.embedding_size > 0,
            generates=info.generates,
            classifies=info.num_labels > 0,
        )
        progress(LoadProgress(stage="allocating KV blocks"))
        self._executor.allocate(sizing.num_blocks)
        self.pool = BlockPool(sizing.num_blocks, info.layout.block_size)
        self._names = _names(spec, info)
        self._loras = tuple(one.id for one in spec.loras)
        self.scheduler = Scheduler(self.pool, limits, self._names)
        self._pace = PrefillBudget(limits.max_batch_tokens, slow=info.device.startswith("cpu"))
        self.scheduler.prefill_tokens = self._pace.tokens
        self._beside = MixedStepBudget(spec.itl_target, limits.max_batch_tokens)
        self.scheduler.prefill_tokens_beside = self._beside.tokens
        self.scheduler.steerable = getattr(self._executor, "ready", None)
        if getattr(self._executor, "runs_ahead", False):
            device = cast("SupportsRunAhead", self._executor)
            self._pipeline = StepPipeline(device, self.scheduler, self._fail)
        if self._mover is not None:
            progress(LoadProgress(stage="registering KV blocks"))
        transfers = self._start_moving(spec)
        tiers = self._start_tiers(spec, info)
        layers = self._loaded_layers(info)
        if missing := getattr(self._executor, "graphs_missing", ""):
            info = replace(info, slow_kernels=info.slow_kernels or missing)
        return _capabilities(spec, info, limits, sizing, transfers, tiers, layers)

    def _start_tiers(self, spec: EngineSpec, info: ModelInfo) -> tuple[str, ...]:
        """Open the tiers below the device, and what brings blocks from there and from peers.
        Returns the tiers' names. Raises `ConfigError` if a tier is impossible here."""
        if self._names is None or (spec.tiers is None and self._incoming is None):
            if spec.tiers is not None and spec.tiers.is_used:
                raise ConfigError("KV tiers need the prefix cache: leave out --prefix-cache=off")
            return ()
        settings = spec.tiers or TierSpec()
        if settings.is_used:
            storage = self._open_storage(settings, info, self._names.id)
            now = self._clock.now()
            self._tiers = CoreTiers(settings, storage, self.pool, self.scheduler, now)
            self._tiers.start(self._on_copied)
            # The first step tells what an earlier life has left on disk.
            self._changed = True
            if self._fetches is not None:
                self._fetches.uses, self._uses = self._tiers, None
        planner = FetchPlanner(
            self._step_cost,
            self._lane_estimates,
            block_tokens=self.pool.block_size,
            block_bytes=info.layout.block_bytes,
            mode=settings.fetch,
            layers=self._loaded_layers(info),
        )
        lower = None if self._tiers is None else self._tiers.lower
        self._onboarder = Onboarder(self.pool, lower, planner, self._on_onboarded)
        self._onboarder.puller = self._puller
        if self._tiers is not None:
            self._onboarder.came = self._tiers.came
        if self._puller is not None and settings.fetch != "never":
            self._onboarder.lane = self._fetch_lane = FetchLane(info.layout.block_bytes)
        self._onboarder.plans = PlanTally(self._sources(settings))
        if lower is not None:
            self._start_early(lower, self._onboarder, info)
        if lower is not None and self._fetches is not None:
            self._fetches.server.stage = Stager(self.pool, lower, self._onboarder)
        self.scheduler.onboarder = self._onboarder
        return settings.names

    def _sources(self, settings: TierSpec) -> Iterator[SourceName]:
        """From where this core can fetch blocks."""
        if self._tiers is not None:
            yield "host"
            if settings.disk_path:
                yield "disk"
        if self._fetch_lane is not None:
            yield "peer"

    def _start_early(self, lower: LowerTiers, onboarder: Onboarder, info: ModelInfo) -> None:
        """Let sequences run before all layers of their blocks have come."""
        early = EarlyStarts(self.scheduler, onboarder, lower, self._step_cost, self._clock)
        if self._outgoing is not None:
            early.is_sent = self._outgoing.holds
        onboarder.early = self._early = early
        if layers := self._loaded_layers(info):
            lower.layers = LayerGroups(layers, info.layout.block_bytes)

    def _loaded_layers(self, info: ModelInfo) -> int:
        """As `EngineCapabilities.kv_layers`."""
        able = self._tiers is not None and getattr(self._executor, "loads_layers", False)
        return info.layout.num_layers if able else 0

    def _open_storage(self, spec: TierSpec, info: ModelInfo, secret_id: bytes) -> TierStorage:
        return open_storage(spec, info, self._executor, secret_id, self.make_tier_io)

    def _lane_estimates(self) -> Mapping[LaneName, LaneEstimate]:
        known = {} if self._tiers is None else self._tiers.lane_estimates()
        return known if self._fetch_lane is None else known | {"fetch": self._fetch_lane.estimate()}

    def _lanes(self) -> tuple[LaneLoad, ...]:
        known = () if self._tiers is None else self._tiers.lanes()
        return known if self._fetch_lane is None else (*known, self._fetch_lane.load())

    def _on_onboarded(self, sequence: EngineSequence, onboarding: BlockFetch) -> None:
        self.scheduler.onboarded(sequence, onboarding, self._clock.now())

    def _on_copied(self) -> None:
        self._copied = True
        self.wake()

    def _start_moving(self, spec: EngineSpec) -> tuple[str, ...]:
        """Start the connector; returns its usable back ends, or none if KV transfer is off, or is
        optional and impossible here. Raises `ConfigError` if this engine cannot transfer KV, and as
        `KvConnector.start` does."""
        mover = self._mover
        if mover is None or spec.transfer is None:
            return ()
        try:
            region, transfers = self._open_pool(spec.engine, mover)
        except ConfigError as error:
            if not spec.transfer.optional:
                raise
            _log.info("KV transfer is off for this worker: %s", error.message)
            return ()
        scheduler, pool, verify = self.scheduler, self.pool, spec.transfer.verify
        self._incoming = KvReceiver(scheduler, pool, mover, region, verify, self._say)
        self._outgoing = KvSender(scheduler, pool, mover, region, verify, self._say)
        self._uses = DeviceUses(scheduler.owner_mark)
        scheduler.left = self._uses.left
        self._fetches = KvFetches(pool, mover, region, self._say, self._uses)
        return transfers

    def _open_pool(self, engine: str, mover: KvConnector) -> tuple[Region, tuple[str, ...]]:
        """Give the executor's KV storage to the connector, for as long as the core lives."""
        region = self._executor.region() if hasattr(self._executor, "region") else None
        if region is None:
            raise kv_transfer_unsupported(engine)
        self._region = region
        return region, mover.start(region, self._on_moved)

    @property
    def _puller(self) -> KvPuller | None:
        """Fetches blocks for requests that wait for them; None: this core fetches none."""
        return None if self._fetches is None else self._fetches.puller

    def _on_moved(self) -> None:
        self._moved = True
        self.wake()

    # ------------------------------------------------------------------ commands

    def handle(self, command: Command) -> None:
        """Take a command in; its results come from `step`. A submission that cannot be served ends
        with a `Rejected` event."""
        if isinstance(command, Submit | SubmitRemote | PrefillForPeer):
            self._expect(command.request.sampling)
        match command:
            case Submit():
                self._submit(command)
            case Abort():
                self._abort(command.handle)
            case QueryStats():
                self._events.append(Stats(stats=self.stats()))
            case ClearCache():
                self._settle_step()
                self.pool.clear()
                if self._tiers is not None:
                    self._tiers.clear()
                self._changed = True
            case DropKv():
                self._drop_kv(command)
            case SetHashSecret():
                self._rekey(command.hash_secret)
            case (
                SubmitRemote()
                | PrefillForPeer()
                | OpenAttemptBlocks()
                | Activate()
                | AbortAttempt()
                | PrefillLocally()
            ):
                self._hand_over(command)
            case SetNodeLife():
                if self._mover is not None and self._incoming is not None:
                    self._mover.attach(NodeLife(NodeId(command.node), command.epoch))
            case PeerGone():
                self._peer_gone(command)
            case KvPullAnswer() | ServeKvPull() | StopKvPull() | AbsorbKv() | ListKvChains():
                self._fetch(command)
            case _:
                raise ValueError(f"{type(command).__name__} is for the host")

    def _hand_over(
        self,
        command: SubmitRemote
        | PrefillForPeer
        | OpenAttemptBlocks
        | Activate
        | AbortAttempt
        | PrefillLocally,
    ) -> None:
        """Handle the commands for prompts that one worker prefills and another decodes."""
        incoming, outgoing = self._incoming, self._outgoing
        now = self._clock.now()
        self._changed = True
        if incoming is None or outgoing is None:
            if isinstance(command, SubmitRemote | PrefillForPeer):
                error = TransferRefused("this engine neither sends KV nor receives any")
                self._reject(command.handle, error)
            return
        try:
            match command:
                case SubmitRemote():
                    self.scheduler.submit_remote(command.handle, command.request, now)
                case PrefillForPeer():
                    outgoing.submit(command, now)
                case OpenAttemptBlocks():
                    incoming.open(command, now)
                case Activate():
                    self._add(incoming.activate(command, now))
                case AbortAttempt():
                    incoming.give_up(command.handle, command.attempt)
                case PrefillLocally():
                    incoming.prefill_here(command.handle)
        except PdserveError as error:
            self._reject(command.handle, error)

    def _peer_gone(self, command: PeerGone) -> None:
        """End the fetches from and for a peer. The node has told the transports itself."""
        if self._fetches is None:
            return
        self._fetches.peer_gone(command, self._clock.now())
        if self._onboarder is not None and not command.returns:
            self._onboarder.peer_gone(command.node, command.epoch)

    def _drop_kv(self, command: DropKv) -> None:
        self._settle_step()
        lower, now = self._tiers, self._clock.now()
        self._events.append(drop_kv(command, self.pool, self._names, self._loras, lower, now))
        self._changed = True

    def _fetch(self, command: FetchCommand) -> None:
        self._changed = True
        if self._fetches is not None:
            self._fetches.take(command, self._clock.now())
        elif (refusal := refusal_of(command)) is not None:
            self._events.append(refusal)

    def _abort(self, handle: int) -> None:
        phase = self.scheduler.phase(handle)
        if not phase and self._outgoing is not None and self._outgoing.holds(handle):
            phase = "sending"
        self._end_transfers(handle)
        self._changed |= self.scheduler.abort(handle)
        self._unsay(handle)
        if self._outgoing is not None:
            self._outgoing.abort(handle)
        self._aborted[handle] = phase
        self._note_freed({handle})

    def _note_freed(self, handles: Iterable[int]) -> None:
        """Report those of these submissions that were aborted and now hold no blocks."""
        incoming, outgoing = self._incoming, self._outgoing
        for handle in self._aborted.keys() & handles:
            held = incoming is not None and incoming.holds(handle)
            held = held or (self._pipeline is not None and self._pipeline.holds(handle))
            if not held and not (outgoing is not None and outgoing.holds(handle)):
                self.on_freed(handle, self._aborted.pop(handle))

    def _end_transfers(self, handle: int) -> None:
        """Abort the attempt of a submission that ends."""
        if self._incoming is not None:
            self._incoming.give_up(handle)

    def _submit(self, command: Submit) -> None:
        try:
            now, counted = self._clock.now(), command.counted
            ended = self.scheduler.submit(command.handle, command.request, now, counted=counted)
        except PdserveError as error:
            self._reject(command.handle, error)
        else:
            self._deltas += ended

    def _expect(self, sampling: SamplingParams) -> None:
        expect = getattr(self._executor, "expect", None)
        if expect is not None and sampling.grammar:
            expect(sampling)

    def _rekey(self, secret: bytes) -> None:
        names = self._names
        if names is None or names.id == hash_secret_id(secret):
            return
        self._names = names.with_secret(secret)
        self.scheduler.rename(self._names)
        if self._fetches is not None:
            self._fetches.renamed(self._clock.now())
        if self._tiers is not None:
            self._tiers.rename(self._names.id)
        self._changed = True

    def _reject(self, handle: int, error: PdserveError) -> None:
        if self._incoming is not None:
            self._incoming.give_up(handle)
        if self._outgoing is not None:
            self._outgoing.fail(handle)
        self._say(rejected_event(handle, error))

    def _say(self, event: Event) -> None:
        """Append an event, behind all output produced before it."""
        self._say_deltas()
        self._events.append(event)

    def _add(self, deltas: list[TokenDelta]) -> None:
        """Append deltas to the step's output."""
        self._deltas += deltas

    def _say_deltas(self) -> None:
        if self._deltas:
            self._events.append(StepOutput(deltas=self._deltas))
            self._deltas = []

    def _unsay(self, handle: int) -> None:
        """Drop all events of an aborted submission that were not sent yet."""
        self._say_deltas()
        kept: list[Event] = []
        for event in self._events:
            if isinstance(event, StepOutput):
                deltas = [delta for delta in event.deltas if delta.handle != handle]
                if deltas:
                    kept.append(StepOutput(deltas=deltas))
            elif getattr(event, "handle", None) != handle:
                kept.append(event)
        self._events = kept

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to compute or to report."""
        if self._broken:
            return bool(self._events)
        if self._moved or self._copied or (self._tiers is not None and self._tiers.has_events):
            return True
        if self._incoming is not None and self._incoming.has_work:
            return True
        if self._fetches is not None and self._fetches.has_work:
            return True
        if self._pipeline is not None and self._pipeline.is_busy:
            return True
        return self.scheduler.has_work or bool(self._events or self._deltas) or self._changed

    def wake_at(self) -> Seconds | None:
        """The next deadline of a request or an attempt; None: there is none."""
        parts = (self.scheduler, self._incoming, self._fetches, self._tiers)
        times = (part.next_deadline() for part in parts if part is not None)
        return min((time for time in times if time is not None), default=None)

    @property
    def health_interval(self) -> Seconds | None:
        """Seconds between two calls of `check_health`; None: none is needed."""
        interval: Seconds | None = getattr(self._executor, "health_interval", None)
        return interval

    def check_health(self) -> None:
        """Notice that another process of the executor is lost; the next step ends the core then."""
        if self._broken:
            return
        try:
            cast("SupportsHealthChecks", self._executor).check_health()
        except EngineDied as error:
            self._broken = error.message
            self._events.append(Stats(stats=self.stats()))  # and `CoreFailed` follows

    def step(self) -> list[Event]:
        """Drop expired requests, plan and compute one step, and return its events. With a device
        that runs ahead, the step may have been planned before, and the next one may be under way
        on return."""
        started = self._clock.now()
        if self._incoming is not None:
            self._take_moved(self._poll(), started)
        self._expire(started)
        self._advance_moves(started)
        pipeline = self._pipeline
        if pipeline is not None and pipeline.is_busy and not self._broken:
            self._turn(pipeline)
        elif self.scheduler.has_work and not self._broken:
            plan = self._plan(started)
            if pipeline is not None and pipeline.begin(plan, started):
                self._turn(pipeline)
            elif plan.chunks:
                self._compute(plan, started)
            elif self.scheduler.unsteered:
                cast("SupportsGrammarPrefetch", self._executor).wait_ready(_BREATH)
        self._release()
        self._report(self._clock.now())
        events, self._events = self._events, []
        return events

    def _advance_moves(self, now: Seconds) -> None:
        """Do what transfers have to do between two steps."""
        self._advance_tiers(now)
        if self._incoming is not None:
            self._incoming.advance(now)
        if self._fetches is not None:
            self._fetches.advance(now, busy=self.scheduler.has_work)

    def _advance_tiers(self, now: Seconds) -> None:
        """Take in what lower tiers have copied, and let them go on."""
        if self._onboarder is not None:
            self._onboarder.now = now
        if self._fetch_lane is not None:
            self._fetch_lane.age(now)
        if self._tiers is None:
            return
        assert self._onboarder is not None
        self._changed |= self._copied
        self._copied = False
        self._tiers.advance(now, self._onboarder)

    def _clean(self, now: Seconds) -> None:
        """Store device blocks on lower tiers before they are evicted."""
        if self._tiers is not None:
            size = self.pool.block_size
            soon = self.scheduler.limits.max_batch_tokens // size
            self._tiers.clean(soon, now, busy=self.scheduler.has_work)

    def _plan(self, now: Seconds) -> StepPlan:
        plan = self.scheduler.schedule(now)
        plan.tick = self.tick
        self._release()
        if self._early is not None:
            self._early.guard(plan, now)
        if self._outgoing is not None and self._outgoing.active:
            self._outgoing.planned(plan)
        return plan

    def _poll(self) -> list[ConnectorEvent]:
        """Return the connector's events since the last call."""
        if not self._moved or self._mover is None:
            return []
        self._moved = False
        return self._mover.poll()

    def _take_moved(self, events: list[ConnectorEvent], now: Seconds) -> None:
        assert self._incoming is not None
        assert self._outgoing is not None
        touched: set[int] = set()
        for event in events:
            self._changed = True
            if self._fetches is not None and self._fetches.owns(event):
                self._fetches.moved(event, now)
            elif isinstance(event, PartDelivered):
                self._outgoing.delivered(event)
                touched.add(event.handle)
            else:
                self._add(self._incoming.moved(event, now))
                touched.add(event.key.handle)
        if self._aborted:
            self._note_freed(touched)

    def _expire(self, now: Seconds) -> None:
        deadline = self.scheduler.next_deadline()
        if deadline is None or deadline > now:
            return
        self._changed = True
        for late in self.scheduler.expire(now):
            self._reject(late.handle, DeadlineExceeded(f"the deadline passed while {late.stage}"))

    def _release(self) -> None:
        released = self.scheduler.take_released()
        if released:
            self._executor.release(released)

    def _compute(self, plan: StepPlan, started: Seconds) -> None:
        result = self._execute(plan)
        if result is not None:
            now = self._clock.now()
            self._take(plan, result, now - started, now)

    def _turn(self, pipeline: StepPipeline) -> None:
        """Take in the step that the device computes, while it computes the next."""
        self._changed = True
        freed = pipeline.turn(self._take, self._clock.now, self.tick)
        if freed:
            self._note_freed(freed)

    def _settle_step(self) -> None:
        """Let blocks of requests that have ended be cached or free, and not held for a step."""
        if self._pipeline is not None:
            self._note_freed(self._pipeline.settle())

    def _execute(self, plan: StepPlan) -> StepResult | None:
        """Compute the plan; None if the step failed, after its requests have got the error."""
        self._changed = True
        try:
            result = self._executor.execute(plan)
            _check_result(plan, result)
        except Exception as error:
            # Any error fails this step, not the core.
            self._fail(plan, error)
            return None
        return result

    def _take(self, plan: StepPlan, result: StepResult, took: Seconds, now: Seconds) -> None:
        """Take in the result of a step that took `took` seconds."""
        # A plan lists decodes first, so its first chunk shows whether it has any.
        decodes = plan.chunks[0].sequence.first_token is not None
        tokens = plan.num_tokens
        if isinstance(plan.gate, StepGate):
            plan, result = self._settle(plan, result, plan.gate, now)
        else:  # one that waits says nothing about computing
            self._pace.note(tokens, took)
            if decodes:  # each chunk of a stream is one token
                self._beside.note(tokens - len(plan.chunks), took)
            if self._onboarder is not None:
                self._step_cost.note(plan, tokens, took)
        self.scheduler.prefill_tokens = self._pace.tokens
        self.scheduler.prefill_tokens_beside = self._beside.tokens
        if result.faults:
            plan, result = self._set_aside(plan, result)
        self._count(took, decodes)
        outgoing = self._outgoing
        if outgoing is None or not outgoing.active:
            self._deltas += self.scheduler.complete(plan, result, now, took)
        else:
            outgoing.computed(plan)
            self._add(outgoing.take(self.scheduler.complete(plan, result, now, took)))

    def _settle(
        self, plan: StepPlan, result: StepResult, gate: StepGate, now: Seconds
    ) -> tuple[StepPlan, StepResult]:
        """Take in the layers that the step has waited for; returns the step without the sequences
        whose layers have not come."""
        assert self._early is not None
        early = [each.sequence for each in plan.chunks if each.sequence.early is not None]
        gone = self._early.settle(early, gate, lambda: self._advance_tiers(now))
        return result.less(plan, lambda sequence: sequence in gone) if gone else (plan, result)

    def _set_aside(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        """End the submissions that have a fault; returns the rest of the step."""
        faults: set[int] = set()
        for index, why in result.faults.items():
            sequence = plan.chunks[index].sequence
            handle = sequence.handle
            if handle in faults:
                continue
            named = about(sequence.request, handle=handle)
            faults.add(handle)
            self.scheduler.drop(handle, trusted=index in result.sound)
            if index in result.lasting:
                _log.warning("a request ends with an error: %s", why, extra=named)
                self._reject(handle, InvalidRequest(f"the answer cannot be continued: {why}"))
                continue
            _log.error(
                "a request failed in a step of %d tokens: %s", plan.num_tokens, why, extra=named
            )
            self._reject(handle, StepFailed(f"the engine failed to compute this request: {why}"))
        return result.less(plan, lambda sequence: sequence.handle in faults)

    def _count(self, took: Seconds, decodes: bool) -> None:
        self._failures = 0
        if decodes:
            self._itl += (took - self._itl) * (_NEWEST if self._itl else 1.0)
        self._steps += 1
        self._step_seconds += took

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        died = error.message if isinstance(error, EngineDied) else ""
        if died:  # where the step was then says nothing more
            _log.error("a step of %d tokens failed: %s", plan.num_tokens, died)
        else:
            _log.error("a step of %d tokens failed", plan.num_tokens, exc_info=error)
        record = failed_event(error)
        for handle in self.scheduler.fail(plan):
            message = f"the engine failed while computing a step: {record.message}"
            self._reject(handle, StepFailed(message))
        self._failures += 1
        if died:
            self._broken = died
        elif self._failures >= _FAILURES_IN_A_ROW:
            self._broken = (
                f"{_FAILURES_IN_A_ROW} steps in a row failed, the last one: {record.message}"
            )

    def _report(self, now: Seconds) -> None:
        self._say_deltas()
        stored = self.pool.drain_events()
        if self._uses is not None:
            self._uses.follow(stored)
        if self._tiers is not None:
            stored += self._tiers.follow(stored, now)
            self._clean(now)
        if stored:
            self._events.append(KvEvents(events=stored))
        idle = not self.scheduler.has_work
        if self._changed and (idle or now - self._stats_at >= STATS_INTERVAL):
            self._stats_at, self._changed = now, False
            self._events.append(Stats(stats=self.stats()))
        if self._broken:
            self._events.append(failed_event(EngineDied(self._broken)))

    # ------------------------------------------------------------------ reading and ending

    def stats(self) -> EngineStats:
        """A snapshot of the stats."""
        scheduler, counts = self.scheduler, self.pool.counts()
        counters = scheduler.counters
        stats = EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            blocks_total=self.pool.num_blocks,
            blocks_free=counts.free,
            blocks_cached=counts.cached,
            blocks_used=counts.used,
            blocks_quarantined=counts.quarantined,
            steps=self._steps,
            step_seconds=self._step_seconds,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            received_tokens=counters.received_tokens,
            computed_tokens=counters.computed_tokens,
            output_tokens=counters.output_tokens,
            preemptions=counters.preemptions,
            aborted=counters.aborted,
            finished=counters.finished,
            uncomputed_tokens=scheduler.uncomputed(),
            kv_tokens=sum(sequence.num_computed for sequence in scheduler.running),
            itl=self._itl,
            tiers=self._tier_stats(),
            lanes=self._lanes(),
            steps_ahead=0 if self._pipeline is None else self._pipeline.steps_ahead,
            graph_steps=getattr(self._executor, "graph_steps", 0),
            eager_decodes=getattr(self._executor, "eager_decodes", 0),
        )
        if self._onboarder is not None:
            stats = self._onboarder.add_stats(stats)
        return stats if self._incoming is None else self._with_transfers(stats, self._incoming)

    def _tier_stats(self) -> tuple[TierStats, ...]:
        if self._tiers is None or self._early is None:
            return ()
        host, *others = self._tiers.stats(self._clock.now())
        return (self._early.add_stats(host), *others)

    def _with_transfers(self, stats: EngineStats, incoming: KvReceiver) -> EngineStats:
        outgoing = self._outgoing
        assert outgoing is not None
        if self._fetches is not None:
            stats = self._fetches.add_stats(stats)
        return msgspec.structs.replace(
            stats,
            remote=len(self.scheduler.reservations),
            sending=outgoing.sending,
            received_blocks=incoming.received_blocks,
            received_bytes=incoming.received_bytes,
            sent_blocks=outgoing.sent_blocks,
            sent_bytes=outgoing.sent_bytes,
            attempts=incoming.opened,
            attempts_failed=incoming.failed,
        )

    def close(self) -> int:
        """Drop and free everything; returns leaked KV blocks. Allowed at any time, also when `load`
        failed or never ran. No KV is transferred after it. Raises `EngineError` if transfers cannot
        be ended; the memory then stays allocated."""
        if self._mover is not None:
            self._mover.close()
        if self._tiers is not None:
            self._tiers.end()
        try:
            return self._end_all() if hasattr(self, "scheduler") else 0
        finally:
            if self._tiers is not None:
                self._tiers.close()
            for pool in () if self._region is None else self._region.pools:
                if pool.view is not None:
                    pool.view.release()
            self._executor.close()

    def _end_all(self) -> int:
        if self._pipeline is not None:
            self._pipeline.drain()
        for handle in self.scheduler.handles():
            self._end_transfers(handle)
            self.scheduler.abort(handle)
        if self._incoming is not None:
            self._incoming.fenced()
        if self._outgoing is not None:
            self._outgoing.fenced()
        if self._fetches is not None:
            self._fetches.fenced(self._clock.now())
        if self._onboarder is not None:
            self._onboarder.close(self._clock.now())
        self._release()
        self.pool.check()
        return self.pool.counts().used


def _names(spec: EngineSpec, info: ModelInfo) -> BlockHasher | None:
    """The hasher of the core's blocks; None without prefix cache. Without a given secret a random
    one does, since no other worker's hashes must match."""
    if not spec.prefix_cache:
        return None
    secret = spec.hash_secret or secrets.token_bytes(32)
    return BlockHasher(secret, info.layout.block_size, info.compat_hash)


def _check_result(plan: StepPlan, result: StepResult) -> None:
    wanted = sum(chunk.samples for chunk in plan.chunks)
    if len(result.tokens) != wanted or len(result.logprobs) != wanted:
        raise EngineError(
            f"the executor returned {len(result.tokens)} tokens and {len(result.logprobs)} "
            f"logprobs for {wanted} sampling chunks"
        )
    if wanted == len(plan.chunks):
        return
    vectors = {index for index, chunk in enumerate(plan.chunks) if chunk.vector}
    if vectors - result.faults.keys() != result.embeddings.keys() - result.faults.keys():
        raise EngineError("the executor's embeddings do not match the finished sequences")


def _capabilities(
    spec: EngineSpec,
    info: ModelInfo,
    limits: SchedulerLimits,
    sizing: PoolSizing,
    transfers: tuple[str, ...],
    tiers: tuple[str, ...],
    kv_layers: int,
) -> EngineCapabilities:
    return EngineCapabilities(
        engine=spec.engine,
        model_type=info.model_type,
        dtype=info.dtype,
        device=info.device,
        max_model_len=limits.max_model_len,
        vocab_size=info.vocab_size,
        block_size=info.layout.block_size,
        num_blocks=sizing.num_blocks,
        block_bytes=info.layout.block_bytes,
        max_batch_tokens=limits.max_batch_tokens,
        max_sequences=limits.max_sequences,
        prompt_logprobs=info.prompt_logprobs,
        kv_events=spec.prefix_cache,
        eos_token_ids=info.eos_token_ids,
        weight_bytes=info.weight_bytes,
        compat_hash=info.compat_hash,
        transfers=transfers,
        features=(
            *info.features,
            *(("embeddings",) if info.embedding_size else ()),
            *(("classify",) if info.num_labels else ()),
        ),
        embedding_size=info.embedding_size,
        num_labels=info.num_labels,
        reduced=sizing.warning or "",
        tiers=tiers,
        kv_layers=kv_layers,
        slow_kernels=info.slow_kernels,
        ranks=info.ranks,
    )
