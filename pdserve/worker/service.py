"""The worker role: finds the model, owns the engine, answers for it.

It knows neither HTTP nor text nor clusters (`member` does). Its owner starts, drains and stops it,
in this order; a started engine restarts itself, and what that looks like from outside is decided
here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from pdserve.blocks.hashing import names_id
from pdserve.engine.api import Engine, EngineState
from pdserve.errors import Draining, NotReady
from pdserve.messages.engine import EngineSpec, EngineStats
from pdserve.observe.metrics import EngineSample
from pdserve.worker.card import read_card
from pdserve.worker.model import HubModel, LocalModel, ProgressFn, fetch, locate
from pdserve.worker.totals import EngineTotals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.engine.api import (
        Answered,
        AskPeer,
        Handle,
        PrefillSink,
        RemoteSink,
        TokenSink,
    )
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.engine import EngineCapabilities, PathState, Progress
    from pdserve.messages.handoff import Handoff, TransferAsk
    from pdserve.messages.kv import KvEvent
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.transfer import Ticket
    from pdserve.observe.metrics import Metrics
    from pdserve.worker.config import WorkerConfig

_WATCH_INTERVAL: Seconds = 1.0
"""Between two looks at the engine's statistics; they are about that old themselves."""
_RETRY_AFTER: Seconds = 1.0


class SupervisedEngine(Engine, Protocol):
    """An engine that restarts itself and says how it is."""

    @property
    def state(self) -> EngineState: ...

    @property
    def state_reason(self) -> str:
        """Why, in words."""
        ...

    @property
    def restarts(self) -> int:
        """How often it has been started again."""
        ...

    @property
    def stalls(self) -> int:
        """How often it was ended because it stood still."""
        ...

    @property
    def stalled_for(self) -> Seconds:
        """How long it has made no progress although it could."""
        ...


