"""What the log tells of other members: who came, who is suspected, who died or left.

One line each, with the member's role, life and address, so that the logs of several nodes can be
laid beside each other. It decides nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdserve.runtime.registry import Appeared, Gone

if TYPE_CHECKING:
    from pdserve.runtime.registry import MemberEvent

__all__ = ["note_member"]

_log = logging.getLogger(__name__)

_OWN_ENDS = ("closed", "own rejoin")
"""Not the member's end, but this node's."""


def note_member(event: MemberEvent) -> None:
    """Log one change; to be given to `Node.on_member`."""
    member = event.member
    name = f"{member.role} {member.node}"
    if isinstance(event, Appeared):
        _log.info("%s joined, life %d at %s", name, member.epoch, member.address)
    elif isinstance(event, Gone):
        if event.reason in _OWN_ENDS:
            return
        level = logging.WARNING if event.reason == "died" else logging.INFO
        _log.log(level, "%s %s, life %d", name, event.reason, member.epoch)
    elif member.suspect != event.before.suspect:
        words = "does not answer, some say" if member.suspect else "answers again"
        _log.info("%s %s, life %d", name, words, member.epoch)
