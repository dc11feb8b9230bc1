"""The rule that changes nothing: a pool of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.planner_arms.base import PoolView
    from pdserve.ids import Seconds

__all__ = ["Static"]


@dataclass(slots=True)
class Static:
    """As many workers as somebody started."""

    workers: int
    interval: Seconds = 60.0

    def wanted(self, view: PoolView) -> int:
        return self.workers
