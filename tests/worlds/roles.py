"""The three roles as one process of a world runs them: the product's own services on a node.

What `pdserve.launch.roles` composes for a real process is composed here for a virtual one: no HTTP,
no child process, no file. Everything else is the code that serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from pdserve.blocks.hashing import HASH_SECRET_TEST
from pdserve.errors import Draining
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.dispatch.cluster_client import ClusterClient
from pdserve.frontend.preprocess.prompt_hashes import NO_HASHING, PromptHasher
from pdserve.frontend.routing_hints import NO_HINTS
from pdserve.messages.card import ModelCard
from pdserve.messages.engine import TransferSpec
from pdserve.messages.node import NodeCard
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.router.config import RouterConfig
from pdserve.router.policies.loader import load_policy
from pdserve.router.service import RouterService
from pdserve.runtime.hash_secret import HashSecrets
from pdserve.runtime.topics.service import Topics
from pdserve.testing.scripted import ENGINE
from pdserve.worker.agent import WorkerAgent
from pdserve.worker.config import WorkerConfig
from pdserve.worker.model import LocalModel
from pdserve.worker.service import WorkerService
from tests.worlds.faulty_engine import FaultyEngine

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
    from pdserve.runtime.node import Node
    from pdserve.testing.fake_rdma import FakeFabric
    from pdserve.worker.model import ProgressFn

__all__ = ["Frontend", "NodeSettings", "Router", "VirtualRole", "Worker"]

MAX_RUNNING, MAX_WAITING = 8, 32
"""Sequences that run in an engine at a time, and requests that may wait there."""
_BLOCKS: Final = 64
_BLOCK_SIZE: Final = 8


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
    """Of a worker."""
    disagg: Disagg = "always"
    """Of a decode worker."""
    moves_kv: bool = True
    """An aggregated worker hands over and fetches the KV of requests that move."""

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


class Router:
    """See `pdserve.launch.roles.RouterPart`."""

    def __init__(self, node: Node, settings: NodeSettings) -> None:
        self.node = node
        self.topics = Topics(node, node.timers)
        config = settings.router or RouterConfig(policy=settings.policy)
        policy = load_policy(config.policy, config.policy_options)
        self.service = RouterService(
            config, policy, node, self.topics, _card(node), Degradations(Metrics())
        )
        self.secrets = _secrets(node)

    async def start(self) -> None:
        await self.node.start()
        self.service.open()

    async def stop(self, *, leave: bool, within: Seconds = 2.0) -> None:
        self.service.drain()
        if leave:
            await self.node.leave()
        self.topics.close()
        await self.node.close()


class Worker:
    """See `pdserve.launch.roles.WorkerPart`."""

    def __init__(
        self,
        node: Node,
        settings: NodeSettings,
        fabric: FakeFabric,
        on_death: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.node = node
        self.topics = Topics(node, node.timers)
        self.service = _Service(settings, fabric, on_death)
        self.secrets = _secrets(node, HASH_SECRET_TEST)
        self.secrets.listen(self.service.rekey)
        self.service.rekey(self.secrets.need())
        self.member = WorkerAgent(self.service, node, self.topics, _card(node))
        self.handed_over = True
        """Nothing was left when the time for it was over."""

    async def start(self) -> None:
        await self.node.start()
        await self.service.start(lambda stage, fraction: None)

    async def stop(self, *, leave: bool, within: Seconds = 2.0) -> None:
        if leave:
            self.handed_over = await self.member.drain(within)
        self.member.close()
        if leave:
            await self.node.leave()
        self.topics.close()
        await self.service.stop()
        await self.node.close()


class Frontend:
    """See `pdserve.launch.roles.FrontendPart`; callers ask `backend`."""

    def __init__(self, node: Node, settings: NodeSettings) -> None:
        self.node = node
        config = FrontendConfig(router_wait=settings.router_wait)
        self.secrets = _secrets(node)
        self.backend = _Backend(node, config, Degradations(Metrics()))
        self.backend.naming = PromptHasher(lambda: self.secrets.secret)

    async def start(self) -> None:
        await self.node.start()
        self.node.publish_card(_card(self.node), {})

    async def stop(self, *, leave: bool, within: Seconds = 2.0) -> None:
        self.backend.close(Draining("the frontend is going away"))
        if leave:
            await self.node.leave()
        await self.node.close()


class _Backend(ClusterClient):
    """Names prompts, as a frontend does before it opens a request."""

    naming = NO_HASHING

    async def open(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        hints: RoutingHints = NO_HINTS,
        on_placed: Callable[[Placement], None] = lambda placement: None,
    ) -> DispatchedRequest:
        """See `ClusterClient`."""
        card = self.cards().get(request.model)
        if card is not None:
            named = self.naming.of_one(card, request.cache_salt, request.prompt)
            request = replace(request, block_names=named.hashes, names_id=named.id)
        return await super().open(request, sink, hints, on_placed)


class _Service(WorkerService):
    """A worker's service whose engine runs inline, and whose model is no directory."""

    engine: FaultyEngine

    def __init__(
        self, settings: NodeSettings, fabric: FakeFabric, on_death: Callable[[str], None]
    ) -> None:
        options = {"blocks": str(_BLOCKS), "max_len": "200"}
        config = WorkerConfig(
            engine=ENGINE,
            engine_options=options,
            block_size=_BLOCK_SIZE,
            max_sequences=MAX_RUNNING,
            max_batch_tokens=64,
            max_waiting=MAX_WAITING,
            mode=settings.mode,
            disagg=settings.disagg,
            disagg_min_tokens=_BLOCK_SIZE,
            transfer=_transfer(settings),
        )

        def inline(spec: EngineSpec) -> FaultyEngine:
            return FaultyEngine(
                spec,
                pace=settings.pace,
                load_time=settings.load_time,
                restart_time=settings.restart_time,
                stall_timeout=config.stall_timeout,
                fabric=fabric,
                on_death=on_death,
            )

        super().__init__(config, inline, Metrics())
        self._settings = settings

    def break_engine(self) -> bool:
        """Its core dies; False if there was none."""
        return self.engine.die(self._settings.restart_time)

    async def _find(self, on_progress: ProgressFn) -> LocalModel:
        return LocalModel(Path("/model"), self._settings.model)

    async def _make_card(self, model: LocalModel) -> None:
        capabilities = self.engine.capabilities
        assert capabilities is not None
        card = ModelCard(
            name=model.name,
            max_model_len=capabilities.max_model_len,
            vocab_size=capabilities.vocab_size,
            block_size=capabilities.block_size,
            eos_token_ids=capabilities.eos_token_ids,
            tokenizer_json=self._settings.tokenizer or bytes(self._settings.tokenizer_bytes),
            compat_hash=capabilities.compat_hash,
        )
        self._cards = {card.name: card}


def _transfer(settings: NodeSettings) -> TransferSpec | None:
    if settings.mode == "aggregated":
        return TransferSpec(verify="all", optional=True) if settings.moves_kv else None
    return TransferSpec(verify="all")


def _secrets(node: Node, given: bytes | None = None) -> HashSecrets:
    """Workers have the constant secret of all simulations, the others learn it from them."""
    return HashSecrets(
        node,
        entropy=node.random.randbytes,
        wall=node.now,
        degradations=Degradations(Metrics()),
        given=given,
    )


def _card(node: Node) -> NodeCard:
    return NodeCard(version="0", role=node.config.role, started=1_700_000_000, host=node.id)
