"""AIBrix's two rules over requests per worker, from its documentation: KPA and APA.

Both grow to at most twice the size and shrink to at most half of it in one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf
from statistics import fmean
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bench.planner_arms.base import PoolView
    from pdserve.ids import Seconds

__all__ = ["Apa", "Kpa"]

_RATE: Final = 2
_STABLE: Final[Seconds] = 60.0
_PANIC: Final[Seconds] = 6.0
_PANIC_AT: Final = 2.0
"""Size for the panic window over the ready workers, at which a panic begins."""
_TOLERANCE: Final = 0.1


@dataclass(slots=True)
class _Window:
    """Requests of the whole pool over the last seconds."""

    seen: list[tuple[Seconds, int]] = field(default_factory=list)

    def add(self, view: PoolView) -> None:
        self.seen = [(at, n) for at, n in self.seen if at > view.now - _STABLE]
        self.seen.append((view.now, view.requests))

    def mean(self, since: Seconds) -> float:
        return fmean(n for at, n in self.seen if at > since)


def _bounded(ready: int, want: int) -> int:
    return min(max(want, ready // _RATE, 1), ready * _RATE)


@dataclass(slots=True)
class Kpa:
    """The rule of Knative: means over 60 s, and over 6 s in a panic, which takes nothing away and
    lasts until 60 s after its last cause."""

    target: float
    """Requests per worker."""
    interval: Seconds = 2.0
    _window: _Window = field(default_factory=_Window)
    _panic_until: Seconds = -inf
    _highest: int = 0

    def wanted(self, view: PoolView) -> int:
        self._window.add(view)
        ready = len(view.workers)
        stable = ceil(self._window.mean(view.now - _STABLE) / self.target)
        panic = ceil(self._window.mean(view.now - _PANIC) / self.target)
        if panic / ready >= _PANIC_AT:
            self._panic_until = view.now + _STABLE
        if view.now >= self._panic_until:
            self._highest = 0
            return _bounded(ready, stable)
        self._highest = max(self._highest, _bounded(ready, max(stable, panic)), view.size)
        return self._highest


@dataclass(slots=True)
class Apa:
    """Requests per worker over 60 s, with a tolerance of 10% to both sides."""

    target: float
    """Requests per worker."""
    interval: Seconds = 10.0
    _window: _Window = field(default_factory=_Window)

    def wanted(self, view: PoolView) -> int:
        self._window.add(view)
        ready = len(view.workers)
        ratio = self._window.mean(view.now - _STABLE) / ready / self.target
        if abs(ratio - 1) <= _TOLERANCE:
            return view.size
        return _bounded(ready, ceil(ready * ratio))
