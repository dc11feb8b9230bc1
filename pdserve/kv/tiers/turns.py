"""Guesses the turn of a conversation that a prompt is, from block hashes alone.

The next turn of a conversation repeats the whole prompt before it. So a prompt that contains the
last full block of an earlier prompt continues that one: its turn is one higher. A block that many
prompts continue is not a conversation but something that they share, such as a system prompt after
which a short question ended in no full block.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TurnTracker"]

_MOST: Final = 65_536
"""Prompts that are remembered by default; the least recently continued one is forgotten."""
_BRANCHES: Final = 4
"""Most prompts that continue one prompt as its next turn: answers are asked for again, and edited,
but not often."""


@dataclass(slots=True)
class _Tail:
    """The end of a prompt."""

    turn: int
    branches: int = 0
    """Prompts that continued it."""


class TurnTracker:
    """Remembers the last full block of prompts, with their turns."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._tails: OrderedDict[bytes, _Tail] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tails)

    def turn(self, hashes: Sequence[bytes]) -> int:
        """The turn of the prompt with these full blocks, 1 for a new conversation; remembers it. A
        prompt that is sent again continues the first one: it was used again, too."""
        if not hashes:
            return 1
        turn = self._continued(hashes) + 1
        tail = self._tails.setdefault(hashes[-1], _Tail(turn))
        tail.turn = max(turn, tail.turn)
        self._tails.move_to_end(hashes[-1])
        if len(self._tails) > self._most:
            self._tails.popitem(last=False)
        return turn

    def _continued(self, hashes: Sequence[bytes]) -> int:
        """The turn of the longest prompt that this one continues; 0: none."""
        for name in reversed(hashes):
            tail = self._tails.get(name)
            if tail is not None and tail.branches < _BRANCHES:
                tail.branches += 1
                return tail.turn
        return 0

    def clear(self) -> None:
        self._tails.clear()
