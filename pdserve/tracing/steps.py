"""Makes the trace of something that happens in steps, one after the other. Pure.

A planner's change and a worker's mode switch are traced so: the root lasts from the decision to the
end, and each state on the way is a span below it. Requests have `tree.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.messages.trace import Span, SpanEvent, Trace
from pdserve.tracing.tree import MAX_ATTRIBUTE

if TYPE_CHECKING:
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.messages.trace import AttributeValue

__all__ = ["StepTrace"]

_MOST_STEPS: Final = 64
_MOST_EVENTS: Final = 64
"""More are left out: an order that has to wait is repeated at every tick."""


class StepTrace:
    """Records steps and events; `built` makes the trace of them. Times are of one clock."""

    def __init__(
        self, name: str, identity: str, at: Seconds, *, model: str = "", **about: AttributeValue
    ) -> None:
        """`name` begins the names of all spans; `identity` is what an operator asks for; `about`:
        attributes of the root, without `pdserve.`; empty ones are left out."""
        self.identity = identity
        self.step = ""
        """The present one; empty: none has begun."""
        self._name, self._model = name, model
        self._begun = at
        self._about = dict(about)
        self._steps: list[tuple[str, Seconds]] = []
        self._events: list[SpanEvent] = []

    def enter(self, step: str, at: Seconds) -> None:
        """Begins a step, and ends the one before it. Nothing happens if it is the present one."""
        if step != self.step and len(self._steps) < _MOST_STEPS:
            self._steps.append((step, at))
            self.step = step

    def event(self, name: str, at: Seconds, **about: AttributeValue) -> None:
        """Something happened. A repetition of the last event is left out."""
        last = self._events[-1] if self._events else None
        same = last is not None and (last.name, last.attributes) == (name, _named(about))
        if not same and len(self._events) < _MOST_EVENTS:
            self._events.append(SpanEvent(name, max(0.0, at - self._begun), _named(about)))

    def built(
        self,
        at: Seconds,
        wall: float,
        random: Random,
        *,
        error: str = "",
        kept: str = "change",
        **about: AttributeValue,
    ) -> Trace:
        """The trace, which ends at `at`, when the wall clock shows `wall` Unix seconds. `random`
        draws its ids; `error`: why it failed; `about`: more attributes of the root."""
        first = random.getrandbits(62) + 1
        length = max(0.0, at - self._begun)
        error = error[:MAX_ATTRIBUTE]
        root = Span(
            span_id=first.to_bytes(8, "big"),
            name=self._name,
            start=0.0,
            end=length,
            attributes=_named(self._about | about),
            events=tuple(self._events),
            error=error,
        )
        ends = [*(began for _, began in self._steps[1:]), at]
        steps = tuple(
            Span(
                span_id=(first + number).to_bytes(8, "big"),
                parent_id=root.span_id,
                name=f"{self._name}.{name}",
                start=min(max(0.0, began - self._begun), length),
                end=min(max(0.0, end - self._begun), length),
                error=error if number == len(self._steps) else "",
            )
            for number, ((name, began), end) in enumerate(zip(self._steps, ends, strict=False), 1)
        )
        return Trace(
            trace_id=(random.getrandbits(128) or 1).to_bytes(16, "big"),
            began=round(1e9 * (wall - length)),
            request_id=self.identity[:MAX_ATTRIBUTE],
            model=self._model,
            kept=(kept,),
            spans=(root, *steps),
        )


def _named(about: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    """Attributes with whole names; empty ones are left out."""
    return {
        f"pdserve.{name}": value[:MAX_ATTRIBUTE] if isinstance(value, str) else value
        for name, value in about.items()
        if value != ""
    }
