"""Runs a worker without a cluster: finds the model and owns the engine.

Users of the service call its `engine` directly: one object for the service's whole life, which
restarts by itself after a failure. This service decides how that looks from outside. It knows
neither HTTP nor text nor clusters (`agent` does). Its owner starts, drains and stops it, in this
order.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from pdserve.blocks.hashing import hash_secret_id
from pdserve.clock import SystemClock
from pdserve.engine.port import Engine, EngineState
from pdserve.errors import Draining, NotReady
from pdserve.limits.process_usage import UsageReader, process_state
from pdserve.messages.engine import EngineSpec
from pdserve.messages.kv_events import TIERS
from pdserve.messages.lora import LoraSummary
from pdserve.messages.status import RankStatus
from pdserve.net.timers import Timers
from pdserve.observe.engine_metrics import EngineSample
from pdserve.observe.tier_metrics import MissSample
from pdserve.runtime.paced_timer import PacedTimer
from pdserve.worker.cumulative_stats import CumulativeStats
from pdserve.worker.lora import check_names, read_adapters
from pdserve.worker.model_source import CheckpointSource
from pdserve.worker.tiers.reports import lane_sample, plan_sample, tier_report, tier_sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.ids import Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.engine import EngineStats, LoadProgress
    from pdserve.messages.lora import LoraAdapter
    from pdserve.messages.status import TierReport
    from pdserve.observe.metrics import Metrics
    from pdserve.worker.config import WorkerConfig
    from pdserve.worker.mode.jobs import LiveMode
    from pdserve.worker.model import LocalModel, ProgressFn
    from pdserve.worker.model_source import ModelSource

_log = logging.getLogger(__name__)

_WATCH_INTERVAL: Seconds = 1.0
"""Seconds between two reads of the engine's statistics, which are about that old themselves."""
_RETRY_AFTER: Seconds = 1.0


class SupervisedEngine(Engine, Protocol):
    """An engine that restarts itself after a failure and reports its health."""

    @property
    def state(self) -> EngineState: ...

    @property
    def state_reason(self) -> str:
        """The reason for its present state, in words."""
        ...

    @property
    def restarts(self) -> int:
        """Number of restarts."""
        ...

    @property
    def stalls(self) -> int:
        """Number of times it was ended because it had stalled."""
        ...

    @property
    def stalled_for(self) -> Seconds:
        """Seconds without progress although there was work to do."""
        ...

    @property
    def pid(self) -> int | None:
        """The id of its process; None: it has none, or none of its own."""
        ...

    def set_model(self, path: str, loras: tuple[LoraAdapter, ...] = ()) -> None:
        """Load the model in this directory, and these adapters; before `start`, if its spec names
        none."""
        ...


