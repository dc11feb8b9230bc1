"""Bounds the work that one request's schemas may cost, while that work is done.

A schema of a kilobyte can need years of work: circular references, unions of unions. All code that
walks a schema or builds a grammar counts its steps and output characters here, and stops with a 400
at the bound. A budget knows no schema; it only counts.
"""

from __future__ import annotations

from typing import Final

from pdserve.errors import InvalidRequest
from pdserve.messages.grammar_limits import MAX_GRAMMAR

__all__ = ["MAX_STEPS", "SchemaBudget"]

MAX_STEPS: Final = 100_000
"""Most schemas, values and references read for one request: about 50 ms of a thread. Large sets of
tools need some thousands."""


class SchemaBudget:
    """The work left for one request. Used by one thread at a time."""

    __slots__ = ("_chars", "_max_chars", "_max_steps", "_steps", "field")

    def __init__(
        self, field: str, max_steps: int = MAX_STEPS, max_chars: int = MAX_GRAMMAR
    ) -> None:
        """`field`: the request's field that errors name; it may be changed later."""
        self.field = field
        self._max_steps = max_steps
        self._max_chars = max_chars
        self._steps = 0
        self._chars = 0

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self._steps

    @property
    def chars(self) -> int:
        """Characters made so far."""
        return self._chars

    def step(self, count: int = 1) -> None:
        """Count `count` more schemas, values or references. Raises `InvalidRequest`."""
        self._steps += count
        if self._steps > self._max_steps:
            raise self._refusal(
                f"reading it takes more than {self._max_steps} steps; send fewer or simpler "
                "schemas, with fewer unions and references in each other"
            )

    def make(self, text: str) -> str:
        """Count `text`, which becomes part of a grammar, and return it. Raises `InvalidRequest`."""
        self._chars += len(text)
        if self._chars > self._max_chars:
            raise self._refusal(
                f"with it, the tools come to a grammar of more than {self._max_chars} characters; "
                "send fewer or simpler ones, or leave 'strict' out"
            )
        return text

    def _refusal(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"'{self.field}' is too complex: {why}", param=self.field)
