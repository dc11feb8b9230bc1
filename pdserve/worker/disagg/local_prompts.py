"""Knows the prompts that are computed here and have no first token yet. Pure.

The engine says after a step how much it has to compute. A step over a long prompt takes long, and
requests that come meanwhile must not all believe that they are alone. Owned by the decode handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.engine.port import Handle

__all__ = ["LocalPrompts"]


class LocalPrompts:
    """Tokens to compute, by request, in the order in which they came."""

    def __init__(self) -> None:
        self._tokens: dict[Handle, int] = {}

    def add(self, handle: Handle, tokens: int) -> None:
        """A prompt is to be computed here."""
        self._tokens[handle] = tokens

    def done(self, handle: Handle) -> None:
        """Its first token has come, or it has ended. Idempotent."""
        self._tokens.pop(handle, None)

    def backlog(self, told: int) -> int:
        """Tokens that the engine has to compute first. `told`: what it said after its last step.
        Part of the oldest prompt may be computed already, so that one counts only as told."""
        if len(self._tokens) < 2:
            return told
        oldest = next(iter(self._tokens.values()))
        return max(told, sum(self._tokens.values()) - oldest)
