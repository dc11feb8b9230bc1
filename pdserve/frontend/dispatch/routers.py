"""Chooses which router a frontend asks next. Pure: the caller passes times.

Each frontend has its own order of routers. An unreachable router is skipped for a moment. A router
that answers but fails inside is asked only when no other is left, with a longer pause after each
failure. `cluster_client` reaches the routers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import NodeId, Seconds

__all__ = ["RouterSearch", "Routers"]

_SILENT: Final[Seconds] = 1.0
"""Seconds for which an unreachable router is not asked."""
_FIRST: Final[Seconds] = 1.0
"""Seconds for which a router that failed inside is asked last, after its first failure."""
_MOST: Final[Seconds] = 30.0
"""Each further failure doubles the pause, up to this many seconds."""


@dataclass(slots=True)
class _Failing:
    pause: Seconds
    until: Seconds


@dataclass(slots=True)
class RouterSearch:
    """The search for a router that decides about one request."""

    start: Seconds
    """Time since which the search waits for a router; time that a router held the request is
    added."""
    over: Seconds = inf
    """Time of the request's deadline."""
    behind: set[NodeId] = field(default_factory=set)
    """Routers that do not know a worker yet; they are asked again after a pause."""
    failed: set[NodeId] = field(default_factory=set)
    """Routers that failed inside on this request; they are not asked again."""


class Routers:
    """The cluster's routers, as one frontend sees them."""

    def __init__(self) -> None:
        self.order: tuple[NodeId, ...] = ()
        """Routers that take requests, best first."""
        self._silent: dict[NodeId, Seconds] = {}
        """Times until which unreachable routers are not asked."""
        self._failing: dict[NodeId, _Failing] = {}

    @property
    def failing(self) -> tuple[NodeId, ...]:
        """Routers that failed inside and have not answered since."""
        return tuple(sorted(self._failing))

    def choose(self, now: Seconds, search: RouterSearch) -> NodeId | None:
        """The router to ask; None if there is none at the moment."""
        left = [router for router in self.order if self._may_be_asked(now, router, search)]
        sound = (router for router in left if not self._is_penalised(now, router))
        return next(sound, left[0] if left else None)

    def all_failed(self, search: RouterSearch) -> bool:
        """True if every router has failed inside on this request."""
        return bool(self.order) and search.failed.issuperset(self.order)

    def next_change(self, now: Seconds) -> Seconds | None:
        """The next time at which an unreachable router may be asked again."""
        return min((until for until in self._silent.values() if until > now), default=None)

    def unreachable(self, now: Seconds, router: NodeId) -> None:
        """Records that a router did not answer."""
        self._silent[router] = now + _SILENT

    def failed(self, now: Seconds, router: NodeId) -> None:
        """Records that a router answered with an internal error."""
        before = self._failing.get(router)
        pause = _FIRST if before is None else min(_MOST, 2 * before.pause)
        self._failing[router] = _Failing(pause, now + pause)

    def answered(self, router: NodeId) -> bool:
        """Records that a router decided; returns True if it had failed before."""
        return self._failing.pop(router, None) is not None

    def forget(self, router: NodeId) -> None:
        """Forgets the failures of a router whose life is over."""
        self._silent.pop(router, None)
        self._failing.pop(router, None)

    def sweep(self, now: Seconds) -> None:
        """Drops entries that have expired."""
        for router in [router for router, until in self._silent.items() if until <= now]:
            del self._silent[router]

    def _may_be_asked(self, now: Seconds, router: NodeId, search: RouterSearch) -> bool:
        if router in search.behind or router in search.failed:
            return False
        return self._silent.get(router, now) <= now

    def _is_penalised(self, now: Seconds, router: NodeId) -> bool:
        failing = self._failing.get(router)
        return failing is not None and failing.until > now
