"""Builds the virtual cluster of a replay: production roles on production nodes, without faults."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace as replace_spec

from pdserve.blocks.hashing import HASH_SECRET_TEST
from pdserve.errors import ConfigError
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.node import FrontendNode
from pdserve.gossip.config import GossipConfig
from pdserve.ids import NodeId
from pdserve.messages.engine import TransferSpec
from pdserve.messages.node import NodeCard
from pdserve.messages.tiers import TierSpec
from pdserve.net.settings import NetSettings
from pdserve.net.transport.memory import MemoryWorld
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.planner.changes.ids import change_id
from pdserve.router.config import RouterConfig
from pdserve.router.node import RouterNode
from pdserve.runtime.hash_secret import FixedHashSecret
from pdserve.runtime.node import Node, NodeConfig
from pdserve.runtime.peers.local_link import Neighbours
from pdserve.runtime.tasks import Tasks
from pdserve.sim.replay.engine import TimedEngine
from pdserve.sim.replay.kv_network import KvNetwork
from pdserve.sim.replay.worker_orders import WorkerOrders
from pdserve.sim.rng_tree import RngTree
from pdserve.sim.virtual_model import VirtualModel
from pdserve.sim.workloads.trace_request import VOCABULARY
from pdserve.worker.config import WorkerConfig
from pdserve.worker.mode.jobs import card_mode
from pdserve.worker.node import WorkerNode

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.handoff import WorkerMode
    from pdserve.sim.replay.config import ReplayConfig

__all__ = [
    "MODEL",
    "REPLAY_SECRET",
    "ReplayCluster",
    "ReplayWorker",
    "replay_card",
    "router_config",
]

MODEL: Final = "sim"
REPLAY_SECRET: Final = FixedHashSecret(HASH_SECRET_TEST)
_KEY: Final = b"the key of all simulated clusters, 32 bytes or more"
_PORT: Final = 7000
_EPOCH: Final = 1_700_000_000
"""Unix seconds at which replays begin."""
_DISK: Final = "simulated"
"""Not a directory: a simulated engine has no files."""
_NEVER_SLOW: Final = -1
"""Index of a worker that was added: the slow ones are the last of those at the beginning."""
_RARELY: Final[Seconds] = 1e6
_UP_WITHIN: Final[Seconds] = 60.0
_SETTLE: Final[Seconds] = 1.0
"""From the last card to the first request: topics and channels are open."""
_GOSSIP: Final = GossipConfig(
    ping_interval=_RARELY, sync_interval=_RARELY, reunion_interval=_RARELY
)
_NET: Final = NetSettings(ping_after=_RARELY, silent_after=2 * _RARELY)


class ReplayWorker(WorkerNode):
    """A worker node of a replay: its engine is simulated."""

    engine: TimedEngine

    def __init__(
        self,
        node: Node,
        config: WorkerConfig,
        random: Random,
        wire: KvNetwork | None,
        order: int,
        change: str = "",
    ) -> None:
        """`order`: number of the worker, in the order in which they come; `change`: id of what
        started it."""
        self.order = order
        self.change = change
        seed = random.getrandbits(32)

        def make_engine(spec: EngineSpec) -> TimedEngine:
            self.engine = TimedEngine(replace_spec(spec, seed=seed), wire)
            return self.engine

        card = replace_spec(replay_card(node), change=change)
        super().__init__(
            node, config, make_engine, card, REPLAY_SECRET, Metrics(), source=VirtualModel(MODEL)
        )
        self.orders: WorkerOrders | None = None
        """None: nobody orders it to drain."""
        self.gone = asyncio.Event()
        """Set when it has left the cluster."""

    @property
    def mode(self) -> WorkerMode:
        """Its mode now; `both` counts as aggregated."""
        return card_mode(self.service.mode)

    def leftovers(self) -> str:
        """What is still in flight at this worker; empty once all requests have ended."""
        stats, agent = self.engine.stats(), self.agent
        busy = agent.requests or stats.running or stats.waiting or stats.blocks_used
        if busy or stats.blocks_quarantined:
            return f"requests or blocks of {self.node.id}"
        return f"handoffs of {self.node.id}" if agent.decode or agent.prefill else ""


@dataclass(frozen=True, slots=True)
class _Names:
    """How many digits, so that names sort as their numbers."""

    count: int

    def of(self, role: str, index: int) -> str:
        return f"{role}-{index:0{len(str(self.count - 1))}}"


class ReplayCluster:
    """All nodes of a replay. Create it inside the running event loop; `start`, then `stop`."""

    def __init__(self, config: ReplayConfig) -> None:
        self._config = config
        self._dice = RngTree(config.seed)
        self._net = MemoryWorld(self._dice.fork("network"))
        self._net.set_conditions(delay_min=config.delay, delay_max=config.delay)
        self._processes = [Neighbours() for _ in range(config.frontends)]
        """Those of frontends, with their routers if each has its own."""
        self._seed = f"{_Names(config.routers).of('router', 0)}:{_PORT}"
        routing = router_config(config)
        self.routers = [_router(node, routing) for node in self._nodes("router", config.routers)]
        self.frontends = [
            FrontendNode(
                node, FrontendConfig(), REPLAY_SECRET, Degradations(Metrics()), own_router=router
            )
            for node, router in zip(
                self._nodes("frontend", config.frontends), self._own_routers(), strict=True
            )
        ]
        self.wire: KvNetwork | None = self._wire() if config.moves_kv else None
        self._tasks = Tasks("replay")
        self._made = 0
        """Workers that there have been."""
        self.on_removed: Callable[[ReplayWorker], None] = lambda worker: None
        """Called with a worker that has drained and is about to leave."""
        self.workers = [
            self._worker(index, node, mode, index, self._first_change(index, mode))
            for index, (node, mode) in enumerate(self._placed())
        ]

    def _own_routers(self) -> list[NodeId | None]:
        """The router that each frontend asks first."""
        if not self._config.with_router:
            return [None] * self._config.frontends
        return [router.node.id for router in self.routers]

    def _wire(self) -> KvNetwork:
        return KvNetwork(
            self._dice.fork("wire"),
            bandwidth=self._config.bandwidth,
            latency=self._config.transfer_latency,
        )

    def _placed(self) -> list[tuple[Node, WorkerMode]]:
        """The workers' nodes."""
        config = self._config
        kinds: list[tuple[str, int, WorkerMode]] = [
            ("worker", config.workers, "aggregated"),
            ("prefill", config.prefill, "prefill"),
            ("decode", config.decode, "decode"),
        ]
        return [
            (node, mode)
            for name, count, mode in kinds
            for node in self._nodes("worker", count, name)
        ]

    def _first_change(self, index: int, mode: WorkerMode) -> str:
        """The workers of the beginning are a planner's own, not an operator's, if there is one."""
        return change_id(MODEL, mode, 0, 0, index) if self._config.scaling else ""

    def _worker(
        self, index: int, node: Node, mode: WorkerMode, label: object, change: str = ""
    ) -> ReplayWorker:
        config = self._worker_config(index, mode)
        self._made += 1
        random = self._dice.fork("engine", label)
        worker = ReplayWorker(node, config, random, self.wire, self._made, change)
        if self._config.scaling:
            worker.orders = WorkerOrders(worker, lambda: self._leave(worker))
        return worker

    def _nodes(self, role: str, count: int, name: str = "") -> list[Node]:
        names = _Names(count)
        return [
            self._node(names.of(name or role, index), role, self._process(role, index))
            for index in range(count)
        ]

    def _process(self, role: str, index: int) -> Neighbours | None:
        """The process of a frontend or its own router; None: the node is alone in its process."""
        shared = self._config.with_router and role in ("frontend", "router")
        return self._processes[index] if shared else None

    def _node(self, name: str, role: str, process: Neighbours | None) -> Node:
        address = f"{name}:{_PORT}"
        config = NodeConfig(
            node=NodeId(name),
            role=role,
            listen=address,
            join=() if address == self._seed else (self._seed,),
            cluster="replay",
            leave_timeout=0.0,
            gossip=_GOSSIP,
            net=_NET,
        )
        return Node(
            config,
            self._net.network(name),
            keys=lambda: (_KEY,),
            entropy=self._dice.fork("entropy", name).randbytes,
            random=self._dice.fork("node", name),
            wall=self.wall,
            neighbours=process,
        )

    def _worker_config(self, index: int, mode: WorkerMode) -> WorkerConfig:
        config = self._config
        options = {
            "blocks": str(max(1, config.kv_tokens // config.block_size)),
            "vocab": str(VOCABULARY),
            "max_len": str(config.max_model_len),
            "steps_at_once": str(config.steps_at_once),
        }
        if config.noise:
            options["noise"] = f"{config.noise:g}"
        if index >= config.all_workers - config.slow_workers:
            options["slowdown"] = f"{config.slow_factor:g}"
        return WorkerConfig(
            engine=config.engine,
            engine_options=options | dict(config.engine_options),
            block_size=config.block_size,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            max_waiting=config.max_waiting,
            mode=mode,
            disagg=config.disagg,
            disagg_min_tokens=config.disagg_min_tokens,
            disagg_max_queue=config.disagg_max_queue,
            transfer=None if self.wire is None else TransferSpec(verify="off"),
            tiers=self._tiers(),
        )

    def _tiers(self) -> TierSpec | None:
        """None: what the device evicts is lost, and nothing is fetched."""
        config = self._config
        if self.wire is None and not config.has_tiers:
            return None
        return TierSpec(
            host_bytes=config.host_kv,
            disk_path=_DISK if config.disk_kv else "",
            disk_bytes=config.disk_kv,
            fetch=config.kv_fetch,
        )

    @property
    def quiet_spec(self) -> EngineSpec:
        """The spec of a worker without noise and of speed 1. Its engine must have started."""
        spec = self._spec
        options = {k: v for k, v in spec.options.items() if k not in ("noise", "slowdown")}
        return replace_spec(spec, options=options, transfer=None, tiers=None)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start all nodes; returns when every frontend and router knows every worker's model.

        Errors: `ConfigError` if that takes too long, as over a network whose delay is as long as
        the nodes wait for each other."""
        for router in self.routers:
            await router.join()
        for frontend in self.frontends:
            await frontend.join()
            frontend.node.publish_card(replay_card(frontend.node), {})
        for worker in self.workers:
            await worker.join()
            await worker.load()
            worker.agent.tell()
        self._spec = self.workers[0].engine.spec
        capabilities = self.workers[0].engine.capabilities
        if self.wire is not None and capabilities is not None:
            self.wire.carries(capabilities)
        loop = asyncio.get_running_loop()
        until = loop.time() + _UP_WITHIN
        while not self._up():
            if loop.time() > until:
                raise ConfigError(
                    f"the nodes did not find each other within {_UP_WITHIN:g} s: --delay "
                    f"{self._config.delay:g}s is too long: give less, such as 300ms"
                )
            await asyncio.sleep(0.1)
        await asyncio.sleep(_SETTLE)

    def add_node(self, name: str, role: str) -> Node:
        """One more node for a role that the replay's own do not have; who adds it closes it."""
        return self._node(name, role, None)

    def wall(self) -> float:
        """The clock of all nodes, in Unix seconds."""
        return _EPOCH + asyncio.get_running_loop().time()

    def random(self, label: str) -> Random:
        """A source of its own for one part of the replay."""
        return self._dice.fork(label)

    async def add_worker(self, name: str, mode: WorkerMode, change: str = "") -> ReplayWorker:
        """Start one more worker; returns when it serves. Its name is not to be used again.
        `change`: id of the planner's change that wanted it."""
        node = self._node(name, "worker", None)
        worker = self._worker(_NEVER_SLOW, node, mode, name, change)
        await worker.join()
        await worker.load()
        worker.agent.tell()
        self.workers.append(worker)
        return worker

    async def remove_worker(self, worker: ReplayWorker, grace: Seconds) -> None:
        """Drain a worker for at most `grace` seconds, and take it out of the cluster. Needs
        `ReplayConfig.scaling`."""
        assert worker.orders is not None
        await worker.orders.drain.finish(grace)
        await self._gone(worker)

    def _leave(self, worker: ReplayWorker) -> None:
        """A worker was ordered to drain, and has: its process ends."""
        _ = self._tasks.spawn(self._gone(worker), f"end {worker.node.id}")

    async def _gone(self, worker: ReplayWorker) -> None:
        """Take a worker out, once."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        self.on_removed(worker)
        await worker.close()
        worker.gone.set()

    def _up(self) -> bool:
        return all(
            sum(bool(m.card and m.card.models) for m in node.registry.by_role("worker"))
            == len(self.workers)
            and sum(m.card is not None for m in node.registry.by_role("router"))
            >= len(self.routers) - (node.config.role == "router")
            for node in self._routing_nodes()
        )

    def _routing_nodes(self) -> list[Node]:
        return [r.node for r in self.routers] + [f.node for f in self.frontends]

    def leftovers(self) -> list[str]:
        """What is still in flight in the cluster; empty once all requests have ended."""
        found = [
            (f"{len(router.service.core.bookings)} bookings of {router.node.id}")
            for router in self.routers
            if len(router.service.core.bookings)
        ]
        return found + [left for worker in self.workers if (left := worker.leftovers())]

    async def stop(self) -> None:
        """Stop every node."""
        await self._tasks.close()
        for frontend in self.frontends:
            await frontend.close(leave=False)
        for router in self.routers:
            await router.close(leave=False)
        for worker in self.workers:
            await worker.close(leave=False)


def router_config(config: ReplayConfig) -> RouterConfig:
    """The routers' configuration. Errors: `ConfigError` for an option that routers do not have."""
    known = {field.name: getattr(_DEFAULT, field.name) for field in fields(RouterConfig)}
    values: dict[str, Any] = {}
    for name, text in config.router_options.items():
        key = name.replace("-", "_")
        if key not in known:
            raise ConfigError(f"routers have no option {name!r}. Options: {', '.join(known)}")
        values[key] = _parsed(name, text, known[key])
    if config.policy:
        values["policy"] = config.policy
    if config.policy_options:
        values["policy_options"] = dict(config.policy_options)
    made = replace(_DEFAULT, **values)
    made.validate()
    return made


_KINDS = {float: "number", int: "whole number", bool: "true or false", str: "text"}


def _parsed(name: str, text: str, default: object) -> object:
    kind = type(default)
    try:
        if kind is bool:
            return {"true": True, "false": False, "on": True, "off": False}[text]
        return kind(text)  # type: ignore[call-arg]
    except (ValueError, KeyError):
        raise ConfigError(f"router option {name}={text!r} is no {_KINDS[kind]}") from None


_DEFAULT: Final = RouterConfig()


def _router(node: Node, config: RouterConfig) -> RouterNode:
    return RouterNode(node, config, replay_card(node), REPLAY_SECRET, Degradations(Metrics()))


def replay_card(node: Node) -> NodeCard:
    """The card of a node of a replay, with what all roles' cards have."""
    return NodeCard(version="0", role=node.config.role, started=_EPOCH, host=node.id)
