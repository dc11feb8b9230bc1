"""Collective operations among the ranks of one model: gloo, over TCP on this host.

An operation returns when this rank's part is done. A rank that ends or stands still makes the
others' operations fail, at once or after `patience`. A failed group cannot be used any more, since
the ranks no longer agree which operation comes next. It knows tensors, no models.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["GlooGroup"]

_HOST = "127.0.0.1"


class GlooGroup:
    """One rank's end of a group. Used by one thread."""

    def __init__(self, store_fd: int, rank: int, ranks: int, patience: Seconds) -> None:
        """Join the group; returns when all ranks have. `store_fd`: an empty memory file that all
        ranks share, by which they find each other. `patience`: longest wait for another rank, in
        every operation. Raises RuntimeError if a rank does not come."""
        self.rank = rank
        self.ranks = ranks
        # Each process opens the file anew, because the store locks it by its open description.
        store = distributed.FileStore(f"/proc/self/fd/{store_fd}", ranks)  # type: ignore[attr-defined]
        # Torch's stubs know little of a group that is not the process's only one.
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_HOST)]
        options._timeout = timedelta(seconds=patience)
        self._group: Any = gloo(store, rank, ranks, options)
        self._token = torch.zeros(1)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the contiguous tensor of every rank by the sum of all."""
        self._group.allreduce([tensor]).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace the contiguous tensor of every rank by that of rank 0."""
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which have one shape, in the order of ranks; on other ranks
        than 0 an empty list."""
        options = distributed.GatherOptions()
        options.rootRank = 0
        found = [torch.empty_like(tensor) for _ in range(self.ranks)] if self.rank == 0 else []
        self._group.gather([found] if found else [], [tensor], options).wait()
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_reduce(self._token)

    def close(self) -> None:
        """Leave the group, whose other ranks fail if they compute. Idempotent."""
        # An error's traceback may keep this object, and should not keep its sockets.
        self._group = None
