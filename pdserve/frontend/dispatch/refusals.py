"""Remembers which workers did not take a request, and why. Pure: the caller passes times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import LinkError, NotReady, NoWorker
from pdserve.frontend.dispatch.migration.migration_state import Exclusions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.errors import PdserveError
    from pdserve.ids import Epoch, NodeId, NodeLife, Seconds

__all__ = ["Refusals"]

_APART: Final[Seconds] = 2.0
"""Seconds for which a worker that refused or lost the request is excluded, if it lives: another
worker is better, but this one is better than none."""


class Refusals:
    """The workers that refused or lost one request."""

    __slots__ = ("_excluded", "_refused", "had_worker", "last", "tries")

    def __init__(self) -> None:
        self._excluded = Exclusions()
        self._refused: dict[NodeLife, Seconds] = {}
        """When each worker refused."""
        self.tries = 0
        """Number of workers that were asked to be the first one."""
        self.last: PdserveError | None = None
        """The last refusal."""
        self.had_worker = False
        """True once a worker has had the request: then workers are excluded for a while only, and
        the request waits longer for another one."""

    def refused(self, life: NodeLife, error: PdserveError, now: Seconds) -> None:
        """Records that a worker did not take the request, and excludes it."""
        self.last = error
        self._refused[life] = now
        self.leave_out(life, now)

    def leave_out(self, life: NodeLife, now: Seconds) -> None:
        """Excludes a worker."""
        self._excluded.add(life, now + _APART if self.had_worker else None)

    def lost_worker(self, now: Seconds) -> None:
        """Records that the request has lost a worker that had it."""
        if not self.had_worker:
            self.had_worker = True
            self._excluded.relax(now + _APART)

    def excluded(
        self, now: Seconds, epoch_of: Callable[[NodeId], Epoch | None]
    ) -> tuple[NodeId, ...]:
        """As `Exclusions.at`."""
        return self._excluded.at(now, epoch_of) if self._excluded else ()

    def next_end(self, now: Seconds) -> Seconds | None:
        """The next time at which an exclusion ends."""
        return self._excluded.next_end(now)

    def let_in_again(self, now: Seconds) -> bool:
        """Allows the workers again whose refusal is long enough ago. True if there was one."""
        allowed = [life for life, at in self._refused.items() if now - at >= _APART]
        for life in allowed:
            del self._refused[life]
        self._excluded.remove(allowed)
        return bool(allowed)

    def hide(
        self, error: PdserveError, now: Seconds, epoch_of: Callable[[NodeId], Epoch | None]
    ) -> bool:
        """True if routers find no worker only because the workers that refused are excluded: then
        their errors are the cause to report, and not `error`."""
        return (
            isinstance(error, NoWorker | NotReady)
            and self.last is not None
            and not isinstance(self.last, NoWorker)
            and bool(self.excluded(now, epoch_of))
        )

    @property
    def words(self) -> str:
        """The last refusal, to end a sentence with; empty if it tells a client nothing."""
        hide = self.last is None or isinstance(self.last, LinkError)
        return "" if hide else f": {self.last}"
