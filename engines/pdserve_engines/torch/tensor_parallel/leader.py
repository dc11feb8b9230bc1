"""Implements the model of rank 0: it tells the other ranks what to compute, and computes along.

For the executor it is a `ForwardModel` like any other. The executor samples on rank 0 alone, so
seeds, grammars, penalties and the tokens of a request exist only there.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pdserve.engine_core.kv_transfer.kv_region import (
    layouts_of_ranks,
    region_in_memory,
    region_of_ranks,
)
from pdserve.errors import ConfigError, EngineDied
from pdserve.messages.engine import EngineRank
from pdserve.transfer.base import Region
from pdserve_engines.torch.kv_budget import CUDA_CONTEXT, AvailableMemory
from pdserve_engines.torch.sampling.sampler import argmax
from pdserve_engines.torch.settings import rank_placement
from pdserve_engines.torch.tensor_parallel.device_pools import RankDevicePool, cuda_driver
from pdserve_engines.torch.tensor_parallel.placement import smallest_room
from pdserve_engines.torch.tensor_parallel.rank_model import RankModel
from pdserve_engines.torch.tensor_parallel.rank_plan import RankPlan, RankTask, most_bytes
from pdserve_engines.torch.tensor_parallel.rank_processes import RankPool, RankProcesses
from pdserve_engines.torch.tensor_parallel.shard import check_division

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.engine_core.executor import KvBlockShape
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.transfer import RankKvLayout
    from pdserve.transfer.cuda.driver import CudaDriver
    from pdserve_engines.torch.kv_pool import KvPool
    from pdserve_engines.torch.model_loader.weights import Param
    from pdserve_engines.torch.models.base import LayersDoneFn
    from pdserve_engines.torch.models.forward_batch import ForwardBatch
    from pdserve_engines.torch.settings import TorchSettings
    from pdserve_engines.torch.tensor_parallel.placement import RankPlacement
    from pdserve_engines.torch.tensor_parallel.rank_link import RankLoaded
    from pdserve_engines.torch.tensor_parallel.shard import Shard

__all__ = ["LeaderModel", "start_leader"]


def start_leader(spec: EngineSpec, settings: TorchSettings, shard: Shard) -> LeaderModel:
    """Start the other ranks, which load while this process loads `shard`, that of rank 0. Raises
    `ConfigError` if the model cannot be divided so, and `EngineDied`."""
    check_division(shard.whole, shard.ranks)
    placement = rank_placement(spec)
    driver = cuda_driver() if settings.device.type == "cuda" else None
    plan_bytes = most_bytes(spec, settings.max_model_len)
    ranks = RankProcesses(spec, plan_bytes, settings.rank_timeout)
    return LeaderModel(RankModel(shard, settings), shard, ranks, placement, driver)


class LeaderModel:
    """Implements `base.ForwardModel` over all ranks. Any error in a step ends the ranks, and raises
    `EngineDied`: they no longer agree on what comes next."""

    def __init__(
        self,
        model: RankModel,
        shard: Shard,
        ranks: RankProcesses,
        placement: RankPlacement,
        driver: CudaDriver | None = None,
    ) -> None:
        """`model` computes `shard`, that of rank 0. `driver` shares pools on GPUs."""
        self.ranks = ranks
        """The other ranks, which end with this model."""
        self._model = model
        self._shard = shard
        self._pool: KvPool | None = None
        self._pools: list[RankPool | None] = []
        """The other ranks' pools, in order."""
        self._placement = placement
        self._driver = driver
        self._device_pools: list[RankDevicePool] = []
        """The same on GPUs."""
        self._loaded: list[RankLoaded] = []
        """What the other ranks said when they had loaded."""

    @property
    def kernels(self) -> str:
        return f"{self._model.kernels}, on each of {self._shard.ranks} tensor-parallel ranks"

    @property
    def exact(self) -> str:
        return ""

    @property
    def torch_threads(self) -> int:
        return self._model.torch_threads

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes + sum(one.weight_bytes for one in self._loaded)

    @property
    def processes(self) -> tuple[EngineRank, ...]:
        """The processes of all ranks, in order."""
        pids = (os.getpid(), *self.ranks.pids)
        devices = map(str, self._placement.devices)
        return tuple(
            EngineRank(pid=pid, device=device) for pid, device in zip(pids, devices, strict=True)
        )

    def room(self, own: AvailableMemory) -> AvailableMemory:
        """The memory for steps and KV that every rank has, given rank 0's."""
        if not own.total:
            return own
        others = [
            AvailableMemory(one.free - CUDA_CONTEXT, str(device), one.total, one.own)
            for one, device in zip(self._loaded, self._placement.devices[1:], strict=True)
        ]
        room, sharers = smallest_room([own, *others]), self._placement.sharers
        return replace(room, free=room.free // sharers, total=room.total // sharers)

    def place(self, param: Param, parts: Iterable[torch.Tensor]) -> None:
        self._model.place(param, parts)

    def connect(self, digest: bytes) -> None:
        """Wait until the other ranks have loaded, and join them. `digest` is that of the checkpoint
        that rank 0 has read. Raises `EngineDied`, also if a rank has read another one: files may be
        replaced while an engine loads."""
        self._loaded = self.ranks.wait_loaded()
        for rank, one in enumerate(self._loaded, 1):
            if one.checkpoint != digest:
                raise self.ranks.end(
                    f"rank {rank} has read another checkpoint than rank 0: files of the model were "
                    "replaced while it was loaded"
                )
        self._model.join(self.ranks.join(self._placement))

    def sibling(self, settings: TorchSettings) -> None:
        """None: a sibling would need ranks of its own."""
        return

    def allocate(self, layout: KvBlockShape, num_blocks: int) -> KvBlockShape:
        """Let the other ranks allocate their pools. Returns the shape of rank 0's blocks, given
        that of the whole model's."""
        own = replace(layout, kv_heads=len(self._shard.kv_heads))
        if self._driver is not None:
            size = num_blocks * own.block_bytes
            for device in self._placement.devices[1:]:
                self._device_pools.append(RankDevicePool(size, device, self._driver))
        self._pools = self.ranks.allocate(num_blocks, [pool.export for pool in self._device_pools])
        return own

    def region(self, layout: RankKvLayout) -> Region:
        """The pools of all ranks, as one region of the model's `layout`. Peers may write to them
        while no step computes: all ranks write their KV before a step ends. Raises `ConfigError`
        if the memory of other processes cannot be mapped here."""
        assert self._pool is not None, "bind comes before region"
        blocks, own = self._pool.num_blocks, self._pool.memory
        layouts = layouts_of_ranks(layout, self._shard.ranks)
        if self._device_pools:
            addresses = [self._pool.tensor.data_ptr(), *(one.address for one in self._device_pools)]
            pools = [
                Region(one, blocks, address=address)
                for one, address in zip(layouts, addresses, strict=True)
            ]
            return region_of_ranks(layout, pools)
        if own is None or None in self._pools:
            raise ConfigError(
                "--tp: the KV of several ranks cannot be transferred on this system, which has no "
                "memfd; use --mode=aggregated"
            )
        regions = [region_in_memory(layouts[0], own)]
        for one, pool in zip(layouts[1:], self._pools, strict=True):
            assert pool is not None
            regions.append(Region(one, blocks, view=memoryview(pool.memory), fd=pool.fd))
        return region_of_ranks(layout, regions)

    def bind(self, pool: KvPool) -> None:
        self._pool = pool
        self._model.bind(pool)

    def forward(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> torch.Tensor:
        with self._together(RankPlan(RankTask.FORWARD, batch)):
            return self._model.forward(batch, after)

    def greedy(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> list[int]:
        with self._together(RankPlan(RankTask.GREEDY, batch)), torch.inference_mode():
            tokens: list[int] = argmax(
                self._model.logits(self._model.forward(batch, after))
            ).tolist()
        return tokens

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not len(hidden):
            return self._model.logits(hidden)
        with self._together(RankPlan(RankTask.LOGITS, rows=len(hidden))):
            # Other ranks have the same rows, but do not know which of them are wanted.
            hidden = hidden.contiguous()
            self._model.group.broadcast(hidden)
            return self._model.logits(hidden)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks of all ranks' pools (`KvPool.copy`)."""
        assert self._pool is not None, "bind comes before copy"
        with self._together(RankPlan(RankTask.COPY, copies=tuple(copies))):
            self._pool.copy(copies)
            self._model.group.barrier()

    def close(self) -> None:
        self._pool = None
        self._model.close()
        self.ranks.close()
        for pool in self._pools:
            if pool is not None:
                pool.close()
        self._pools = []
        for memory in self._device_pools:
            memory.close()
        self._device_pools = []

    @contextmanager
    def _together(self, plan: RankPlan) -> Iterator[None]:
        """Tell the ranks, and end them if anything fails after that."""
        self.ranks.tell(plan)
        try:
            yield
        except EngineDied:
            raise
        except Exception as error:
            raise self.ranks.lost(error) from error
