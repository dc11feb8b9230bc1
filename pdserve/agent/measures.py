"""Counts what an agent does with workers, for metrics. Owned by `workers.Workers`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.messages.planner import Instance
    from pdserve.observe.metrics import Metrics

__all__ = ["OTHER_KIND", "AgentMeasures", "ExitKind"]

StartOutcome = Literal["started", "failed", "refused"]
ExitKind = Literal["ended", "failed", "killed", "lost"]
_OUTCOMES: Final[tuple[StartOutcome, ...]] = get_args(StartOutcome)
_EXITS: Final[tuple[ExitKind, ...]] = get_args(ExitKind)
OTHER_KIND: Final = "other"
"""Label of a kind that the agent does not have: a planner may ask for anything."""


class AgentMeasures:
    """The counters and gauges of one agent."""

    def __init__(self, metrics: Metrics, kinds: Iterable[str] = ()) -> None:
        """Counters of `kinds` begin at 0: Prometheus sees no increase of one that begins at 1."""
        self._metrics = metrics
        for kind in kinds:
            for outcome in _OUTCOMES:
                metrics.agent_starts.labels(kind, outcome)
            for how in _EXITS:
                metrics.agent_exits.labels(kind, how)

    def asked(self, kind: str, outcome: StartOutcome) -> None:
        """A worker was to be started."""
        self._metrics.agent_starts.labels(kind, outcome).inc()

    def exited(self, kind: str, how: ExitKind) -> None:
        """A worker has ended."""
        self._metrics.agent_exits.labels(kind, how).inc()

    def adopted(self, kind: str) -> None:
        """A worker of an earlier agent runs."""
        self._metrics.agent_adopted.labels(kind).inc()

    def note(
        self,
        slots: Mapping[str, int],
        free: Mapping[str, int],
        kinds: Iterable[str],
        workers: Iterable[Instance],
    ) -> None:
        """What there is now. `slots` and `free` by group; `workers` that have not ended."""
        states = Counter((one.kind, one.state) for one in workers)
        for group, number in slots.items():
            self._metrics.agent_slots.labels(group).value = number
            self._metrics.agent_free_slots.labels(group).value = free[group]
        there = {(kind, state) for kind in kinds for state in ("booting", "running", "ending")}
        for kind, state in there | set(states):
            self._metrics.agent_workers.labels(kind, state).value = states[kind, state]
