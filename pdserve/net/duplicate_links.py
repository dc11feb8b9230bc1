"""Decides which of two connections to the same node stays; both sides decide alike.

    the new connection is of ...            then
    an earlier life than the old one        it is refused: that life is over
    a later life                            the old one ends at once: its node no longer exists
    the same life, the old one retiring     the new one takes over: nothing starts on the old one
    the same life, dialled by the same one  the new one takes over: the dialler gave up the old
    the same life, dialled by the other     the one that the smaller node id dialled takes over

"Takes over" loses nothing: the other connection starts nothing new, ends what is under way, and
then closes. A plain function without state; `endpoint` calls it after each complete handshake.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Epoch, NodeId

__all__ = ["Contender", "Verdict", "resolve"]


class Verdict(Enum):
    """What becomes of a new connection, and of the one before it."""

    REFUSE = "refuse the new one: it is of an earlier life"
    REPLACE = "take the new one, end the old one at once"
    TAKE_OVER = "take the new one, let the old one finish"
    YIELD = "keep the old one, let the new one finish"


@dataclass(frozen=True, slots=True)
class Contender:
    """A connection as the decision sees it."""

    epoch: Epoch
    """Epoch of the peer."""
    dialled: bool
    """True if this node dialled it."""
    retiring: bool = False
    """True if one side has said that it starts nothing more."""


def resolve(us: NodeId, peer: NodeId, old: Contender | None, new: Contender) -> Verdict:
    """Applies the table of the module docstring; without an old connection the new one takes over
    nothing.
    """
    if old is None:
        return Verdict.TAKE_OVER
    if new.epoch != old.epoch:
        return Verdict.REPLACE if new.epoch > old.epoch else Verdict.REFUSE
    if old.retiring or new.dialled == old.dialled:
        return Verdict.TAKE_OVER
    dialled_by_smaller = new.dialled == (us < peer)
    return Verdict.TAKE_OVER if dialled_by_smaller else Verdict.YIELD
