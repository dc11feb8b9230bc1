"""Judges the requests of a replay while it runs, as frontends do, for routers and planners. Pure.

The objective is the replay's own: a long prompt may take longer by what it takes alone. Summaries
judge by the same rule (`metrics.meets_slo`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.observe.slo import Objectives, Observed, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.observe.slo import Fault, SloCause
    from pdserve.sim.replay.config import ReplaySlo
    from pdserve.sim.replay.record import ReplayRecord

__all__ = ["ReplayJudge", "Verdicts"]

Verdicts = tuple[tuple[str, str], ...]
"""As `messages.demand.EndedRequest.verdicts`."""

_BY_CLIENT: Final = ("cancelled", "not asked")
_FULL: Final = ("rejected", "deadline")
"""Ends of requests that had to wait, or had no place to wait, until the end."""


@dataclass(frozen=True, slots=True)
class ReplayJudge:
    """The objective of a replay. It has the shape of a function of a record that has ended."""

    slo: ReplaySlo
    cold: Callable[[int], Seconds]
    """Seconds that a prompt of a length takes on an idle worker with an empty cache."""

    def __call__(self, record: ReplayRecord) -> Verdicts:
        """Each objective of the request with the cause of its miss; empty: it was kept."""
        slo = self.slo
        limit = slo.ttft + slo.cold * self.cold(record.prompt_tokens)
        limits, fault = Objectives(limit, slo.itl or None), _fault(record)
        if fault:
            seen = Observed(fault=fault)
        else:
            itl = record.itl if record.itl >= 0 else None
            seen = Observed(record.ttft, itl, before=_before(record), after=_after(record))
        held = not record.worker and record.outcome in _FULL
        return tuple(
            (one.objective, "held" if held else one.cause)
            for one in judge(limits, seen)
            if one.result != "none"
        )


def _fault(record: ReplayRecord) -> Fault:
    if record.completed:
        return ""
    return "client" if record.outcome in _BY_CLIENT else "server"


def _before(record: ReplayRecord) -> dict[SloCause, Seconds]:
    """The parts of the time to the first token. A replay has no text to work on, so what is left
    was spent at a worker that did not answer."""
    parts: dict[SloCause, Seconds] = {
        "held": record.held,
        "queue": record.queue_seconds,
        "handoff" if record.prefill == "remote" else "prefill": record.prefill_seconds,
    }
    parts["moved"] = max(0.0, record.ttft - sum(parts.values()))
    return parts


def _after(record: ReplayRecord) -> dict[SloCause, Seconds]:
    return {"decode": max(0.0, record.last - record.first)}