class WorkerService:
    """One worker: a model and an engine."""

    engine: SupervisedEngine
    """The engine, the same object for the service's whole life. Before `start` it refuses requests
    and accepts all other calls of the port."""

    def __init__(
        self,
        config: WorkerConfig,
        make_engine: Callable[[EngineSpec], SupervisedEngine],
        metrics: Metrics,
        *,
        source: ModelSource | None = None,
    ) -> None:
        """`make_engine` is called once, here; its spec names neither the model, see `set_model`,
        nor the secret of block hashes, see `rekey`. `source` None: the checkpoint that `config`
        names.
        """
        # The worker's life
        self.config = config
        self.metrics = metrics
        self._source = CheckpointSource(config) if source is None else source
        self._hash_secret = b""
        self._stage = "not started"
        self._model_name = config.served_model_name[0] if config.served_model_name else ""
        self._draining = False
        self.mode: LiveMode = config.mode
        """The present mode. The agent changes it."""
        self.changing = ""
        """How its mode is changing, in words; empty: it is not."""
        self.leaving = False
        """True while it takes no requests because its mode changes."""
        self._totals = CumulativeStats()
        self._usage = UsageReader(SystemClock().now)
        self._timers: Timers | None = None
        self._watch_paced: PacedTimer | None = None
        self._seen: EngineStats | None = None
        """The statistics at the last look."""
        self._engine_begun = False
        """The engine's `start` was called."""
        self.on_second: Callable[[], None] = lambda: None
        """Called about once a second after the start, less often while the engine reports nothing
        new; must be quick and must not raise."""
        self.engine = make_engine(self._spec())
        metrics.attach_engine(self.sample)
        # From the moment the model has loaded
        self._cards: dict[str, ModelCard] = {}

    # ------------------------------------------------------------------ life

    async def start(self, on_progress: ProgressFn) -> None:
        """Finds and loads the model and builds its card; returns when requests can be served.

        Errors: `ConfigError` and its subclasses for settings that cannot work, `EngineDied`.
        Cancellation: stops what was started.
        """

        def note(stage: str, fraction: float | None) -> None:
            self._stage = stage
            on_progress(stage, fraction)

        model = await self._source.find(note)
        self._model_name = self._model_name or model.name
        loras = await self._read_adapters(model, note)
        self.engine.set_model(str(model.path), loras)
        self._engine_begun = True

        def forward(progress: LoadProgress) -> None:
            note(progress.stage, progress.fraction)

        await self.engine.start(forward)
        self._timers = Timers(asyncio.get_running_loop())
        self._watch_paced = PacedTimer(self._timers, _WATCH_INTERVAL, self._watch)
        self._watch_paced.start()
        await self._make_card(model, loras)

    def drain(self) -> None:
        """Takes no new requests. Running ones go on, and prompts may still be prefilled for those
        that move to another worker.
        """
        self._draining = True

    def undo_drain(self) -> None:
        """Takes requests again."""
        self._draining = False

    async def stop(self) -> None:
        """Ends the engine and all its requests. Idempotent."""
        self._draining = True
        if self._timers is not None:
            self._timers.close()
            self._timers = self._watch_paced = None
        if self._engine_begun:
            await self.engine.stop()

    def _spec(self) -> EngineSpec:
        config = self.config
        return EngineSpec(
            engine=config.engine,
            model="",
            device=config.device,
            dtype=config.dtype,
            threads=config.threads,
            block_size=config.block_size,
            kv_memory=config.kv_memory,
            kv_share=config.kv_share,
            gpu_memory_utilization=config.gpu_memory_utilization,
            max_model_len=config.max_model_len,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            max_waiting=config.max_waiting,
            prefix_cache=config.prefix_cache,
            options=dict(config.engine_options),
            transfer=config.transfer,
            tiers=config.tiers,
            tensor_parallel=config.tensor_parallel,
            itl_target=config.itl_target,
        )

    async def _read_adapters(self, model: LocalModel, note: ProgressFn) -> tuple[LoraAdapter, ...]:
        """The adapters to load. Errors: `ConfigError`."""
        config = self.config
        if not config.loras:
            return ()
        check_names(config.loras, config.served_model_name or (model.name,))
        note("reading LoRA adapters", None)
        return await asyncio.to_thread(read_adapters, config.loras)

    async def _make_card(self, model: LocalModel, loras: tuple[LoraAdapter, ...]) -> None:
        capabilities = self.engine.capabilities
        if capabilities is None:
            reason = self.engine.state_reason
            raise NotReady(f"the engine was lost as soon as it was ready: {reason}")
        card = await self._source.describe(model, capabilities)
        if loras:
            served = tuple(LoraSummary(name=one.name, revision=one.revision) for one in loras)
            card = replace(card, loras=served)
        self._cards = dict.fromkeys((card.name, *card.aliases), card)

    def wake(self) -> None:
        """Notes that the engine is about to have new statistics: they are read soon. After a rest
        those until now are read first, so that windows of the last seconds begin here."""
        if self._watch_paced is not None and self._watch_paced.wake():
            _ = self._watch()

    def _watch(self) -> bool:
        """Reads the engine's statistics. Returns True if they have changed."""
        stats = self.engine.stats()
        seen, self._seen = self._seen, stats
        self._totals.note(stats)
        try:
            self.on_second()
        except Exception:
            _log.exception("what happens each second has failed")
        return stats is not seen

    # ------------------------------------------------------------------ requests

    def cards(self) -> Mapping[str, ModelCard]:
        """The served model under its name and each alias; empty until it has loaded once."""
        return self._cards

    def unready_reason(self) -> str | None:
        """The reason why requests cannot be served; None when they can."""
        if self._draining:
            return "draining: no new requests are taken"
        if self.leaving:
            return f"changing its mode: {self.changing}"
        engine = self.engine
        if engine.state in (EngineState.NEW, EngineState.LOADING):
            return f"starting: {self._stage}"
        if engine.state is not EngineState.READY:
            return f"{engine.state.phrase}: {engine.state_reason}"
        return None if self._cards else f"starting: {self._stage}"

    @property
    def draining(self) -> bool:
        """True once it takes no new requests."""
        return self._draining

    def check_accepts(self) -> None:
        """Checks that new requests may be submitted to the engine. Errors: `Draining`, `NotReady`
        while the model is being found.
        """
        if self._draining:
            raise Draining("this worker is shutting down and takes no new requests")
        if self.leaving:
            raise Draining(f"this worker changes its mode: {self.changing}", retry_after=1.0)
        if not self._engine_begun:
            raise NotReady(f"starting: {self._stage}", retry_after=_RETRY_AFTER)

    def rekey(self, hash_secret: bytes) -> None:
        """Hashes blocks with this secret from now on, also after restarts of the engine; before
        `start`, from the beginning."""
        self._hash_secret = hash_secret
        self.engine.rekey(hash_secret)

    @property
    def names_id(self) -> bytes:
        """Id of the secret that the engine hashes blocks with, or will once it has read its
        commands; empty: no secret, so the hashes mean nothing to other nodes.
        """
        return hash_secret_id(self._hash_secret) if self._hash_secret else b""

    @property
    def tells_kv(self) -> bool | None:
        """True if the KV events report every reusable block; None while no engine is loaded."""
        capabilities = self.engine.capabilities
        if capabilities is None:
            return None
        keeps = self.config.prefix_cache and capabilities.num_blocks > 0
        return capabilities.kv_events or not keeps

    # ------------------------------------------------------------------ for metrics and status

    def sample(self) -> EngineSample:
        """Updates the metrics for a scrape."""
        self._totals.note(self.engine.stats())
        stats = self._totals.snapshot()
        engine = self.engine
        usage = self._usage.read(engine.pid)
        block_bytes = 0 if engine.capabilities is None else engine.capabilities.block_bytes
        return EngineSample(
            model=self._model_name,
            mode=self.mode,
            ready=engine.state is EngineState.READY,
            running=stats.running,
            waiting=stats.waiting,
            block_tokens=0 if engine.capabilities is None else engine.capabilities.block_size,
            blocks_total=stats.blocks_total,
            blocks_used=stats.blocks_used,
            blocks_cached=stats.blocks_cached,
            blocks_quarantined=stats.blocks_quarantined,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            computed_tokens=stats.computed_tokens,
            output_tokens=stats.output_tokens,
            preemptions=stats.preemptions,
            inexact_continuations=stats.inexact_continuations,
            failed_loads=stats.failed_loads,
            images=stats.images,
            images_unexpected=stats.images_unexpected,
            steps=stats.steps,
            step_seconds=stats.step_seconds,
            steps_ahead=stats.steps_ahead,
            graph_steps=stats.graph_steps,
            eager_decodes=stats.eager_decodes,
            restarts=engine.restarts,
            stalls=engine.stalls,
            stalled_for=engine.stalled_for,
            pid=engine.pid,
            memory=usage.memory,
            cpu=usage.cpu,
            pulls=stats.pulls,
            pulled_bytes=stats.pulled_bytes,
            served_bytes=stats.served_bytes,
            tiers={TIERS[one.tier]: tier_sample(one, block_bytes) for one in stats.tiers},
            lanes={one.lane: lane_sample(one) for one in stats.lanes},
            plans={one.source: plan_sample(one) for one in stats.plans},
            misses={why: MissSample(blocks=count) for why, count in stats.missed_blocks.items()},
        )

    def ranks(self) -> tuple[RankStatus, ...]:
        """The tensor-parallel ranks of the engine, for status; none while it loads."""
        capabilities = self.engine.capabilities
        return tuple(
            RankStatus(rank=number, pid=one.pid, device=one.device, state=process_state(one.pid))
            for number, one in enumerate(() if capabilities is None else capabilities.ranks)
        )

    def tiers(self) -> tuple[TierReport, ...]:
        """The tiers below the device, for status."""
        capabilities = self.engine.capabilities
        block_bytes = 0 if capabilities is None else capabilities.block_bytes
        self._totals.note(self.engine.stats())
        return tuple(tier_report(one, block_bytes) for one in self._totals.snapshot().tiers)
