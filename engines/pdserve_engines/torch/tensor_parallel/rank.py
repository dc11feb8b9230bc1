"""Runs one rank: `python -m pdserve_engines.torch.tensor_parallel.rank`, a child of rank 0.

It loads its shard, then computes what the plan ring says until rank 0 closes the link. It never
samples and knows no requests.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from pdserve.engine_core.parent_death import die_with_parent
from pdserve.observe.heartbeat import HeartbeatPage
from pdserve_engines.torch.kv_budget import measure_memory
from pdserve_engines.torch.kv_pool import KvPool
from pdserve_engines.torch.model_info import kv_block_shape
from pdserve_engines.torch.model_loader import weights
from pdserve_engines.torch.opened_model import open_model
from pdserve_engines.torch.settings import rank_placement
from pdserve_engines.torch.tensor_parallel.collectives import join_group
from pdserve_engines.torch.tensor_parallel.device_pools import OpenedPool
from pdserve_engines.torch.tensor_parallel.plan_ring import PlanReader
from pdserve_engines.torch.tensor_parallel.rank_link import (
    AllocatePool,
    JoinRanks,
    LoadRank,
    PoolAllocated,
    RankFailed,
    RankLink,
    RankLinkClosed,
    RankLoaded,
)
from pdserve_engines.torch.tensor_parallel.rank_model import RankModel
from pdserve_engines.torch.tensor_parallel.rank_plan import RankTask, decode_plan
from pdserve_engines.torch.tensor_parallel.rank_watch import beat_interval
from pdserve_engines.torch.tensor_parallel.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.engine_core.executor import KvBlockShape
    from pdserve.ids import Bytes, Seconds
    from pdserve_engines.torch.kv_budget import AvailableMemory
    from pdserve_engines.torch.settings import TorchSettings
    from pdserve_engines.torch.tensor_parallel.rank_plan import RankPlan

__all__ = ["Rank", "main"]

_REST: Seconds = 5.0
"""Longest sleep without a message while it loads; nothing depends on it."""
_MOST_WORDS = 2000
"""Most characters of a failure that rank 0 hears."""

M = TypeVar("M")


class Rank:
    """A rank that has loaded its shard and joined the others."""

    def __init__(
        self,
        model: RankModel,
        layout: KvBlockShape,
        settings: TorchSettings,
        reader: PlanReader,
        page: HeartbeatPage,
    ) -> None:
        self._model = model
        self._layout = layout
        self._settings = settings
        self._reader = reader
        self._page = page
        self._beat = beat_interval(settings.rank_timeout)
        self._pool: KvPool | None = None
        self._opened: OpenedPool | None = None

    def allocate(self, order: AllocatePool) -> int | None:
        """Allocate the KV pool, or map that which rank 0 has allocated; returns the descriptor of
        its host memory, which the pool keeps."""
        settings, blocks, mapped = self._settings, order.num_blocks, None
        if order.memory is not None:
            size = blocks * self._layout.block_bytes
            self._opened = OpenedPool(order.memory, size, settings.device)
            mapped = self._opened.memory
        self._pool = KvPool(self._layout, blocks, settings.dtype, settings.device, memory=mapped)
        self._model.bind(self._pool)
        memory = self._pool.memory
        return memory.export().fd if memory is not None and memory.backing == "memfd" else None

    def serve(self, link: RankLink) -> None:
        """Compute plans until the link closes. Raises `RankLinkClosed` then, and whatever a plan
        raises."""
        while True:
            self._page.rest(self._beat)
            data = self._reader.read(self._beat, (link.fileno(),))
            if data is None:
                # Rank 0 sends nothing any more: what can be read is the link's end.
                link.receive(0.0)
                continue
            self._page.compute()
            self.compute(decode_plan(data))

    def close(self) -> None:
        """Free the pool. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        if self._opened is not None:
            self._opened.close()

    @torch.inference_mode()
    def compute(self, plan: RankPlan) -> None:
        """Do this rank's part of a plan."""
        assert self._pool is not None, "allocate comes before compute"
        model = self._model
        if plan.task is RankTask.COPY:
            self._pool.copy(list(plan.copies))
            model.group.barrier()
        elif plan.task is RankTask.LOGITS:
            settings = self._settings
            hidden = torch.empty(
                plan.rows, model.hidden_size, dtype=settings.dtype, device=settings.device
            )
            model.group.broadcast(hidden)
            model.logits(hidden)
        else:
            assert plan.batch is not None
            hidden = model.forward(plan.batch, self._page.tick)
            if plan.task is RankTask.GREEDY:
                model.logits(hidden)


def _load(link: RankLink, owned: ExitStack) -> Rank:
    """Load what rank 0 asks for, and join the other ranks. `owned` gets what is to be closed."""
    order, (ring, store, bell, page) = _expect(link, LoadRank)
    spec = order.spec
    heartbeat = HeartbeatPage.attach(page)
    owned.callback(heartbeat.close)
    reader = PlanReader(ring, bell, order.rank - 1)
    owned.callback(reader.close)
    os.close(ring)
    owned.callback(os.close, store)
    with open_model(spec) as opened, torch.inference_mode():
        placement = rank_placement(spec)
        device = placement.devices[order.rank]
        if device.type == "cuda":
            torch.cuda.set_device(device)
        settings = replace(opened.settings, device=device)
        torch.set_num_threads(settings.threads)
        shard = Shard(opened.config, order.rank, spec.tensor_parallel)
        model = RankModel(shard, settings)
        owned.callback(model.close)
        weights.load(
            opened.config, opened.checkpoint, model.place, lambda *_: heartbeat.tick(), shard
        )
        layout = kv_block_shape(spec, shard.config, settings)
        digest = opened.digest()
    link.send(loaded_message(model.weight_bytes, measure_memory(device), digest))
    _expect(link, JoinRanks)
    model.join(join_group(placement, store, order.rank, order.patience))
    rank = Rank(model, layout, settings, reader, heartbeat)
    owned.callback(rank.close)
    return rank


def loaded_message(weight_bytes: Bytes, room: AvailableMemory, digest: bytes) -> RankLoaded:
    """What a rank says when it has loaded. Host memory is measured by rank 0 for all."""
    if not room.total:
        return RankLoaded(weight_bytes, checkpoint=digest)
    return RankLoaded(weight_bytes, room.free, room.total, room.own, digest)


def _expect(link: RankLink, kind: type[M]) -> tuple[M, list[int]]:
    """Wait for rank 0's next message. Its end closes the link, so there is no other deadline."""
    while (found := link.receive(_REST)) is None:
        pass
    message, fds = found
    assert isinstance(message, kind), f"a {type(message).__name__} is out of order"
    return message, fds


def run(link: RankLink) -> int:
    """Run a rank to its end; returns the exit status. A failure is told to rank 0."""
    with ExitStack() as owned:
        owned.callback(link.close)
        try:
            rank = _load(link, owned)
            order, _ = _expect(link, AllocatePool)
            fd = rank.allocate(order)
            link.send(PoolAllocated(), () if fd is None else (fd,))
            rank.serve(link)
        except RankLinkClosed:
            return 0
        except Exception as error:
            with suppress(RankLinkClosed):
                link.send(RankFailed(f"{type(error).__name__}: {error}"[:_MOST_WORDS]))
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rank; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pdserve_engines.torch.tensor_parallel.rank")
    parser.add_argument("--fd", type=int, required=True, help="the inherited link to rank 0")
    parser.add_argument("--parent", type=int, required=True, help="process to live and die with")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    return run(RankLink(socket.socket(fileno=arguments.fd)))


if __name__ == "__main__":
    sys.exit(main())
