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
"""A router that could not be reached is not asked for so long."""
_FIRST: Final[Seconds] = 1.0
"""A router that failed inside is asked last for so long,"""
_MOST: Final[Seconds] = 30.0
"""and for twice as long at each further failure, up to this."""


@dataclass(slots=True)
class _Failing:
    pause: Seconds
    until: Seconds


@dataclass(slots=True)
class RouterSearch:
    """One question on its way through the routers."""

    start: Seconds
    """Since when it waits for a router; time that one held it does not count."""
    over: Seconds = inf
    """When the request's own time is over."""
    behind: set[NodeId] = field(default_factory=set)
    """Routers that have not heard of a worker yet: asked again after a pause."""
    failed: set[NodeId] = field(default_factory=set)
    """Routers that failed inside on it: not asked again."""


class Routers:
    """The routers of the cluster, as one frontend sees them."""

    def __init__(self) -> None:
        self.order: tuple[NodeId, ...] = ()
        """Those that take questions, best first."""
        self._silent: dict[NodeId, Seconds] = {}
        """Until when these are not asked."""
        self._failing: dict[NodeId, _Failing] = {}

    @property
    def failing(self) -> tuple[NodeId, ...]:
        """Those that failed inside and have not answered since."""
        return tuple(sorted(self._failing))

    def choose(self, now: Seconds, search: RouterSearch) -> NodeId | None:
        """The router to ask; None: none for the moment."""
        left = [router for router in self.order if self._may_be_asked(now, router, search)]
        sound = (router for router in left if not self._is_penalised(now, router))
        return next(sound, left[0] if left else None)

    def all_failed(self, search: RouterSearch) -> bool:
        """No router is left that could place this question."""
        return bool(self.order) and search.failed.issuperset(self.order)

    def next_change(self, now: Seconds) -> Seconds | None:
        """When one that could not be reached is asked again."""
        return min((until for until in self._silent.values() if until > now), default=None)

    def unreachable(self, now: Seconds, router: NodeId) -> None:
        """It did not answer."""
        self._silent[router] = now + _SILENT

    def failed(self, now: Seconds, router: NodeId) -> None:
        """It answered by an error of its own."""
        before = self._failing.get(router)
        pause = _FIRST if before is None else min(_MOST, 2 * before.pause)
        self._failing[router] = _Failing(pause, now + pause)

    def answered(self, router: NodeId) -> bool:
        """It decided something. Whether it had failed before."""
        return self._failing.pop(router, None) is not None

    def forget(self, router: NodeId) -> None:
        """Its life is over, and with it all that was wrong."""
        self._silent.pop(router, None)
        self._failing.pop(router, None)

    def sweep(self, now: Seconds) -> None:
        """Drop what no longer matters."""
        for router in [router for router, until in self._silent.items() if until <= now]:
            del self._silent[router]

    def _may_be_asked(self, now: Seconds, router: NodeId, search: RouterSearch) -> bool:
        if router in search.behind or router in search.failed:
            return False
        return self._silent.get(router, now) <= now

    def _is_penalised(self, now: Seconds, router: NodeId) -> bool:
        failing = self._failing.get(router)
        return failing is not None and failing.until > now
