"""A message on its way into an actor, and who waits for what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

    from pdserve.runtime.streams import Outlet

__all__ = ["Answer", "Envelope"]

M = TypeVar("M")


class Answer(Protocol):
    """Who waits for one answer; `net.base.Call` is one."""

    def reply(self, message: Any) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Envelope(Generic[M]):
    """With neither `answer` nor `outlet`, a tell."""

    __slots__ = ("answer", "message", "outlet", "place")

    def __init__(
        self, message: M, answer: Answer | None = None, outlet: Outlet[Any] | None = None
    ) -> None:
        self.message = message
        self.answer = answer
        self.outlet = outlet
        self.place: Hashable = None
        """The mailbox's."""

    def fail(self, error: BaseException) -> bool:
        """Tell whoever waits; False: nobody does."""
        waiting = self.answer or self.outlet
        if waiting is not None:
            waiting.fail(error)
        return waiting is not None
