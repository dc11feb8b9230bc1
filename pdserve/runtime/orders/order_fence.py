"""Refuses orders of planners that come too late.

Each owner of a model has a term, greater than those of the owners before it, and numbers its plans.
A message that was delayed, or a planner that was cut off and does not know its successor, would
undo what a later plan has ordered. An operator's orders have no term and are always obeyed. Pure.
"""

from __future__ import annotations

__all__ = ["OrderFence"]


class OrderFence:
    """The newest planner's order that one receiver has obeyed."""

    def __init__(self) -> None:
        self._last = (0, 0)

    @property
    def newest(self) -> int:
        """The term of that order; 0: there was none."""
        return self._last[0]

    def refusal(self, term: int, number: int) -> str:
        """Why an order with this term and number is too late; empty: it is not. The same order may
        come twice, because its answer was lost."""
        if not term or (term, number) >= self._last:
            return ""
        last_term, last = self._last
        return (
            f"stale: a later planner has ordered it (plan {last} of term {last_term}, and this is "
            f"plan {number} of term {term})"
        )

    def obeyed(self, term: int, number: int) -> None:
        """Notes an order that is carried out."""
        if term:
            self._last = max(self._last, (term, number))
