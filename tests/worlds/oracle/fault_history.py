"""Records the faults of a world, with place and time, and the requests: what may excuse an end.

It asks the product nothing: faults are noted by the code that makes them, requests by their
clients."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

from tests.worlds.faults import GENTLE

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from pdserve.ids import Seconds
    from tests.worlds.faults import Fault

__all__ = ["FaultHistory"]

_EVERYBODY: Final = ("partition", "kv-late", "kv-lost", "kv-wrong", "kv-slow")
"""Faults that may concern any host."""
_KEEPS: Final[Seconds] = 60.0
"""What is over for longer excuses nothing."""


@dataclass(slots=True)
class _Span:
    fault: Fault
    since: Seconds
    until: Seconds = inf


class FaultHistory:
    """The faults and requests of one world."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []
        self._ends: deque[tuple[Seconds, int]] = deque()
        """Times when requests ended, in order, with the engine steps that each takes."""

    # ------------------------------------------------------------------ what happens

    def begins(self, fault: Fault, now: Seconds) -> None:
        """The fault lasts from now on."""
        self._spans = [span for span in self._spans if span.until > now - _KEEPS]
        self._spans.append(_Span(fault, now))

    def ends(self, fault: Fault, now: Seconds) -> None:
        """Notes the end of a fault."""
        for span in self._spans:
            if span.fault is fault:
                span.until = now

    def request_ended(self, now: Seconds, steps: int = 0) -> None:
        """Notes the end of a request, in any way, also with its frontend."""
        self._ends.append((now, steps))
        while self._ends[0][0] < now - _KEEPS:
            self._ends.popleft()

    # ------------------------------------------------------------------ what it excuses

    def any_since(self, since: Seconds, *, disturbing: bool = False) -> bool:
        """A fault has lasted since then; `disturbing`: one that keeps words from arriving."""
        return any(span.fault.disturbs or not disturbing for span in self._since(since))

    def any_but(self, kinds: Container[str], since: Seconds) -> bool:
        """A fault of another kind than these has lasted since then."""
        return any(span.fault.kind not in kinds for span in self._since(since))

    def touched(self, hosts: Container[str], since: Seconds, *, but: Container[str] = ()) -> bool:
        """A fault that concerns one of these hosts, of another kind than `but`, has lasted since
        then."""
        return any(
            span.fault.kind in _EVERYBODY or span.fault.a in hosts or span.fault.b in hosts
            for span in self._since(since)
            if span.fault.kind not in but
        )

    def longest_silence(self, since: Seconds, now: Seconds) -> Seconds:
        """Longest time without a break in which a node may have been silent because of faults since
        then. Faults that follow each other count as one."""
        longest, begin, end = 0.0, -inf, -inf
        for span in sorted(self._since(since), key=lambda span: span.since):
            if span.fault.kind in GENTLE or not span.fault.disturbs:
                continue
            if span.since > end:
                begin = span.since
            end = max(end, min(span.until, now))
            longest = max(longest, end - begin)
        return longest

    def ended_since(self, since: Seconds) -> int:
        """Requests."""
        return sum(at >= since for at, _ in self._ends)

    def steps_since(self, since: Seconds) -> int:
        """Number of steps of the requests that have ended since then."""
        return sum(steps for at, steps in self._ends if at >= since)

    def _since(self, since: Seconds) -> Iterator[_Span]:
        return (span for span in self._spans if span.until >= since)
