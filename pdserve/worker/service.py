"""Runs a worker without a cluster: finds the model, owns the engine, and forwards calls to it.

It knows neither HTTP nor text nor clusters (`agent` does). Its owner starts, drains and stops it,
in this order. A started engine restarts itself; this service decides how that looks from outside.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from pdserve.blocks.hashing import hash_secret_id
from pdserve.engine.port import Engine, EngineState
from pdserve.errors import Draining, NotReady
from pdserve.ids import NodeLife
from pdserve.messages.engine import EngineSpec, EngineStats
from pdserve.observe.metrics import EngineSample
from pdserve.worker.card import read_card
from pdserve.worker.cumulative_stats import CumulativeStats
from pdserve.worker.model import HubModel, LocalModel, ProgressFn, fetch, locate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.engine.port import (
        Answered,
        AskPeer,
        Handle,
        PrefillSink,
        RemotePrefillSink,
        TokenSink,
    )
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.engine import EngineCapabilities, LoadProgress, PathState
    from pdserve.messages.handoff import Handoff, TransportCall
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.transfer import TransferTicket
    from pdserve.observe.metrics import Metrics
    from pdserve.worker.config import WorkerConfig

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


class WorkerService:
    """One worker: a model, an engine and the calls to it."""

    def __init__(
        self,
        config: WorkerConfig,
        make_engine: Callable[[EngineSpec], SupervisedEngine],
        metrics: Metrics,
        *,
        hash_secret: bytes = b"",
    ) -> None:
        """`hash_secret` keys the block hashes and outlives restarts of the engine; see `rekey`."""
        # The worker's life
        self.config = config
        self.metrics = metrics
        self._make_engine = make_engine
        self._hash_secret = hash_secret
        self._stage = "not started"
        self._draining = False
        self._totals = CumulativeStats()
        self._watcher: asyncio.Task[None] | None = None
        self._kv_listeners: list[Callable[[Sequence[KvEvent]], None]] = []
        self._ask_peer: AskPeer | None = None
        self._attached: NodeLife | None = None
        metrics.attach_engine(self.sample)
        # From the moment the model is known
        self._engine: SupervisedEngine | None = None
        # From the moment it has loaded
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

        model = await self._find(note)
        self._engine = engine = self._make_engine(self._spec(model))
        for listener in self._kv_listeners:
            engine.subscribe_kv(listener)
        if self._ask_peer is not None:
            engine.on_transfer(self._ask_peer)
        if self._attached is not None:
            engine.attach(*self._attached)

        def forward(progress: LoadProgress) -> None:
            note(progress.stage, progress.fraction)

        await engine.start(forward)
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="worker-watch")
        await self._make_card(model, engine)

    def drain(self) -> None:
        """Takes no new requests. Running ones go on, and prompts may still be prefilled for those
        that move to another worker.
        """
        self._draining = True

    async def stop(self) -> None:
        """Ends the engine and all its requests. Idempotent."""
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
            gpu_memory_utilization=config.gpu_memory_utilization,
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
        """The reason why requests cannot be served; None when they can."""
        if self._draining:
            return "draining: no new requests are taken"
        engine = self._engine
        if engine is None or engine.state in (EngineState.NEW, EngineState.LOADING):
            return f"starting: {self._stage}"
        if engine.state is not EngineState.READY:
            return f"{engine.state.phrase}: {engine.state_reason}"
        return None if self._cards else f"starting: {self._stage}"

    @property
    def draining(self) -> bool:
        """True once it takes no new requests."""
        return self._draining

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """Submits a request to the engine; its output goes to `sink`.

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
        """Hashes blocks with this secret from now on; before `start`, from the beginning."""
        self._hash_secret = hash_secret
        if self._engine is not None:
            self._engine.rekey(hash_secret)

    @property
    def names_id(self) -> bytes:
        """Id of the secret that the engine hashes blocks with, or will once it has read its
        commands; empty: no secret, so the hashes mean nothing to other nodes.
        """
        return hash_secret_id(self._hash_secret) if self._hash_secret else b""

    def subscribe_kv(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        """Subscribes to KV events, see `Engine`. Call it before `start` so that no event
        is missed."""
        if self._engine is not None:
            raise RuntimeError("subscribe_kv is called after the engine was created")
        self._kv_listeners.append(listener)

    @property
    def tells_kv(self) -> bool | None:
        """True if the KV events report every reusable block; None while no engine is loaded."""
        capabilities = self.capabilities
        if capabilities is None:
            return None
        keeps = self.config.prefix_cache and capabilities.num_blocks > 0
        return capabilities.kv_events or not keeps

    def abort(self, handle: Handle) -> None:
        """Frees everything of a request within one step; its sink gets no further calls.
        Idempotent.
        """
        if self._engine is not None:
            self._engine.abort(handle)

    def statistics(self) -> EngineStats:
        """The engine's newest statistics; zeros while there are none."""
        return _NOTHING if self._engine is None else self._engine.statistics()

    # ------------------------------------------------------------------ handing prompts over

    def submit_remote(self, request: GenerateRequest, sink: RemotePrefillSink) -> Handle:
        """Submits a request whose prompt is prefilled remotely, see `Engine`. Errors: as `submit`,
        and `TransferRefused`.
        """
        return self._taking_engine().submit_remote(request, sink)

    def prefill(
        self,
        request: GenerateRequest,
        ticket: TransferTicket,
        node: NodeId,
        epoch: Epoch,
        sink: PrefillSink,
    ) -> Handle:
        """Prefills a prompt for a peer, see `Engine`; also while draining. Errors: as `submit`, and
        `TransferRefused`.
        """
        return self._usable_engine().prefill(request, ticket, node, epoch, sink)

    def open_attempt(self, handle: Handle, attempt: int, node: NodeId, epoch: Epoch) -> None:
        """Opens blocks for a peer to fill, see `Engine.open_attempt`."""
        if self._engine is not None:
            self._engine.open_attempt(handle, attempt, node, epoch)

    def activate(self, handle: Handle, attempt: int, handoff: Handoff) -> None:
        """Starts to decode a handed-off request, see `Engine.activate`."""
        if self._engine is not None:
            self._engine.activate(handle, attempt, handoff)

    def give_up(self, handle: Handle, attempt: int) -> None:
        """Gives an attempt up, see `Engine.give_up`."""
        if self._engine is not None:
            self._engine.give_up(handle, attempt)

    def prefill_here(self, handle: Handle) -> None:
        """Prefills a request here after all, see `Engine.prefill_here`."""
        if self._engine is not None:
            self._engine.prefill_here(handle)

    def attach(self, node: NodeId, epoch: Epoch) -> None:
        """Sets the node life that the engine belongs to, see `Engine.attach`; may precede
        `start`."""
        self._attached = NodeLife(node, epoch)
        if self._engine is not None:
            self._engine.attach(node, epoch)

    def peer_gone(self, node: NodeId, epoch: Epoch) -> None:
        """Closes the paths to a node life that is over, see `Engine.peer_gone`."""
        if self._engine is not None:
            self._engine.peer_gone(node, epoch)

    def transfer_call(
        self, node: NodeId, epoch: Epoch, ask: TransportCall, reply: Answered
    ) -> None:
        """Passes a peer's transfer control call to the engine, see `Engine.transfer_call`."""
        if self._engine is None:
            reply(NotReady(f"starting: {self._stage}", retry_after=_RETRY_AFTER))
        else:
            self._engine.transfer_call(node, epoch, ask, reply)

    def on_transfer(self, ask: AskPeer) -> None:
        """Sets how the engine calls the transports of its peers, see `Engine.on_transfer`."""
        if self._engine is not None:
            raise RuntimeError("on_transfer is called after the engine was created")
        self._ask_peer = ask

    def paths(self) -> Sequence[PathState]:
        """The KV transfer paths of the engine, see `Engine.paths`."""
        return () if self._engine is None else self._engine.paths()

    # ------------------------------------------------------------------ for metrics and status

    @property
    def capabilities(self) -> EngineCapabilities | None:
        """What the loaded engine can do; None while none is loaded."""
        return None if self._engine is None else self._engine.capabilities

    def sample(self) -> EngineSample:
        """Updates the metrics for a scrape."""
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
