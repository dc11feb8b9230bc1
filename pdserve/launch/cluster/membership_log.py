"""Logs membership changes: nodes that join, are suspected, die or leave.

Each event is one line with the node's role, epoch and address, so that the logs of several nodes
can be compared. It decides nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdserve.runtime.registry import MemberAppeared, MemberGone

if TYPE_CHECKING:
    from pdserve.runtime.registry import MemberEvent

__all__ = ["log_member_event"]

_log = logging.getLogger(__name__)

_OWN_ENDS = ("closed", "own rejoin")
"""Reasons for which this node, not the other member, has ended."""


def log_member_event(event: MemberEvent) -> None:
    """Logs one change; to be passed to `Node.on_member`."""
    member = event.member
    name = f"{member.role} {member.node}"
    if isinstance(event, MemberAppeared):
        _log.info("%s joined, life %d at %s", name, member.epoch, member.address)
    elif isinstance(event, MemberGone):
        if event.reason in _OWN_ENDS:
            return
        level = logging.WARNING if event.reason == "died" else logging.INFO
        _log.log(level, "%s %s, life %d", name, event.reason, member.epoch)
    elif member.suspect != event.before.suspect:
        words = "does not answer, some say" if member.suspect else "answers again"
        _log.info("%s %s, life %d", name, words, member.epoch)
