"""Names the clusters that a plan may choose. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pdserve.sim.replay.config import ReplayConfig

__all__ = ["ClusterShape", "aggregated", "split"]


class ClusterShape(NamedTuple):
    """Workers by mode."""

    workers: int = 0
    """Aggregated workers."""
    prefill: int = 0
    decode: int = 0

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.workers + self.prefill + self.decode

    def __str__(self) -> str:
        if self.prefill:
            return f"{self.prefill} prefill + {self.decode} decode"
        return f"{self.workers} aggregated"

    def applied(self, config: ReplayConfig) -> ReplayConfig:
        """The configuration with these workers."""
        return replace(config, workers=self.workers, prefill=self.prefill, decode=self.decode)


def aggregated(size: int) -> ClusterShape:
    """`size` workers that prefill and decode."""
    return ClusterShape(workers=size)


def split(prefill: int, size: int) -> ClusterShape:
    """`size` workers, of which `prefill` only prefill and the others decode."""
    return ClusterShape(prefill=prefill, decode=size - prefill)
