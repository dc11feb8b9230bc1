"""Finds stop strings in a growing text and holds back no more text than needed.

The matcher is an automaton over characters (Aho-Corasick): it finds a stop string across token
borders and looks at each character once. It holds back only text that may still become a stop
string. It does not know tokens' texts or requests: the caller feeds one token's text at a time and
asks how many tokens to keep. One object belongs to one choice of one request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_CACHEABLE = 512
"""Characters of stop strings up to which an automaton is worth keeping for the next request."""
_LARGE_KEPT = 4
"""Number of larger automata kept: enough for the choices of one request, built in sequence.
The largest has 16,384 states, takes 50 ms and some megabytes."""


@dataclass(slots=True)
class _State:
    """Automaton state: the longest suffix of the text that starts some stop string."""

    next: dict[str, _State] = field(default_factory=dict)
    fail: _State | None = None
    """The next shorter such suffix; None at the root."""
    hold: int = 0
    """Characters at the end of the text that may still become a stop string."""
    found: int | None = None
    """Index of the stop string that is complete here; the first listed of several."""


def _build(stops: tuple[str, ...]) -> _State:
    root = _State()
    for index, stop in enumerate(stops):
        state = root
        for char in stop:
            state = state.next.setdefault(char, _State())
        if state.found is None:
            state.found = index
    queue = deque([(root, 0)])
    # Breadth first, so that a state's shorter suffixes are finished before it.
    while queue:
        state, depth = queue.popleft()
        _finish(state, depth)
        for char, child in state.next.items():
            child.fail = _step(state.fail, char) if state.fail is not None else root
            queue.append((child, depth + 1))
    return root


def _finish(state: _State, depth: int) -> None:
    fail = state.fail
    if state.next:
        state.hold = depth
    elif fail is not None:
        state.hold = fail.hold
    if fail is not None and fail.found is not None:
        found = fail.found if state.found is None else min(state.found, fail.found)
        state.found = found


def _step(state: _State | None, char: str) -> _State:
    """Return the next state for `char`. `state` is None only above a root."""
    while state is not None:
        following = state.next.get(char)
        if following is not None:
            return following
        if state.fail is None:
            return state
        state = state.fail
    raise AssertionError("unreachable: a root has no state above it")


_build_small = lru_cache(maxsize=128)(_build)
_build_large = lru_cache(maxsize=_LARGE_KEPT)(_build)


class StopMatcher:
    """Finds stop strings in one sequence's text.

    `stops`: non-empty strings, in order of preference where two are completed by one character.
    `include_stop`: whether the text given out ends with the stop string or before it.
    `min_tokens`: a stop string completed by one of the first so many tokens does not count.

    After a match, and after `flush`, nothing more may be fed.
    """

    __slots__ = (
        "_held",
        "_include",
        "_min_tokens",
        "_root",
        "_starts",
        "_state",
        "_stops",
        "matched",
        "tokens",
    )

    def __init__(
        self, stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._include = include_stop
        self._min_tokens = min_tokens
        small = sum(map(len, self._stops)) <= _CACHEABLE
        self._root = self._state = (_build_small if small else _build_large)(self._stops)
        self._starts = self._root.next.keys()
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""
        self.tokens = 0
        """Tokens fed so far; after a match, those to keep: up to the one that completed it."""

    def feed(self, text: str, tokens: int = 1) -> str:
        """Take what `tokens` more tokens added to the text; return what can be shown now.

        Feed token by token to learn exactly which one completed a stop string.
        """
        self.tokens += tokens
        state = self._state
        if state is self._root and self._starts.isdisjoint(text):
            return text
        live = self.tokens > self._min_tokens
        for index, char in enumerate(text):
            following = state.next.get(char)
            state = _step(state, char) if following is None else following
            if state.found is not None and live:
                return self._cut(self._held + text[: index + 1], self._stops[state.found])
        self._state = state
        return self._keep(self._held + text, state.hold)

    def flush(self) -> str:
        """End the text without a match; return what was held back."""
        text, self._held = self._held, ""
        return text

    def _cut(self, text: str, stop: str) -> str:
        self.matched = stop
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)]

    def _keep(self, text: str, hold: int) -> str:
        shown = len(text) - hold
        self._held = text[shown:]
        return text[:shown]
