"""Reports to clients where a request was placed and how soon it answered: headers and usage.

A request of several prompts has one placement per prompt. The report merges them: each name once in
prompt order, the sum of tokens, the largest attempts and times. A value that is missing for any
prompt is left out, because a partial sum is wrong. Pure.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.ids import NodeId, Seconds
from pdserve.messages.tiers import CachedSource
from pdserve.protocols.completion_responses import Served

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = [
    "HEADER_NAMES",
    "TRACE_ID_HEADER",
    "Placement",
    "PromptStats",
    "cached_by_source",
    "cached_tokens",
    "header_lines",
    "served_summary",
]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The worker of one prompt, and the router's estimates for it."""

    worker: NodeId
    router: NodeId
    policy: str
    attempts: int
    """Number of router decisions, this one included."""
    overlap_tokens: int
    """Leading prompt tokens that the router expects in the worker's pool."""
    predicted_ttft: Seconds | None
    """Seconds from the request's arrival at the frontend, as `ttft` is measured."""
    held: Seconds
    """Seconds that routers held the request, over all attempts."""
    migrations: int = 0
    """Number of migrations, the present one included."""


class PromptStats(msgspec.Struct):
    """What is known so far about how one prompt is served."""

    placement: Placement | None = None
    cached_tokens: int | None = None
    """Leading prompt tokens that the worker did not compute."""
    queue: Seconds | None = None
    """Seconds in the worker's queue."""
    prefill: Seconds | None = None
    where: str = ""
    """Where the prompt was prefilled, and why; empty if the worker had no choice."""
    image_tokens: tuple[int, ...] = ()
    """Tokens that each of the prompt's images took."""
    sources: tuple[CachedSource, ...] = ()
    """Those of `cached_tokens` that were not on the device."""
    prefill_cached: int = 0
    """Leading prompt tokens that another worker, which prefilled the prompt, did not compute."""
    prefill_sources: tuple[CachedSource, ...] = ()
    """Those of them that were not on its device."""


def served_summary(courses: Sequence[PromptStats], ttft: Seconds | None) -> Served | None:
    """The merged report; None if no prompt was placed."""
    placements = [course.placement for course in courses if course.placement is not None]
    if not placements:
        return None
    complete = len(placements) == len(courses)
    return Served(
        worker=_names([p.worker for p in placements]),
        router=_names([p.router for p in placements]),
        policy=_names([p.policy for p in placements]),
        attempts=max([p.attempts for p in placements]),
        overlap_tokens=sum([p.overlap_tokens for p in placements]) if complete else None,
        cached_tokens=cached_tokens(courses),
        cached=_cached_line(courses),
        predicted_ttft_ms=_longest([p.predicted_ttft for p in placements]),
        ttft_ms=_ms(ttft),
        held_ms=_ms(max([p.held for p in placements])),
        queue_ms=_longest([course.queue for course in courses]),
        prefill_ms=_longest([course.prefill for course in courses]),
        prefill=_names([course.where for course in courses]) or None,
        migrations=max([p.migrations for p in placements]) or None,
    )


_SOURCES: Final = ("host", "disk", "peer")
_HEADERS = (
    *("worker", "router", "policy", "attempts", "overlap_tokens", "cached_tokens", "cached"),
    *("predicted_ttft_ms", "ttft_ms", "held_ms", "prefill", "migrations"),
)
HEADER_NAMES: Final = tuple(f"x-pdserve-{name.replace('_', '-')}".encode() for name in _HEADERS)
"""Names of all headers that may be sent."""
TRACE_ID_HEADER: Final = b"x-pdserve-trace-id"
"""Name of the header with a trace's id, if it was certain from the start that the trace is kept."""
_LINES = tuple(f"{name.decode()}: %s\r\n" for name in HEADER_NAMES)
_values = attrgetter(*_HEADERS)


def header_lines(told: Served | None) -> bytes:
    """The report as whole header lines; unknown values have none."""
    if told is None:
        return b""
    known = zip(_LINES, _values(told), strict=True)
    lines = [line % value for line, value in known if value is not None and value != ""]
    return "".join(lines).encode("ascii", "replace")


def _names(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return ",".join(dict.fromkeys(name for name in names if name))


def cached_tokens(courses: Sequence[PromptStats]) -> int | None:
    """Cached tokens of all prompts together; None if unknown for any prompt."""
    known = [c.cached_tokens for c in courses if c.cached_tokens is not None]
    return sum(known) if len(known) == len(courses) else None


def cached_by_source(courses: Sequence[PromptStats]) -> dict[str, int]:
    """Cached tokens of all prompts by where they were: `device`, `host`, `disk`, `peer`; empty if
    they are unknown for any prompt. Sources without tokens are left out."""
    cached = cached_tokens(courses)
    if cached is None:
        return {}
    return _by_source(cached, [one for course in courses for one in course.sources])


def _by_source(cached: int, sources: Sequence[CachedSource]) -> dict[str, int]:
    if not sources:
        return {"device": cached} if cached else {}
    found = dict.fromkeys(("device", *_SOURCES), 0)
    for one in sources:
        found[one.source] = found.get(one.source, 0) + one.tokens
    found["device"] = max(0, cached - sum(found.values()))
    return {source: tokens for source, tokens in found.items() if tokens}


def _cached_line(courses: Sequence[PromptStats]) -> str | None:
    """Cached tokens by source, and those of the workers that prefilled; None: all of them were on
    devices, as far as is known."""
    if not any([course.sources or course.prefill_sources for course in courses]):
        return None
    if cached_tokens(courses) is None:
        return None
    here = [one for course in courses for one in course.sources]
    there = [one for course in courses for one in course.prefill_sources]
    found = cached_by_source(courses)
    before = _by_source(sum([course.prefill_cached for course in courses]), there)
    if found.keys() | before.keys() <= {"device"}:
        return None
    return "; ".join([*_parts(found, here), *_parts(before, there, "prefill-")])


def _parts(found: dict[str, int], sources: Sequence[CachedSource], prefix: str = "") -> list[str]:
    parts = [f"{prefix}{source}={tokens}" for source, tokens in found.items()]
    peers = _names([one.node for one in sources])
    return [*parts, f"{prefix}node={peers}"] if found and peers else parts


def _longest(times: Sequence[Seconds | None]) -> float | None:
    known = [time for time in times if time is not None]
    return _ms(max(known)) if len(known) == len(times) else None


def _ms(time: Seconds | None) -> float | None:
    return None if time is None else round(1000 * time, 1)
