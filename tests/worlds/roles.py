"""The three roles as one process of a world runs them: the product's own, on virtual nodes.

There is no HTTP, no child process and no file. Everything else is the code that serves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from pdserve.blocks.hashing import HASH_SECRET_TEST
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.node import FrontendNode
from pdserve.frontend.routing_hints import NO_HINTS
from pdserve.messages.engine import TransferSpec
from pdserve.messages.node import NodeCard
from pdserve.messages.tiers import TierSpec
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.router.config import RouterConfig
from pdserve.router.node import RouterNode
from pdserve.runtime.hash_secret import HashSecrets
from pdserve.sim.virtual_model import VirtualModel
from pdserve.testing.scripted import ENGINE
from pdserve.tracing.export.delivery import SpanQueue
from pdserve.tracing.ring import TraceRing
from pdserve.tracing.rules import TraceRules
from pdserve.tracing.sink import TraceSinks
from pdserve.tracing.tracer import Tracer
from pdserve.worker.config import WorkerConfig
from pdserve.worker.node import WorkerNode
from tests.worlds.faulty_engine import FaultyEngine
from tests.worlds.virtual_tiers import TierFaults

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.port import TokenSink
    from pdserve.frontend.dispatch.dispatched_request import DispatchedRequest
    from pdserve.frontend.placement import Placement
    from pdserve.frontend.routing_hints import RoutingHints
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.handoff import Disagg, WorkerMode
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.tiers import KvFetchMode
    from pdserve.messages.trace import Trace
    from pdserve.runtime.node import Node
    from pdserve.testing.fake_rdma import FakeFabric
    from pdserve.tracing.phases import PromptPhases

__all__ = [
    "MAX_BATCH_TOKENS",
    "Frontend",
    "NodeSettings",
    "Router",
    "VirtualRole",
    "Worker",
    "make_secrets",
    "plain_card",
]

MAX_RUNNING, MAX_WAITING = 8, 32
"""Sequences that run in an engine at a time, and requests that may wait there."""
MAX_BATCH_TOKENS: Final = 64
"""Tokens of a step."""
_BLOCKS: Final = 64
_BLOCK_SIZE: Final = 8
_BLOCK_BYTES: Final = _BLOCK_SIZE * 16
_RECORD_BYTES: Final = 8192
_TRACES: Final = TraceRules(sample=0.2, rate=2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What the run's seed has chosen for its nodes."""

    policy: str = "least_loaded"
    model: str = "model"
    """What a worker serves."""
    pace: Seconds = 0.02
    """One engine step."""
    load_time: Seconds = 0.5
    restart_time: Seconds = 1.0
    """From an engine's death until it can serve again."""
    tokenizer_bytes: int = 1000
    """A large part of the card; much of it takes the bulk connection."""
    tokenizer: bytes = b""
    """A real one, for frontends that make text; empty: of zeros, so many."""
    router_wait: Seconds = 5.0
    router: RouterConfig | None = None
    """None: the defaults, with `policy`."""
    mode: WorkerMode = "aggregated"
    """The mode of a worker."""
    disagg: Disagg = "always"
    """The disaggregation setting of a decode worker."""
    traces: TraceRules = _TRACES
    """Which of its requests a frontend traces; a rate of 0: it records nothing."""
    host_blocks: int = 0
    """Blocks of a worker's host tier; 0: none."""
    disk_blocks: int = 0
    """Blocks of its disk tier, about; 0: none."""
    kv_fetch: KvFetchMode = "auto"
    """When it fetches from other workers, if it has tiers."""
    moves_kv: bool = True
    """An aggregated worker hands over and fetches the KV of requests that move."""
    change: str = ""
    """Id of the planner's change that starts a worker; empty: none."""

    @property
    def hold_limit(self) -> int:
        """Questions that a router may hold."""
        return (self.router or RouterConfig()).hold_limit


class VirtualRole(Protocol):
    """One role in one process: `start` once, then `stop`, unless the process is killed."""

    node: Node

    async def start(self) -> None: ...

    async def stop(self, *, leave: bool, within: Seconds = 2.0) -> None:
        """End everything; `leave`: say goodbye first, as a process that is asked to end does, and
        hand over what runs here in so much time."""
        ...


class Router(RouterNode):
    """A router whose settings a world's seed has chosen."""

    def __init__(self, node: Node, settings: NodeSettings) -> None:
        config = settings.router or RouterConfig(policy=settings.policy)
        super().__init__(
            node, config, plain_card(node), make_secrets(node), Degradations(Metrics())
        )

    async def start(self) -> None:
        await self.join()

    async def stop(self, *, leave: bool, within: Seconds = 2.0) -> None:
        self.drain()
        await self.close(leave=leave)


