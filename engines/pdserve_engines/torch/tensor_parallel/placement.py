"""Decides on which device each rank computes, and by what the ranks add up their parts. Pure.

On GPUs each rank has one of its own and the ranks use NCCL. A device with a number, as in `--device
cuda:0`, puts all ranks on that one: NCCL takes no GPU twice, so they use gloo, by way of host
memory. That is slow and exists for tests. Numbers count the GPUs that are visible to the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve_engines.torch.kv_budget import AvailableMemory

__all__ = ["RankPlacement", "place_ranks", "smallest_room"]


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where the ranks of one model compute."""

    devices: tuple[torch.device, ...]
    """Of each rank, in order."""
    collectives: Literal["gloo", "nccl"]

    @property
    def sharers(self) -> int:
        """Number of ranks that compute on one device."""
        return len(self.devices) // len(set(self.devices))


def place_ranks(device: torch.device, ranks: int, gpus: int, visible: str = "") -> RankPlacement:
    """Place `ranks` on `device`, which is `cpu`, all GPUs (`cuda`) or one of them. `gpus`: how many
    this process sees; `visible`: the value of CUDA_VISIBLE_DEVICES, for the error. Raises
    `ConfigError` if there are too few."""
    if device.type == "cpu" or device.index is not None or ranks == 1:
        return RankPlacement((device,) * ranks, "gloo")
    if ranks > gpus:
        seen = f" (CUDA_VISIBLE_DEVICES={visible})" if visible else ""
        raise ConfigError(
            f"--tp {ranks}: each rank needs a GPU of its own, and {gpus} are visible{seen}; lower "
            "--tp, or give --device cpu"
        )
    return RankPlacement(tuple(torch.device("cuda", rank) for rank in range(ranks)), "nccl")


def smallest_room(rooms: list[AvailableMemory]) -> AvailableMemory:
    """The memory that all ranks have: blocks have the same number on each of them."""
    return min(rooms, key=lambda room: room.free)
