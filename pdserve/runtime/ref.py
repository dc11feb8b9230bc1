"""How to name an actor and what one can do with the name, wherever the actor is.

    Contract   what an actor takes and answers: its types on the wire
    Address    where it is: a life of a node, a name, a life of the actor
    ActorRef   tell, ask, stream, watch             implemented by `actors` and `remote`

Delivery is at most once, and nothing is repeated: a retry is the caller's decision. The error says
whether it is safe. Nothing acted on the message: `NoActor`, `Overloaded`, `LinkError` with `sent`
False. It may have: `ActorFailed`, `DeadlineExceeded`, `LinkLost` with `sent` True. Any other error
is the actor's own answer.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from pdserve.ids import Bytes, Epoch, NodeId
from pdserve.wire.codec import decoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from pdserve.ids import Seconds
    from pdserve.runtime.streams import Inlet
    from pdserve.wire.parser import Buffer

__all__ = ["WINDOW", "ActorRef", "Address", "Contract", "Terminated", "Watch"]

_log = logging.getLogger(__name__)

M = TypeVar("M")
R = TypeVar("R")

WINDOW: Final[Bytes] = 16 * 1024
"""Default credit of a stream."""


class Contract(Generic[M, R]):
    """What one kind of actor takes and what it answers with, to an ask once, to a stream often.

    Both are a Struct, or a union of tagged Structs; an answer may be None. The name travels with
    each message, so that no actor decodes what was meant for another kind.
    """

    def __init__(self, name: str, takes: Any, answers: Any) -> None:
        """Raises `TypeError` for types that could hold untyped data."""
        self.name = name
        self.decode_message: Callable[[Buffer], M] = decoder(takes)
        self.decode_answer: Callable[[Buffer], R] = decoder(answers)


class Address(msgspec.Struct, frozen=True, array_like=True):
    """One actor in the cluster; may travel inside messages."""

    node: NodeId
    epoch: Epoch
    """An address in an earlier life of the node leads nowhere."""
    name: str
    uid: int = 0
    """One life of the actor, unique within its node's; 0: whoever has the name at the time."""

    def __str__(self) -> str:
        return f"{self.name}#{self.uid}@{self.node}" if self.uid else f"{self.name}@{self.node}"


class Terminated(msgspec.Struct, frozen=True, array_like=True):
    """An actor has ended, or its node has."""

    address: Address
    failed: bool
    """False: it was stopped, or was not there."""
    reason: str


class Watch:
    """Waits for one actor's end; its callback is called at most once, and then never again."""

    __slots__ = ("_callback", "on_cancel")

    def __init__(self, callback: Callable[[Terminated], None]) -> None:
        self._callback: Callable[[Terminated], None] | None = callback
        self.on_cancel: Callable[[], None] | None = None
        """Its keeper's: forget it. Called once, whether it was cancelled or has fired."""

    def fire(self, terminated: Terminated) -> None:
        """Call back, unless that has happened or was cancelled."""
        callback = self._callback
        self.cancel()
        if callback is not None:
            try:
                callback(terminated)
            except Exception:  # the other watchers must hear of it
                _log.exception("a watcher of %s failed", terminated.address)

    def cancel(self) -> None:
        """Never call back. Idempotent."""
        self._callback = None
        forget, self.on_cancel = self.on_cancel, None
        if forget is not None:
            forget()


class ActorRef(ABC, Generic[M, R]):
    """See the module. A ref is cheap, holds nothing, and outlives its actor."""

    contract: Contract[M, R]

    @property
    @abstractmethod
    def address(self) -> Address:
        """What to send to others who want to reach the actor."""

    @abstractmethod
    def tell(self, message: M) -> None:
        """Send one way.

        Raises `NoActor` and `Overloaded` if the actor is here. If it is elsewhere, raises
        `LinkLost` (not sent) without a link, see `connect`; what happens there is not told.
        """

    @abstractmethod
    async def connect(self, *, timeout: Seconds) -> None:
        """Make a `tell` possible. Raises `NoActor`, `LinkError` (not sent)."""

    @abstractmethod
    async def ask(self, message: M, *, timeout: Seconds) -> R:
        """Send and wait for the answer.

        Raises what the module lists. Cancellation: a message that still waits is withdrawn; one
        that is being handled is finished, and its answer dropped.
        """

    @abstractmethod
    def stream(
        self, message: M, *, timeout: Seconds, window: Bytes = WINDOW
    ) -> AbstractAsyncContextManager[Inlet[R]]:
        """Send, and read a stream of answers while the context lasts.

        `timeout` is the longest wait for a connection and for each item; `window` bounds what the
        reader has not taken. Entering raises what `ask` raises, but for what comes from the actor:
        that is raised by reading. Leaving the context, however, tells the actor.
        """

    @abstractmethod
    def watch(self, callback: Callable[[Terminated], None]) -> Watch:
        """Call back exactly once, later than now, when the actor has ended: also if it has already,
        was never there, or its node is dead or in a later life. Cancel what nobody needs any more.
        """