class Worker(WorkerNode):
    """A worker whose engine runs inline and can break, and whose model is no directory."""

    engine: FaultyEngine
    engine_type: type[FaultyEngine] = FaultyEngine

    def __init__(
        self,
        node: Node,
        settings: NodeSettings,
        fabric: FakeFabric,
        on_death: Callable[[str], None] = lambda why: None,
    ) -> None:
        config = _worker_config(settings)

        def make_engine(spec: EngineSpec) -> FaultyEngine:
            self.engine = self.engine_type(
                spec,
                pace=settings.pace,
                load_time=settings.load_time,
                restart_time=settings.restart_time,
                stall_timeout=config.stall_timeout,
                fabric=fabric,
                tier_faults=TierFaults(Random(f"{node.id} {node.random.random()}")),
                on_death=on_death,
            )
            return self.engine

        tokenizer = settings.tokenizer or bytes(settings.tokenizer_bytes)
        super().__init__(
            node,
            config,
            make_engine,
            replace(plain_card(node), change=settings.change),
            make_secrets(node, HASH_SECRET_TEST),
            Metrics(),
            source=VirtualModel(settings.model, tokenizer),
        )
        self._restart_time = settings.restart_time
        self.handed_over = True
        """Nothing was left when the time for it was over."""

    def break_engine(self) -> bool:
        """Its core dies; False if there was none."""
        return self.engine.die(self._restart_time)

    async def start(self) -> None:
        await self.join()
        await self.load()

    async def stop(self, *, leave: bool, within: Seconds = 2.0) -> None:
        if leave:
            self.handed_over = await self.drain(within)
        await self.close(leave=leave)


class Frontend:
    """A frontend without HTTP; callers `open` requests.

    It remembers traces and exports them to nobody, both within bounds that few requests reach."""

    MOST_TRACES: Final = 20
    MOST_BYTES: Final = 20_000
    _MOST_SPANS: Final = 100

    def __init__(self, node: Node, settings: NodeSettings) -> None:
        self.node = node
        self.ring = TraceRing(self.MOST_TRACES, self.MOST_BYTES)
        self.queue = SpanQueue(self._MOST_SPANS)
        self.emitted = self.taken = self.dropped = 0
        """Spans of traces that were kept, exported and dropped."""
        self.limited: Counter[str] = Counter()
        self.tracer = Tracer(
            settings.traces,
            TraceSinks(self.ring, self),
            time=node.now,
            random=Random(node.id),
            wall=lambda: round(1e9 * node._wall()),
            on_limited=lambda limit: self.limited.update((limit,)),
        )
        config = FrontendConfig(router_wait=settings.router_wait)
        self._frontend = FrontendNode(node, config, make_secrets(node), Degradations(Metrics()))
        self.backend = self._frontend.backend

    async def start(self) -> None:
        await self._frontend.join()
        self.node.publish_card(plain_card(self.node), {})

    async def open(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        hints: RoutingHints = NO_HINTS,
        on_placed: Callable[[Placement], None] = lambda placement: None,
        phases: PromptPhases | None = None,
    ) -> DispatchedRequest:
        """Hashes the prompt, as the HTTP side does, and opens the request."""
        card = self.backend.cards().get(request.model)
        if card is not None:
            hashed = self._frontend.hasher.of_one(card, request.cache_salt, request.prompt)
            request = replace(request, block_names=hashed.hashes, names_id=hashed.id)
        return await self.backend.open(request, sink, hints, on_placed, phases)

    def add(self, trace: Trace) -> None:
        """Implements `tracing.sink.TraceSink`: exports now and then."""
        spans = len(trace.spans)
        self.emitted += spans
        if not self.queue.add(trace):
            self.dropped += spans
            batch = self.queue.take()
            self.taken += 0 if batch is None else batch.spans

    async def stop(self, *, leave: bool, within: Seconds = 2.0) -> None:
        await self._frontend.close(leave=leave)


def _worker_config(settings: NodeSettings) -> WorkerConfig:
    return WorkerConfig(
        engine=ENGINE,
        engine_options={"blocks": str(_BLOCKS), "max_len": "200"},
        block_size=_BLOCK_SIZE,
        max_sequences=MAX_RUNNING,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_waiting=MAX_WAITING,
        mode=settings.mode,
        disagg=settings.disagg,
        disagg_min_tokens=_BLOCK_SIZE,
        transfer=_transfer(settings),
        tiers=_tiers(settings),
    )


def _tiers(settings: NodeSettings) -> TierSpec | None:
    if not settings.host_blocks:
        return None
    disk = settings.disk_blocks
    return TierSpec(
        host_bytes=settings.host_blocks * _BLOCK_BYTES,
        disk_path="memory" if disk else "",
        disk_bytes=disk * _RECORD_BYTES,
        disk_write_budget=1 << 40,
        fetch=settings.kv_fetch,
    )


def _transfer(settings: NodeSettings) -> TransferSpec | None:
    if settings.mode == "aggregated":
        return TransferSpec(verify="all", optional=True) if settings.moves_kv else None
    return TransferSpec(verify="all")


def make_secrets(node: Node, given: bytes | None = None) -> HashSecrets:
    """Workers have the constant secret of all simulations, the others learn it from them."""
    return HashSecrets(
        node,
        entropy=node.random.randbytes,
        wall=node.now,
        degradations=Degradations(Metrics()),
        given=given,
    )


def plain_card(node: Node) -> NodeCard:
    return NodeCard(version="0", role=node.config.role, started=1_700_000_000, host=node.id)
