"""Tracks which workers each held request may go to: those that its client allows and where it has
not failed yet.

Thousands of requests may wait, each with its own names of workers, and the router looks at all of
them after every first token. So a filter becomes two sets once, when its request comes; requests
with equal filters share them. The sets are updated when workers come or go, and a look costs one
set operation, bounded by the names in the filter. Pure; each hold queue owns one `WorkerFilters`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet

    from pdserve.ids import Bytes, NodeId
    from pdserve.messages.routing import RouteRequest

__all__ = ["WorkerFilter", "WorkerFilters", "WorkerSet", "filter_bytes"]

_NAME_BYTES: Final[Bytes] = 160
"""Memory of a name in a request besides its letters: the string's header, a place in a tuple and in
a set."""

_Key = tuple[frozenset["NodeId"], frozenset["NodeId"], str]


@dataclass(slots=True, eq=False)
class WorkerSet:
    """Some workers of a model: all that may be chosen, or those that are open."""

    sound: frozenset[NodeId]
    doubtful: frozenset[NodeId]
    adapted: Callable[[str], AbstractSet[NodeId]]
    """Workers by LoRA adapter."""
    _with: dict[str, WorkerSet] = field(default_factory=dict)

    def having(self, lora: str) -> WorkerSet:
        """The workers of the set that have the adapter; looked up once for each adapter."""
        if not lora:
            return self
        found = self._with.get(lora)
        if found is None:
            names = frozenset(self.adapted(lora))
            found = WorkerSet(self.sound & names, self.doubtful & names, self.adapted)
            self._with[lora] = found
        return found


class WorkerFilter:
    """The filter that some held requests share."""

    __slots__ = (
        "_wanted",
        "all_workers",
        "allowed",
        "doubtful",
        "excluded",
        "is_open",
        "lora",
        "open",
        "possible",
        "requests",
    )

    def __init__(self, allowed: frozenset[NodeId], excluded: frozenset[NodeId], lora: str) -> None:
        self.allowed = allowed
        """The only workers that it takes; empty: all."""
        self.excluded = excluded
        self.lora = lora
        self.requests = 0
        """Number of requests that wait with this filter."""
        self._wanted = allowed - excluded
        # Results of `WorkerFilters`, with the set of workers that each holds for.
        self.all_workers: WorkerSet | None = None
        self.possible = False
        self.doubtful = False
        """True if only doubtful workers may take such a request."""
        self.open: WorkerSet | None = None
        self.is_open = False

    @classmethod
    def of(cls, request: RouteRequest) -> WorkerFilter:
        """The filter of a request."""
        return cls(frozenset(request.allowed), frozenset(request.excluded), request.lora)

    @property
    def key(self) -> _Key:
        return (self.allowed, self.excluded, self.lora)

    def takes(self, worker: NodeId) -> bool:
        """True if the filter admits this worker, whatever adapters it has."""
        return worker not in self.excluded and (not self.allowed or worker in self.allowed)

    def meets(self, workers: frozenset[NodeId]) -> bool:
        """True if some of these workers pass. Costs at most one look-up for each name in the
        filter."""
        if self.allowed:
            return not self._wanted.isdisjoint(workers)
        return not self.excluded.issuperset(workers)


class WorkerFilters:
    """The filters of one hold queue's requests that not every worker may take."""

    def __init__(self) -> None:
        self.judged = 0
        """Number of comparisons of a filter with a set of workers."""
        self.all_workers: WorkerSet | None = None
        """All workers that may be chosen, as of `version` of the model's view."""
        self.version = 0
        self._known: dict[_Key, WorkerFilter] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[WorkerFilter]:
        return iter(self._known.values())

    def add(self, request: RouteRequest) -> WorkerFilter | None:
        """Add the filter of a request that begins to wait; None: any worker may take it."""
        if not (request.excluded or request.allowed or request.lora):
            return None
        worker_filter = WorkerFilter.of(request)
        worker_filter = self._known.setdefault(worker_filter.key, worker_filter)
        worker_filter.requests += 1
        return worker_filter

    def remove(self, worker_filter: WorkerFilter) -> None:
        """Removes a request that no longer waits."""
        worker_filter.requests -= 1
        if not worker_filter.requests:
            del self._known[worker_filter.key]

    def possible(self, worker_filter: WorkerFilter, all_workers: WorkerSet) -> bool:
        """True if some worker may take it, open or not."""
        if worker_filter.all_workers is not all_workers:
            self.judged += 1
            crowd = all_workers.having(worker_filter.lora)
            sound = worker_filter.meets(crowd.sound)
            worker_filter.doubtful = not sound
            worker_filter.possible = sound or worker_filter.meets(crowd.doubtful)
            worker_filter.all_workers = all_workers
        return worker_filter.possible

    def is_open(
        self, worker_filter: WorkerFilter, all_workers: WorkerSet, open_: WorkerSet
    ) -> bool:
        """True if an open worker may take it. A suspect one counts only if no sound worker may,
        open or not."""
        if worker_filter.open is not open_:
            possible = self.possible(worker_filter, all_workers)
            self.judged += 1
            crowd = open_.having(worker_filter.lora)
            worker_filter.is_open = possible and worker_filter.meets(
                crowd.doubtful if worker_filter.doubtful else crowd.sound
            )
            worker_filter.open = open_
        return worker_filter.is_open


def filter_bytes(request: RouteRequest) -> Bytes:
    """Approximate memory of the names in a request's filter."""
    names = (*request.allowed, *request.excluded)
    return len(request.lora) + sum(map(len, names)) + _NAME_BYTES * len(names)
