"""What waits for an actor: two bounded lanes, and what happens when one is full.

The system lane (timers, deaths) is taken first and drops nothing: when it is full, its owner cannot
keep up with its own life and has to end. The user lane has a policy. Every envelope put in comes
out exactly once: taken, displaced, withdrawn, or drained. It knows nothing of actors, tasks or
answers. Owned by one `actor.Cell`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from pdserve.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["Mailbox", "Policy", "Queued"]


class Queued(Protocol):
    """What a mailbox needs of an envelope."""

    message: Any
    place: Hashable
    """The mailbox's own; None: not in the user lane."""


E = TypeVar("E", bound=Queued)


@dataclass(frozen=True, slots=True)
class Policy:
    """How much may wait for an actor, and what gives way."""

    bound: int = 1024
    """Messages in the user lane: what an actor handles in well under a second."""
    at_bound: Literal["reject", "drop_oldest"] = "reject"
    """`reject`: the sender gets `Overloaded`. `drop_oldest`: the sender of the oldest does, if it
    still waits for an answer."""
    conflate: Callable[[Any], Hashable | None] | None = None
    """Key of a message: of those with one key only the newest waits, in the place of the first.
    A key of None: conflated with nothing."""
    system_bound: int = 1024
    """Messages in the system lane: an actor's timers and the deaths it watches for."""

    def __post_init__(self) -> None:
        if self.bound < 1 or self.system_bound < 1:
            raise ValueError("a lane holds at least one message")


class Mailbox(Generic[E]):
    """See above."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.displaced = 0
        """How many envelopes had to give way."""
        self._system: deque[E] = deque()
        self._user: OrderedDict[Hashable, E] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._system) + len(self._user)

    def __contains__(self, envelope: E) -> bool:
        """It waits."""
        return envelope.place is not None or envelope in self._system

    def put(self, envelope: E) -> E | None:
        """Queue in the user lane; returns the envelope that had to give way.

        Raises `Overloaded`: nothing has changed.
        """
        place = self._place_of(envelope)
        gone = self._user.get(place)
        if gone is None and len(self._user) >= self.policy.bound:
            if self.policy.at_bound == "reject":
                full = f"the mailbox is full: {self.policy.bound} messages wait"
                raise Overloaded(full, retry_after=1.0)
            _, gone = self._user.popitem(last=False)
        if gone is not None:
            gone.place = None
            self.displaced += 1
        self._user[place] = envelope
        envelope.place = place
        return gone

    def _place_of(self, envelope: E) -> Hashable:
        """A key of its own, or one shared with what it replaces."""
        if self.policy.conflate is not None:
            key = self.policy.conflate(envelope.message)
            if key is not None:
                return (key,)  # a tuple, so that no key is taken for a number
        self._count += 1
        return self._count

    def put_system(self, envelope: E) -> bool:
        """Queue in the system lane; False: it is full, and its owner must end."""
        if len(self._system) >= self.policy.system_bound:
            return False
        self._system.append(envelope)
        return True

    def take(self) -> E | None:
        """The next one: the system lane's first."""
        if self._system:
            return self._system.popleft()
        if not self._user:
            return None
        _, envelope = self._user.popitem(last=False)
        envelope.place = None
        return envelope

    def withdraw(self, envelope: E) -> bool:
        """Take back one of the user lane; False: it is not there (any more)."""
        if envelope.place is None:
            return False
        del self._user[envelope.place]
        envelope.place = None
        return True

    def withdraw_system(self, envelope: E) -> bool:
        """Take back one of the system lane, which is short."""
        try:
            self._system.remove(envelope)
        except ValueError:
            return False
        return True

    def drain(self) -> list[E]:
        """All of them, in the order they would have been taken."""
        out: list[E] = []
        while (envelope := self.take()) is not None:
            out.append(envelope)
        return out
