"""Collective operations among the ranks of one model: gloo over TCP on this host, or NCCL.

A rank that ends or stands still makes the others' operations fail, at once or after `patience`. A
failed group cannot be used any more, since the ranks no longer agree which operation comes next.
With gloo an operation returns when this rank's part is done. With NCCL it is queued on the current
stream; the deadline is then NCCL's own, which ends the process. It knows tensors, no models.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve_engines.torch.tensor_parallel.placement import RankPlacement

__all__ = ["GlooGroup", "NcclGroup", "RankGroup", "join_group"]

_HOST = "127.0.0.1"
_POLL: Final[Seconds] = 0.01
_CONNECT: Final[Seconds] = 60.0
"""Time that NCCL has to connect all ranks, which takes longer than any step."""


def join_group(placement: RankPlacement, store_fd: int, rank: int, patience: Seconds) -> RankGroup:
    """Join the group of a model's ranks; returns when all have. `store_fd`: an empty memory file
    that all ranks share, by which they find each other. `patience`: longest wait for another rank,
    in every operation. Raises RuntimeError if a rank does not come, `ConfigError` without NCCL."""
    ranks = len(placement.devices)
    if placement.collectives == "nccl":
        return NcclGroup(store_fd, rank, ranks, patience, placement.devices[rank])
    return GlooGroup(store_fd, rank, ranks, patience)


class RankGroup(ABC):
    """One rank's end of a group. Used by one thread."""

    def __init__(self, group: Any, rank: int, ranks: int, token: torch.Tensor) -> None:
        """`token`: a number on the rank's device, for `barrier`."""
        self.rank = rank
        self.ranks = ranks
        # Torch's stubs know little of a group that is not the process's only one.
        self._group: Any = group
        self._token = token

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the contiguous tensor of every rank by the sum of all."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace the contiguous tensor of every rank by that of rank 0."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which have one shape, in the order of ranks; on other ranks
        than 0 an empty list."""

    def barrier(self) -> None:
        """Wait for all ranks; with NCCL the current stream does."""
        self.all_reduce(self._token)

    def close(self) -> None:
        """Leave the group, whose other ranks fail if they compute. Idempotent."""
        # An error's traceback may keep this object, and should not keep its sockets.
        self._group = None

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        options = distributed.GatherOptions()
        options.rootRank = 0
        found = [torch.empty_like(tensor) for _ in range(self.ranks)] if self.rank == 0 else []
        self._group.gather([found] if found else [], [tensor], options).wait()
        return found


class GlooGroup(RankGroup):
    """By gloo, which reads host memory: tensors of a GPU are copied there and back."""

    def __init__(self, store_fd: int, rank: int, ranks: int, patience: Seconds) -> None:
        """As `join_group`."""
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_HOST)]
        options._timeout = timedelta(seconds=patience)
        group = gloo(_store(store_fd, ranks), rank, ranks, options)
        super().__init__(group, rank, ranks, torch.zeros(1))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        held = _in_host_memory(tensor)
        self._group.allreduce([held]).wait()
        _copy_back(held, tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        held = _in_host_memory(tensor)
        self._broadcast(held)
        _copy_back(held, tensor)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [part.to(tensor.device) for part in self._gather(_in_host_memory(tensor))]


class NcclGroup(RankGroup):
    """By NCCL, with a GPU for each rank. It never ran on GPUs so far."""

    def __init__(
        self, store_fd: int, rank: int, ranks: int, patience: Seconds, device: torch.device
    ) -> None:
        """As `join_group`; `device` is this rank's GPU."""
        nccl: Any = getattr(distributed, "ProcessGroupNCCL", None)
        if nccl is None:
            raise ConfigError(
                "--tp on GPUs needs NCCL, which this torch does not have: install a torch for CUDA"
            )
        options = nccl.Options()
        options._timeout = timedelta(seconds=patience)
        group = nccl(_store(store_fd, ranks), rank, ranks, options)
        super().__init__(group, rank, ranks, torch.zeros(1, device=device))
        self._meet(max(patience, _CONNECT))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._broadcast(tensor)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._gather(tensor)

    def close(self) -> None:
        if self._group is not None:
            # What waits for a lost rank would never end by itself.
            with suppress(RuntimeError):
                self._group.abort()
        super().close()

    def _meet(self, patience: Seconds) -> None:
        """Connect, which NCCL does in the first operation, and wait no longer than `patience`."""
        until = time.monotonic() + patience
        work = self._group.allreduce([self._token])
        while not work.is_completed():
            if time.monotonic() > until:
                self.close()
                raise RuntimeError(f"NCCL has not connected all ranks within {patience:g} s")
            time.sleep(_POLL)


def _store(store_fd: int, ranks: int) -> Any:
    # Each process opens the file anew, because the store locks it by its open description.
    return distributed.FileStore(f"/proc/self/fd/{store_fd}", ranks)  # type: ignore[attr-defined]


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def _copy_back(held: torch.Tensor, tensor: torch.Tensor) -> None:
    if held is not tensor:
        tensor.copy_(held)
