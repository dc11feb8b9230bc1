"""Shares worker threads, or other places, fairly among tenants: chooses the next job.

The tenant with the fewest running jobs is next; among equals the one with the least time used. An
idle tenant collects no credit: it returns level with the tenant served last. Jobs of one tenant run
by arrival, those marked `first` before the others. A full queue drops the newest job of the tenant
with the most jobs, or refuses the new job if that is its own tenant: no tenant fills the queue for
others, and one tenant alone may use all of it.

Jobs that cannot be ended for others may also have a share (`has_place`): a tenant begins a job only
while it runs fewer than there are free places. Alone it gets half of them, a second one half of the
rest, and so on: one tenant, or a few, never hold all places. Pure: no threads, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds

__all__ = ["FairQueue"]

T = TypeVar("T")

_REMEMBERED: Final = 1024
"""Number of idle tenants whose used time is remembered."""


@dataclass(slots=True, eq=False)
class _Tenant(Generic[T]):
    """Waiting and running jobs of one tenant."""

    name: str
    served: Seconds
    """Worker time used by the tenant's jobs, on the queue's scale."""
    running: int = 0
    first: dict[T, None] = field(default_factory=dict)
    """Waiting jobs that are never refused or dropped, by arrival."""
    waiting: dict[T, None] = field(default_factory=dict)

    @property
    def rank(self) -> tuple[int, Seconds, str]:
        return (self.running, self.served, self.name)

    @property
    def held(self) -> int:
        """Number of jobs that count against the bound."""
        return self.running + len(self.waiting)

    def head(self) -> T | None:
        """Next job of this tenant; None if none waits."""
        return next(iter(self.first or self.waiting), None)


class FairQueue(Generic[T]):
    """Holds the waiting jobs of all tenants. A job is any hashable object."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[T]] = {}
        self._away: OrderedDict[str, Seconds] = OrderedDict()
        """Idle tenants that have used more time than `_floor`."""
        self._floor: Seconds = 0.0
        """Time used by the tenant that began a job last."""
        self._length = 0
        self.running = 0
        """Number of all tenants' running jobs."""

    def __len__(self) -> int:
        """Return the number of waiting jobs."""
        return self._length

    def push(self, tenant: str, job: T, *, first: bool = False) -> None:
        """Add a waiting job; `first` puts it before its tenant's other jobs."""
        entry = self._entry(tenant)
        (entry.first if first else entry.waiting)[job] = None
        self._length += 1

    def remove(self, tenant: str, job: T) -> bool:
        """Remove a waiting job; False if it does not wait."""
        entry = self._tenants.get(tenant)
        if entry is None:
            return False
        for jobs in (entry.first, entry.waiting):
            if job in jobs:
                del jobs[job]
                self._length -= 1
                self._forget(entry)
                return True
        return False

    def next(self, may: Callable[[T, int], bool]) -> T | None:
        """Return the next job that `may` begin, without removing it; None if there is none.

        `may` gets a job and the number of its tenant's running jobs. A tenant whose next job may
        not begin is skipped.
        """
        for entry in sorted(self._tenants.values(), key=lambda each: each.rank):
            job = entry.head()
            if job is not None and may(job, entry.running):
                return job
        return None

    def running_of(self, tenant: str) -> int:
        """Return the number of a tenant's running jobs."""
        entry = self._tenants.get(tenant)
        return 0 if entry is None else entry.running

    def has_place(self, running: int, places: int) -> bool:
        """Return True if a tenant with `running` jobs may begin one more in one of `places`."""
        return running < places - self.running

    def next_in(self, places: int) -> T | None:
        """Return the next job that may begin within its tenant's share of `places`."""
        return self.next(lambda _, running: self.has_place(running, places))

    def begin(self, tenant: str, job: T) -> None:
        """Count `job`, which waited, as running."""
        entry = self._tenants[tenant]
        entry.running += 1
        self.running += 1
        self.remove(tenant, job)
        self._floor = max(self._floor, entry.served)

    def end(self, tenant: str, took: Seconds) -> None:
        """Count a running job as finished or abandoned; `took` is its time."""
        entry = self._tenants[tenant]
        entry.running -= 1
        self.running -= 1
        entry.served += took
        self._forget(entry)

    def make_room(self, tenant: str) -> T | None:
        """Remove and return a job to make room for one of `tenant`; None: refuse the new one."""
        waiting = (each for each in self._tenants.values() if each.waiting)
        largest = max(waiting, key=lambda each: each.held, default=None)
        own = self._tenants.get(tenant)
        if largest is None or largest.held <= (0 if own is None else own.held) + 1:
            return None
        job = next(reversed(largest.waiting))
        self.remove(largest.name, job)
        return job

    def _entry(self, tenant: str) -> _Tenant[T]:
        entry = self._tenants.get(tenant)
        if entry is None:
            served = max(self._floor, self._away.pop(tenant, 0.0))
            entry = self._tenants[tenant] = _Tenant(tenant, served)
        return entry

    def _forget(self, entry: _Tenant[T]) -> None:
        if entry.running or entry.first or entry.waiting:
            return
        del self._tenants[entry.name]
        if entry.served > self._floor:
            self._away[entry.name] = entry.served
            if len(self._away) > _REMEMBERED:
                self._away.popitem(last=False)