class WorkerService:
    """One worker."""

    def __init__(
        self,
        config: WorkerConfig,
        make_engine: Callable[[EngineSpec], SupervisedEngine],
        metrics: Metrics,
        *,
        hash_secret: bytes = b"",
    ) -> None:
        """`hash_secret` keys the block hashes and outlives the engine's restarts; see `rekey`."""
        # The worker's life
        self.config = config
        self.metrics = metrics
        self._make_engine = make_engine
        self._hash_secret = hash_secret
        self._stage = "not started"
        self._draining = False
        self._totals = EngineTotals()
        self._watcher: asyncio.Task[None] | None = None
        self._kv_listeners: list[Callable[[Sequence[KvEvent]], None]] = []
        self._ask_peer: AskPeer | None = None
        self._attached: tuple[NodeId, Epoch] | None = None
        metrics.attach_engine(self.sample)
        # From the moment the model is known
        self._engine: SupervisedEngine | None = None
        # From the moment it has loaded
        self._cards: dict[str, ModelCard] = {}

    # ------------------------------------------------------------------ life

    async def start(self, on_progress: ProgressFn) -> None:
        """Find the model, load it, make its card; returns when requests can be served.

        Errors: `ConfigError` and its kin for what can never work, `EngineDied`.
        Cancellation: what was started is stopped.
        """

        def note(stage: str, fraction: float | None) -> None:
            self._stage = stage
            on_progress(stage, fraction)

        model = await self._find(note)
        self._engine = engine = self._make_engine(self._spec(model))
        for listener in self._kv_listeners:
            engine.subscribe_kv(listener)
        if self._ask_peer is not None:
            engine.on_transfer(self._ask_peer)
        if self._attached is not None:
            engine.attach(*self._attached)

        def forward(progress: Progress) -> None:
            note(progress.stage, progress.fraction)

        await engine.start(forward)
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="worker-watch")
        await self._make_card(model, engine)

    def drain(self) -> None:
        """Take no new requests. What runs goes on, and prompts may still be prefilled for those
        that go on elsewhere."""
        self._draining = True

    async def stop(self) -> None:
        """End the engine and everything on it. Idempotent."""
        self._draining = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
            self._watcher = None
        if self._engine is not None:
            await self._engine.stop()

    async def _find(self, on_progress: ProgressFn) -> LocalModel:
        found = locate(self.config.model)
        if isinstance(found, HubModel):
            return await fetch(found, on_progress, self.config.download_dir)
        return found

    def _spec(self, model: LocalModel) -> EngineSpec:
        config = self.config
        return EngineSpec(
            engine=config.engine,
            model=str(model.path),
            device=config.device,
            dtype=config.dtype,
            threads=config.threads,
            block_size=config.block_size,
            kv_memory=config.kv_memory,
            kv_share=config.kv_share,
            max_model_len=config.max_model_len,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            max_waiting=config.max_waiting,
            prefix_cache=config.prefix_cache,
            hash_secret=self._hash_secret,
            options=dict(config.engine_options),
            transfer=config.transfer,
        )

    async def _make_card(self, model: LocalModel, engine: SupervisedEngine) -> None:
        capabilities = engine.capabilities
        if capabilities is None:
            raise NotReady(f"the engine was lost as soon as it was ready: {engine.state_reason}")
        names = self.config.served_model_name or (model.name,)
        card = await asyncio.to_thread(
            read_card,
            model.path,
            names,
            capabilities,
            tool_parser=self.config.tool_parser,
            reasoning_parser=self.config.reasoning_parser,
            pooling=self.config.pooling,
        )
        self._cards = dict.fromkeys((card.name, *card.aliases), card)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_INTERVAL)
            self._totals.note(self.statistics())

    # ------------------------------------------------------------------ requests

    def cards(self) -> Mapping[str, ModelCard]:
        """The served model under its name and each alias; empty until it has loaded once."""
        return self._cards

    def unready_reason(self) -> str | None:
        """None when requests can be served, else why not."""
        if self._draining:
            return "draining: no new requests are taken"
        engine = self._engine
        if engine is None or engine.state in (EngineState.NEW, EngineState.LOADING):
            return f"starting: {self._stage}"
        if engine.state is not EngineState.READY:
            return f"the engine is {engine.state.value}: {engine.state_reason}"
        return None if self._cards else f"starting: {self._stage}"

    @property
    def draining(self) -> bool:
        """It takes nothing new any more."""
        return self._draining

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """Submit to the engine; what comes of it goes to `sink`.

        Errors: `NotReady`, `Draining`, `Overloaded`, `EngineDied`.
        """
        return self._taking_engine().submit(request, sink)

    def _taking_engine(self) -> SupervisedEngine:
        if self._draining:
            raise Draining("this worker is going away and takes no new requests")
        return self._usable_engine()

    def _usable_engine(self) -> SupervisedEngine:
        if self._engine is None:
            raise NotReady(f"starting: {self._stage}", retry_after=_RETRY_AFTER)
        return self._engine

    def rekey(self, hash_secret: bytes) -> None:
        """Name blocks with this secret from now on; before `start`, from the beginning."""
        self._hash_secret = hash_secret
        if self._engine is not None:
            self._engine.rekey(hash_secret)

    @property
    def names_id(self) -> bytes:
        """Which secret the engine names its blocks with, or will once it has read its commands;
        empty: none was given, so the names mean nothing elsewhere."""
        return names_id(self._hash_secret) if self._hash_secret else b""

    def subscribe_kv(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        """See `Engine`; before `start`, so that nothing is missed."""
        if self._engine is not None:
            raise RuntimeError("the engine has said things already")
        self._kv_listeners.append(listener)

    @property
    def tells_kv(self) -> bool | None:
        """Its KV events say all that can be reused there, which may be nothing; None while no
        engine is loaded."""
        capabilities = self.capabilities
        if capabilities is None:
            return None
        keeps = self.config.prefix_cache and capabilities.num_blocks > 0
        return capabilities.kv_events or not keeps

    def abort(self, handle: Handle) -> None:
        """Free everything within one step; the sink falls silent at once. Idempotent."""
        if self._engine is not None:
            self._engine.abort(handle)

    def statistics(self) -> EngineStats:
        """The engine's newest snapshot; zeros while there is none."""
        return _NOTHING if self._engine is None else self._engine.statistics()

    # ------------------------------------------------------------------ handing prompts over

    def submit_remote(self, request: GenerateRequest, sink: RemoteSink) -> Handle:
        """See `Engine`. Errors: as `submit`, and `TransferRefused`."""
        return self._taking_engine().submit_remote(request, sink)

    def prefill(
        self,
        request: GenerateRequest,
        ticket: Ticket,
        node: NodeId,
        epoch: Epoch,
        sink: PrefillSink,
    ) -> Handle:
        """See `Engine`; also while it drains. Errors: as `submit`, and `TransferRefused`."""
        return self._usable_engine().prefill(request, ticket, node, epoch, sink)

    def open_attempt(self, handle: Handle, attempt: int, node: NodeId, epoch: Epoch) -> None:
        """See `Engine`."""
        if self._engine is not None:
            self._engine.open_attempt(handle, attempt, node, epoch)

    def activate(self, handle: Handle, attempt: int, handoff: Handoff) -> None:
        """See `Engine`."""
        if self._engine is not None:
            self._engine.activate(handle, attempt, handoff)

    def give_up(self, handle: Handle, attempt: int) -> None:
        """See `Engine`."""
        if self._engine is not None:
            self._engine.give_up(handle, attempt)

    def prefill_here(self, handle: Handle) -> None:
        """See `Engine`."""
        if self._engine is not None:
            self._engine.prefill_here(handle)

    def attach(self, node: NodeId, epoch: Epoch) -> None:
        """See `Engine`; before `start`, from the beginning."""
        self._attached = (node, epoch)
        if self._engine is not None:
            self._engine.attach(node, epoch)

    def peer_gone(self, node: NodeId, epoch: Epoch) -> None:
        """See `Engine`."""
        if self._engine is not None:
            self._engine.peer_gone(node, epoch)

    def transfer_call(self, node: NodeId, epoch: Epoch, ask: TransferAsk, reply: Answered) -> None:
        """See `Engine`."""
        if self._engine is None:
            reply(NotReady(f"starting: {self._stage}", retry_after=_RETRY_AFTER))
        else:
            self._engine.transfer_call(node, epoch, ask, reply)

    def on_transfer(self, ask: AskPeer) -> None:
        """See `Engine`."""
        if self._engine is not None:
            raise RuntimeError("the engine has asked things already")
        self._ask_peer = ask

    def paths(self) -> Sequence[PathState]:
        """See `Engine`."""
        return () if self._engine is None else self._engine.paths()

    # ------------------------------------------------------------------ for whoever watches

    @property
    def capabilities(self) -> EngineCapabilities | None:
        """What the loaded engine can do; None while there is none."""
        return None if self._engine is None else self._engine.capabilities

    def sample(self) -> EngineSample:
        """For a scrape."""
        self._totals.note(self.statistics())
        stats = self._totals.snapshot()
        engine = self._engine
        return EngineSample(
            ready=engine is not None and engine.state is EngineState.READY,
            running=stats.running,
            waiting=stats.waiting,
            blocks_total=stats.blocks_total,
            blocks_used=stats.blocks_used,
            blocks_cached=stats.blocks_cached,
            blocks_quarantined=stats.blocks_quarantined,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            computed_tokens=stats.computed_tokens,
            output_tokens=stats.output_tokens,
            preemptions=stats.preemptions,
            steps=stats.steps,
            step_seconds=stats.step_seconds,
            restarts=0 if engine is None else engine.restarts,
            stalls=0 if engine is None else engine.stalls,
            stalled_for=0.0 if engine is None else engine.stalled_for,
        )


_NOTHING = EngineStats()
