"""Chooses the KV transfer backend for a pair of nodes, and what follows when it fails.

Both ends list their backends and where these reach (`BackendOffers`); the best one with a place in
common is chosen. A backend that fails three times in a row with a peer is skipped for a while,
which is reported, and then tried again. A backend configured by name is never replaced by another.

Pure: times are arguments. The caller supplies order, names and reasons.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.errors import TransferRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import NodeLife, Seconds
    from pdserve.messages.transfer import BackendOffers

__all__ = [
    "MAX_FAILURES",
    "RETRY_INTERVAL",
    "BackendChoice",
    "BackendSelector",
    "incompatible_reason",
]

MAX_FAILURES: Final = 3
"""Failures in a row after which a backend is skipped with a peer."""
RETRY_INTERVAL: Final[Seconds] = 60.0
"""How long a backend is skipped; one further failure skips it as long again."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Which backend to try with a peer."""

    backend: str
    why: str
    """Why no better backend was chosen, in words."""
    degraded: str = ""
    """A better backend that both ends have was skipped after failures: what happened, and until
    when; empty: none."""


@dataclass(slots=True)
class _Record:
    """Recent failures of one backend with one peer."""

    failures: int = 0
    """Failures in a row."""
    until: Seconds = 0.0
    """The backend is skipped until this time."""
    last: str = ""


@dataclass(slots=True)
class BackendSelector:
    """Chooses backends for all peers of one life of a node."""

    order: Sequence[str]
    """The allowed backends, best first."""
    ours: BackendOffers
    _records: dict[tuple[NodeLife, str], _Record] = field(default_factory=dict)

    def choose(self, peer: NodeLife, theirs: BackendOffers, now: Seconds) -> BackendChoice:
        """Choose the backend for a peer. Errors: `TransferRefused` with the reason of each if there
        is none."""
        reasons: list[str] = []
        passed_over: list[tuple[str, _Record]] = []
        for name in self.order:
            why_not = incompatible_reason(name, self.ours, theirs)
            record = self._records.get((peer, name), _Record())
            if why_not:
                reasons.append(f"{name}: {why_not}")
            elif record.failures >= MAX_FAILURES and now < record.until:
                passed_over.append((name, record))
                reasons.append(f"{name}: {_failed(record)}")
            else:
                best = "the best there is" if len(self.order) > 1 else "asked for by name"
                return BackendChoice(
                    name, "; ".join(reasons) or best, _degraded(name, passed_over, now)
                )
        if passed_over:  # no other is left: rather this than nothing
            return BackendChoice(passed_over[0][0], "it has failed, and there is no other")
        raise TransferRefused.at("", str(peer), "choose a backend", "; ".join(reasons) or "none")

    def in_common(self, theirs: BackendOffers | None) -> int:
        """How many backends could join both ends; 1 for a peer that has not sent its list."""
        if theirs is None:
            return 1
        return sum(not incompatible_reason(name, self.ours, theirs) for name in self.order)

    def failed(self, peer: NodeLife, backend: str, reason: str, now: Seconds) -> None:
        """Note that no path could be set up, or that it died."""
        record = self._records.setdefault((peer, backend), _Record())
        record.failures += 1
        record.last = reason
        if record.failures >= MAX_FAILURES:
            record.until = now + RETRY_INTERVAL

    def worked(self, peer: NodeLife, backend: str) -> None:
        """Note that a transfer succeeded."""
        self._records.pop((peer, backend), None)

    def forget(self, peer: NodeLife) -> None:
        """Drop what is known of this life of a peer."""
        for key in [key for key in self._records if key[0] == peer]:
            del self._records[key]


def incompatible_reason(backend: str, ours: BackendOffers, theirs: BackendOffers) -> str:
    """Why a backend cannot join two ends; empty: it can."""
    if backend not in ours.places:
        return ours.lacking.get(backend, "not offered") + " (here)"
    if backend not in theirs.places:
        return theirs.lacking.get(backend, "not offered") + " (there)"
    here, there = ours.places[backend], theirs.places[backend]
    if here and there and not set(here) & set(there):
        return f"no place in common: {_list(here)} here, {_list(there)} there"
    return ""


def _list(places: Sequence[str]) -> str:
    return ", ".join(places) or "none"


def _failed(record: _Record) -> str:
    return f"failed {record.failures} times in a row, lastly: {record.last}"


def _degraded(taken: str, passed_over: Sequence[tuple[str, _Record]], now: Seconds) -> str:
    if not passed_over:
        return ""
    name, record = passed_over[0]
    wait = max(0.0, record.until - now)
    return f"{name} {_failed(record)}; {taken} instead, {name} again in {wait:.0f} s"
