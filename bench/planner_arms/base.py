"""What a scaling rule sees, and the port that all rules implement. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["PoolView", "Rule", "WorkerView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What one ready worker reports."""

    kv: float = 0.0
    """Share of its KV in use, 0 to 1."""
    running: int = 0
    waiting: int = 0
    itl: Seconds = 0.0
    """Recent seconds between two tokens of a sequence; 0: unknown."""
    backlog: int = 0
    """Prompt tokens that no step has computed yet."""

    @property
    def requests(self) -> int:
        """Requests that it has."""
        return self.running + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """All workers at one moment; those that drain do not count."""

    now: Seconds
    """Since the trace's beginning."""
    workers: tuple[WorkerView, ...]
    """Those that are ready; never empty."""
    starting: int = 0
    """Workers that were ordered and do not serve yet."""

    @property
    def size(self) -> int:
        """Workers that there are or will be: what an orchestrator calls replicas."""
        return len(self.workers) + self.starting

    @property
    def requests(self) -> int:
        """Requests at all ready workers."""
        return sum(worker.requests for worker in self.workers)


class Rule(Protocol):
    """Decides how many workers there should be. It may remember what it saw."""

    @property
    def interval(self) -> Seconds:
        """Seconds between two questions."""
        ...

    def wanted(self, view: PoolView) -> int:
        """Number of workers; the caller keeps it within its bounds."""
        ...
