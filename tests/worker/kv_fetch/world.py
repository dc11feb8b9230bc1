"""Workers in virtual time that fetch each other's blocks: real nodes, cores and schedulers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from pdserve.blocks.hashing import hash_secret_id, joined_hashes, prompt_root
from pdserve.ids import NodeLife
from pdserve.messages.card import ModelCard
from pdserve.messages.kv_pull import OfferedChain
from pdserve.messages.node import NodeCard, summarize_card
from pdserve.observe.metrics import Metrics
from pdserve.sim.engine import VirtualTimeEngine
from pdserve.testing.fake_rdma import FakeFabric
from pdserve.testing.output_checker import OutputChecker
from pdserve.testing.scripted import reference_tokens
from pdserve.worker.kv_fetch.push import KvPusher
from pdserve.worker.kv_fetch.service import KvFetchService
from pdserve.worker.transfer_rpc import TransferRpc
from tests.engine.test_handoff_between_engines import request, spec
from tests.runtime.cluster import Cluster, cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.engine.kv_pulls import AbsorbResult
    from pdserve.messages.request import GenerateRequest
    from pdserve.runtime.node import Node

SECRET = b"the secret of this world"
SPEC = replace(spec("fake", blocks="200"), hash_secret=SECRET)
BLOCK = SPEC.block_size


class FetchWorker:
    """One worker: what an agent makes of node and engine, without frontends."""

    def __init__(self, node: Node, fabric: FakeFabric) -> None:
        self.node = node
        self.engine = VirtualTimeEngine(SPEC, pace=0.02, load_time=0.1, fabric=fabric)
        TransferRpc(node, self.engine, Metrics())
        self.fetch = KvFetchService(node, self.engine.kv_pulls)
        self.pusher = KvPusher(node, self, self.fetch.numbers)
        self.names_id = hash_secret_id(SECRET)
        self.draining = False

    @property
    def life(self) -> NodeLife:
        return NodeLife(self.node.id, self.node.epoch)

    @property
    def pool(self):
        core = self.engine.core
        assert core is not None
        return cast("Any", core).pool

    @property
    def compat_hash(self) -> str:
        assert self.engine.capabilities is not None
        return self.engine.capabilities.compat_hash

    def cards(self) -> dict[str, ModelCard]:
        if self.engine.capabilities is None:
            return {}
        card = ModelCard(
            name="m",
            max_model_len=256,
            vocab_size=97,
            block_size=BLOCK,
            eos_token_ids=(2,),
            tokenizer_json=b"{}",
            tokenizer_config_json=b"{}",
            engine="scripted",
            dtype="none",
            compat_hash=self.compat_hash,
            created=0,
        )
        return {"m": card}

    def publish(self, **changes: Any) -> None:
        """What other workers see of this one."""
        ((small, parts),) = [summarize_card(card) for card in self.cards().values()]
        fields: dict[str, Any] = {
            "role": "worker",
            "models": (small,),
            "transfers": ("fake",),
        }
        self.node.publish_names(self.names_id, 2)
        self.node.publish_card(NodeCard(**(fields | changes)), parts)

    def chain(self, prompt: list[int]) -> OfferedChain:
        """The prompt's full blocks."""
        root = prompt_root(SECRET, self.compat_hash, "")
        return OfferedChain(0, root, joined_hashes(prompt, BLOCK, parent=root, secret=SECRET))

    async def compute(self, wanted: GenerateRequest) -> OutputChecker:
        checker = Waiter(wanted)
        self.engine.submit(wanted, checker)
        await asyncio.wait_for(checker.over.wait(), 60.0)
        assert checker.tokens == [reference_tokens(wanted)]
        return checker

    async def absorb(
        self, source: NodeLife, prompt: list[int], timeout: float = 5.0
    ) -> AbsorbResult:
        result: asyncio.Future[AbsorbResult] = asyncio.get_running_loop().create_future()
        self.engine.kv_pulls.absorb(source, self.chain(prompt), timeout, result.set_result)
        return await asyncio.wait_for(result, 60.0)

    def idle(self) -> bool:
        self.pool.check()
        counts = self.pool.counts()
        return counts.used == counts.quarantined == 0


class Waiter(OutputChecker):
    """A sink that tells when its request is over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.over = asyncio.Event()

    def on_delta(self, delta) -> None:
        self.take(delta)
        if self.done:
            self.over.set()

    def on_error(self, error) -> None:
        self.fail(error)
        self.over.set()


class FetchCluster:
    """Workers `a`, `b`, ... that know each other."""

    def __init__(self, nodes: Cluster, seed: int) -> None:
        self.nodes = nodes
        self.fabric = FakeFabric(Random(seed))
        self.workers: dict[str, FetchWorker] = {}

    async def add(self, name: str) -> FetchWorker:
        node = await self.nodes.add(name)
        worker = self.workers[name] = FetchWorker(node, self.fabric)
        await worker.engine.start()
        worker.publish()
        return worker

    async def settled(self) -> None:
        """Every worker knows every other one and its card."""
        count = len(self.workers) - 1

        def known() -> bool:
            return all(
                sum(member.card is not None for member in worker.node.registry) == count
                for worker in self.workers.values()
            )

        await self.nodes.until(known)

    async def idle(self) -> None:
        """Nothing is held at any worker."""
        await self.nodes.until(lambda: all(w.idle() for w in self.workers.values()))


@asynccontextmanager
async def fetch_cluster(seed: int, *names: str) -> AsyncIterator[FetchCluster]:
    async with cluster() as nodes:
        made = FetchCluster(nodes, seed)
        try:
            for name in names:
                await made.add(name)
            await made.settled()
            yield made
        finally:
            for worker in made.workers.values():
                await worker.engine.stop()
                assert worker.engine.leaked == 0


def prompt_of(seed: int, length: int = 42) -> list[int]:
    return Random(seed).choices(range(3, 90), k=length)


def request_for(prompt: list[int]) -> GenerateRequest:
    return replace(request(1), prompt=prompt)
