"""Judges requests by the service level objectives of their models. Pure.

An objective limits the time to the first token (TTFT), or the inter-token latency (ITL) of one
request: the mean over the tokens of its slowest choice. Requests that fail by the server's fault,
or that it refuses, are bad. What ends by the client (its own errors, and cancelled requests) is
neither good nor bad, also if it was late already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pdserve.errors import Cancelled, PdserveError, RateLimited, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.ids import Seconds

__all__ = [
    "CAUSES",
    "NO_OBJECTIVES",
    "Objectives",
    "Observed",
    "SloTable",
    "SloVerdict",
    "fault_of",
    "judge",
    "mean_itl",
]

SloObjective = Literal["ttft", "itl", "both"]
SloResult = Literal["good", "bad", "none"]
SloCause = Literal[
    "", "frontend", "held", "queue", "prefill", "handoff", "decode", "moved", "error"
]
Fault = Literal["", "server", "client"]

CAUSES: Final[tuple[SloCause, ...]] = SloCause.__args__  # type: ignore[attr-defined]


class Objectives(NamedTuple):
    """The objectives of one model; None: no limit."""

    ttft: Seconds | None = None
    itl: Seconds | None = None

    def __bool__(self) -> bool:
        return self.ttft is not None or self.itl is not None


NO_OBJECTIVES: Final = Objectives()


@dataclass(frozen=True, slots=True)
class SloTable:
    """The objectives of all models: limits by model, for other models that of the name ``."""

    ttft: Mapping[str, Seconds] = field(default_factory=dict)
    itl: Mapping[str, Seconds] = field(default_factory=dict)

    def of(self, model: str) -> Objectives:
        """The objectives of a model; an empty name: of requests whose model is unknown."""
        return Objectives(
            self.ttft.get(model, self.ttft.get("")), self.itl.get(model, self.itl.get(""))
        )


class Observed(NamedTuple):
    """What a request took."""

    ttft: Seconds | None = None
    """Seconds from arrival to the first token; None: none came."""
    itl: Seconds | None = None
    """See `mean_itl`; None: too few tokens."""
    fault: Fault = ""
    """Who ended the request early; empty: it was answered."""
    before: Mapping[SloCause, Seconds] = {}
    """What the time to the first token was spent on."""
    after: Mapping[SloCause, Seconds] = {}
    """What the time from the first token to the last one was spent on."""


class SloVerdict(NamedTuple):
    """The labels of `pdserve_slo_total` after the model."""

    objective: SloObjective
    result: SloResult
    cause: SloCause = ""
    """What took the most of a bad request's time; empty for others."""


def judge(limits: Objectives, seen: Observed) -> list[SloVerdict]:
    """The verdict for each objective of the model and, at the end, for both together; empty
    without objectives.

    Both together are bad if one is, and its cause is that of the first bad one.
    """
    if not limits:
        return []
    verdicts: list[SloVerdict] = []
    if limits.ttft is not None:
        verdicts.append(_verdict("ttft", limits.ttft, seen.ttft, seen.before, seen.fault))
    if limits.itl is not None:
        verdicts.append(_verdict("itl", limits.itl, seen.itl, seen.after, seen.fault))
    return [*verdicts, _both(verdicts)]


def _verdict(
    objective: SloObjective,
    limit: Seconds,
    value: Seconds | None,
    parts: Mapping[SloCause, Seconds],
    fault: Fault,
) -> SloVerdict:
    if fault == "server":
        return SloVerdict(objective, "bad", "error")
    if fault == "client" or value is None:
        return SloVerdict(objective, "none")
    if value <= limit:
        return SloVerdict(objective, "good")
    fallback: SloCause = "frontend" if objective == "ttft" else "decode"
    return SloVerdict(objective, "bad", max(parts, key=parts.__getitem__, default=fallback))


def _both(verdicts: list[SloVerdict]) -> SloVerdict:
    bad = next((one for one in verdicts if one.result == "bad"), None)
    if bad is not None:
        return SloVerdict("both", "bad", bad.cause)
    good = any(one.result == "good" for one in verdicts)
    return SloVerdict("both", "good" if good else "none")


def fault_of(error: PdserveError | None) -> Fault:
    """Who ended a request with this error; a key that exceeds its own limit is the client's."""
    if error is None:
        return ""
    return "client" if isinstance(error, (RequestError, Cancelled, RateLimited)) else "server"


def mean_itl(choices: Iterable[tuple[Seconds, Seconds, int]]) -> Seconds | None:
    """The inter-token latency of a request, given first time, last time and tokens of each choice:
    the largest mean over a choice's tokens. None: no choice has two tokens."""
    means = [(last - first) / (tokens - 1) for first, last, tokens in choices if tokens > 1]
    return max(means, default=None)
